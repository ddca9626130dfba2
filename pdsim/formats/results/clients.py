"""Reads results of load generators, each as a summary. A number that a tool does not report is missing in the summary,
and never 0.
"""

from collections.abc import Iterable
from typing import Any

from pdsim.formats.results.fields import ResultFields, statistics_of
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import STATISTICS, statistics
from pdsim.scenario.yaml_file import ConfigError

_SGLANG_COUNTS = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "max_concurrency", "concurrency",
)  # fmt: skip
_SGLANG_RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
_SGLANG_TIMES = tuple(f"{s}_{latency}_ms" for latency in ("e2e_latency", "ttft", "tpot", "itl") for s in STATISTICS)
_SGLANG_SAME = {name: name for name in (*_SGLANG_COUNTS, *_SGLANG_RATES, "accept_length", *_SGLANG_TIMES)}
_VLLM = {"total_token_throughput": "total_throughput"} | {f"{s}_e2el_ms": f"{s}_e2e_latency_ms" for s in STATISTICS}


def sglang(result: ResultFields) -> dict[str, float]:
    return _with_rates(result.numbers(_SGLANG_SAME))


def vllm(result: ResultFields) -> dict[str, float]:
    return _with_rates(result.numbers(_SGLANG_SAME | _VLLM))


def _with_rates(summary: dict[str, float]) -> dict[str, float]:
    """Returns the summary with rates per second of requests and tokens, if the summary has totals and a duration. Rates
    that the summary already has stay.
    """
    duration = summary.get("duration") or 0
    inputs, outputs = (summary.get(f"total_{what}_tokens") for what in ("input", "output"))
    whole_total = None if inputs is None or outputs is None else inputs + outputs
    totals = {"request": summary.get("completed"), "input": inputs, "output": outputs, "total": whole_total}
    rates = {f"{name}_throughput": total / duration for name, total in totals.items() if duration > 0 and total}
    return {**rates, **summary}


_AIPERF_LATENCIES = {"request_latency": "e2e_latency", "time_to_first_token": "ttft", "inter_token_latency": "tpot"}
_AIPERF_STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_AIPERF_TOTALS = {
    "request_count": "completed",
    "total_isl": "total_input_tokens",
    "total_osl": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_throughput",
}
_AIPERF_LENGTHS = {"input_sequence_length": "total_input_tokens", "output_sequence_length": "total_output_tokens"}
"""AIPerf's mean lengths, each with the field of a summary that has the total of this length. If the file has no totals,
a total is the mean times the number of requests.
"""
_AIPERF_DURATION = "benchmark_duration"
_AIPERF_IN_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_AIPERF_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def aiperf(result: ResultFields) -> dict[str, float]:
    """The summary of a result of AIPerf, or of GenAI-Perf, which uses the same names. Early releases of AIPerf put
    metrics into `records`.
    """
    result = result.part("records") if isinstance(result.get("records"), dict) else result
    summary: dict[str, float] = {}
    for theirs, ours in _AIPERF_TOTALS.items():
        if theirs in result:
            summary |= result.part(theirs).numbers({"avg": ours})
    if _AIPERF_DURATION in result:
        duration = result.part(_AIPERF_DURATION)
        summary |= duration.numbers({"avg": "duration"}, duration.unit("unit", _AIPERF_IN_S))
    for theirs, ours in _AIPERF_LATENCIES.items():
        if theirs in result:
            latency = result.part(theirs)
            summary |= latency.numbers(statistics_of(ours, _AIPERF_STATISTICS), latency.unit("unit", _AIPERF_IN_MS))
    for theirs, ours in _AIPERF_LENGTHS.items():
        mean = result.part(theirs).number("avg") if theirs in result else None
        if mean is not None and "completed" in summary:
            summary.setdefault(ours, round(mean * summary["completed"]))
    return summary


_INFERENCEX_LATENCIES = {"e2el": "e2e_latency", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
_INFERENCEX_TIMES = {
    f"{s}_{theirs}": f"{s}_{ours}_ms" for theirs, ours in _INFERENCEX_LATENCIES.items() for s in STATISTICS
}


def inferencex(row: ResultFields) -> dict[str, float]:
    is_pair = row.get("disagg") in (True, "true", "True")
    sizes = ("num_prefill_gpu", "num_decode_gpu") if is_pair else ("tp",)
    if missing := [name for name in sizes if not row.get(name)]:
        raise ConfigError(
            f"{row.where}: InferenceX's row has no {', '.join(missing)}, by which its rates per GPU are divided"
        )
    gpus = [row.count(name) for name in sizes]
    return {
        **row.numbers(_INFERENCEX_TIMES, 1e3),
        **row.numbers({"tput_per_gpu": "total_throughput"}, sum(gpus)),
        **row.numbers({"output_tput_per_gpu": "output_throughput"}, gpus[-1]),
        **row.numbers({"input_tput_per_gpu": "input_throughput"}, gpus[0]),
        **({"max_concurrency": row.count("conc")} if row.get("conc") else {}),
    }


_RECORD_TIMES = {"request_latency": "e2e_latency", "time_to_first_token": "ttft", "inter_token_latency": "tpot"}
_RECORD_ENDS = ("request_start_ns", "request_end_ns")


def aiperf_records(rows: Iterable[ResultFields]) -> dict[str, Any]:
    """The summary of AIPerf's records of single requests, without warm-up and without failed requests. A total is left
    out if one of the records lacks the number.
    """
    times: dict[str, list[float]] = {ours: [] for ours in _RECORD_TIMES.values()}
    numbers: dict[str, list[float | None]] = {name: [] for name in (*_AIPERF_LENGTHS, *_RECORD_ENDS)}
    num_records = 0
    for row in rows:
        metadata = row.part("metadata")
        if metadata.get("benchmark_phase") not in (None, "profiling") or row.get("error"):
            continue
        metrics = row.part("metrics")
        for theirs, ours in _RECORD_TIMES.items():
            if theirs in metrics:
                latency = metrics.part(theirs)
                if (value := latency.number("value")) is not None:
                    times[ours].append(value * latency.unit("unit", _AIPERF_IN_MS))
        for name in _AIPERF_LENGTHS:
            numbers[name].append(metrics.part(name).number("value") if name in metrics else None)
        for name in _RECORD_ENDS:
            numbers[name].append(metadata.number(name))
        num_records += 1
    if not num_records:
        return {}
    summary: dict[str, Any] = {"completed": num_records}
    whole = {name: [one for one in of_all if one is not None] for name, of_all in numbers.items() if None not in of_all}
    if whole.keys() >= set(_RECORD_ENDS):
        begins, ends = (whole[name] for name in _RECORD_ENDS)
        summary["duration"] = (max(ends) - min(begins)) / 1e9
    summary |= {ours: round(sum(whole[theirs])) for theirs, ours in _AIPERF_LENGTHS.items() if theirs in whole}
    summary = _with_rates(summary)
    for ours, times_ms in times.items():
        found = statistics(ours, Samples(times_ms)) if times_ms else {}
        summary |= {name: value_ms for name, value_ms in found.items() if value_ms is not None}
    return summary
