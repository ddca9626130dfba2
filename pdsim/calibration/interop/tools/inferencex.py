"""Rows of InferenceX, with times in seconds; output is told per decode GPU and input per prefill GPU of a pair."""

from pdsim.calibration.interop.tools.fields import Fields
from pdsim.metrics.summary import STATISTICS
from pdsim.scenario.yaml_file import ConfigError

_LATENCIES = {"e2el": "e2e_latency", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
_TIMES = {f"{s}_{theirs}": f"{s}_{ours}_ms" for theirs, ours in _LATENCIES.items() for s in STATISTICS}


def inferencex(row: Fields) -> dict[str, float]:
    is_pair = row.get("disagg") in (True, "true", "True")
    sizes = ("num_prefill_gpu", "num_decode_gpu") if is_pair else ("tp",)
    if missing := [name for name in sizes if not row.get(name)]:
        raise ConfigError(f"{row.where}: InferenceX's row has no {', '.join(missing)}, which its rates per GPU are of")
    gpus = [row.count(name) for name in sizes]
    return {
        **row.numbers(_TIMES, 1e3),
        **row.numbers({"tput_per_gpu": "total_throughput"}, sum(gpus)),
        **row.numbers({"output_tput_per_gpu": "output_throughput"}, gpus[-1]),
        **row.numbers({"input_tput_per_gpu": "input_throughput"}, gpus[0]),
        **({"max_concurrency": row.count("conc")} if row.get("conc") else {}),
    }
