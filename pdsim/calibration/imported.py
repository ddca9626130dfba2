"""Results of load generators against real deployments, as a summary of ours: what is defined alike has one name.

tool         file                              TPOT is called                  ITL
SGLang       JSON lines of bench_serving       tpot                            gap between tokens
vLLM         JSON of `vllm bench serve`        tpot                            gap between chunks
AIPerf       profile_export_aiperf.json        inter_token_latency             none: its inter_chunk_latency is a list
InferenceX   agg_*.json, one row or an array   tpot, in seconds                gap between chunks

A field that a tool does not report is absent, and never 0.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.metrics.definitions import STATISTICS
from pdsim.scenario.yaml_file import ConfigError

_LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")
_COUNTS = ("duration", "completed", "total_input_tokens", "total_output_tokens", "max_concurrency", "concurrency")
_RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
_AIPERF = {"request_latency": "e2e_latency", "time_to_first_token": "ttft", "inter_token_latency": "tpot"}
_AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_AIPERF_TOTALS = {
    "benchmark_duration": "duration",
    "request_count": "completed",
    "total_isl": "total_input_tokens",
    "total_osl": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_throughput",
}
_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
_IN_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


class Imported(NamedTuple):
    name: str
    tool: str
    summary: dict[str, Any]


def read_results(path: Path) -> list[Imported]:
    """One for each line or element of the file. Raises ConfigError for what no tool writes."""
    found = [_imported(path, number, row) for number, row in enumerate(_rows(path), start=1)]
    if not found:
        raise ConfigError(f"{path} has no results")
    return found


def _rows(path: Path) -> Iterator[Any]:
    """Of a JSON object, an array, or lines of objects. Infinity, which SGLang writes, is read."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as wrong:
                    raise ConfigError(f"{path}, line {number}: not JSON: {wrong.msg}") from None
        return
    yield from whole if isinstance(whole, list) else [whole]


def _imported(path: Path, number: int, row: Any) -> Imported:
    where = f"{path}, result {number}"
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
    if "aiperf_version" in row or isinstance(row.get("request_latency"), dict):
        return Imported(_name(path, number, None), "AIPerf", _aiperf(row, where))
    if "tput_per_gpu" in row:
        return Imported(_name(path, number, row.get("infmax_model_prefix")), "InferenceX", _inferencex(row, where))
    if "mean_e2e_latency_ms" in row:
        return Imported(_name(path, number, row.get("tag")), "SGLang", _known(row))
    if "mean_ttft_ms" in row:
        return Imported(_name(path, number, row.get("label")), "vLLM", _vllm(row))
    raise ConfigError(
        f"{where} is no result of SGLang's bench_serving, vLLM's bench serve, AIPerf or InferenceX: "
        f"it has {', '.join(list(row)[:12]) or 'no fields'}"
    )


def _name(path: Path, number: int, told: Any) -> str:
    return f"{told or path.stem}" + (f" #{number}" if number > 1 else "")


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that mean in the tool what they mean in a summary."""
    times = [f"{statistic}_{latency}_ms" for latency in _LATENCIES for statistic in STATISTICS]
    return {name: row[name] for name in (*_COUNTS, *_RATES, "accept_length", *times) if row.get(name) is not None}


def _vllm(row: Mapping[str, Any]) -> dict[str, Any]:
    e2e = {f"{s}_e2e_latency_ms": row.get(f"{s}_e2el_ms") for s in STATISTICS}
    return _known({**row, **e2e, "total_throughput": row.get("total_token_throughput")})


def _aiperf(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for theirs, ours in _AIPERF_TOTALS.items():
        if isinstance(metric := row.get(theirs), dict):
            factor = _factor(metric, _IN_S, f"{where}: {theirs}") if ours == "duration" else 1
            summary[ours] = metric["avg"] * factor
    for theirs, ours in _AIPERF.items():
        if isinstance(metric := row.get(theirs), dict):
            factor = _factor(metric, _IN_MS, f"{where}: {theirs}")
            summary |= {
                f"{statistic}_{ours}_ms": metric[name] * factor
                for name, statistic in _AIPERF_STATISTICS.items()
                if metric.get(name) is not None
            }
    return summary


def _factor(metric: Mapping[str, Any], units: Mapping[str, float], where: str) -> float:
    if metric.get("unit") not in units:
        raise ConfigError(f"{where}: no unit {metric.get('unit')!r}; there are {', '.join(units)}")
    return units[metric["unit"]]


def _inferencex(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Times are in seconds. Output is told per decode GPU and input per prefill GPU, if the roles have their own."""
    names = {"e2el": "e2e_latency", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
    summary = {
        f"{statistic}_{ours}_ms": 1e3 * row[f"{statistic}_{theirs}"]
        for theirs, ours in names.items()
        for statistic in STATISTICS
        if row.get(f"{statistic}_{theirs}") is not None
    }
    is_pair = row.get("disagg") in {True, "true", "True"}
    sizes = ("num_prefill_gpu", "num_decode_gpu") if is_pair else ("tp",)
    if missing := [name for name in sizes if not row.get(name)]:
        raise ConfigError(f"{where}: InferenceX's row has no {', '.join(missing)}, which its rates per GPU are of")
    if is_pair:
        prefill, decode = (int(row[name]) for name in sizes)
        gpus = {"total_throughput": prefill + decode, "output_throughput": decode, "input_throughput": prefill}
    else:
        gpus = dict.fromkeys(("total_throughput", "output_throughput", "input_throughput"), int(row["tp"]))
    per_gpu = {
        "total_throughput": "tput_per_gpu",
        "output_throughput": "output_tput_per_gpu",
        "input_throughput": "input_tput_per_gpu",
    }
    summary |= {ours: row[theirs] * gpus[ours] for ours, theirs in per_gpu.items() if row.get(theirs) is not None}
    return {**summary, **({"max_concurrency": int(row["conc"])} if row.get("conc") else {})}
