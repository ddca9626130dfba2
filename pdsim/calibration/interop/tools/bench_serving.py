"""SGLang's bench_serving, whose names are ours, and `vllm bench serve`, which has most of them."""

from pdsim.calibration.interop.tools.fields import Fields
from pdsim.metrics.summary import STATISTICS

_COUNTS = ("duration", "completed", "total_input_tokens", "total_output_tokens", "max_concurrency", "concurrency")
_RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
_TIMES = tuple(f"{s}_{latency}_ms" for latency in ("e2e_latency", "ttft", "tpot", "itl") for s in STATISTICS)
_SAME = {name: name for name in (*_COUNTS, *_RATES, "accept_length", *_TIMES)}
_VLLM = {"total_token_throughput": "total_throughput"} | {f"{s}_e2el_ms": f"{s}_e2e_latency_ms" for s in STATISTICS}


def sglang(result: Fields) -> dict[str, float]:
    return result.numbers(_SAME)


def vllm(result: Fields) -> dict[str, float]:
    return result.numbers(_SAME | _VLLM)
