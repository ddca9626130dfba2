"""AIPerf's profile_export_aiperf.json."""

from pdsim.calibration.interop.tools.fields import Fields, statistics_of

_LATENCIES = {"request_latency": "e2e_latency", "time_to_first_token": "ttft", "inter_token_latency": "tpot"}
_STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_TOTALS = {
    "request_count": "completed",
    "total_isl": "total_input_tokens",
    "total_osl": "total_output_tokens",
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_throughput",
}
_DURATION = "benchmark_duration"
_IN_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def aiperf(result: Fields) -> dict[str, float]:
    summary: dict[str, float] = {}
    for theirs, ours in _TOTALS.items():
        if theirs in result:
            summary |= result.part(theirs).numbers({"avg": ours})
    if _DURATION in result:
        duration = result.part(_DURATION)
        summary |= duration.numbers({"avg": "duration"}, duration.unit("unit", _IN_S))
    for theirs, ours in _LATENCIES.items():
        if theirs in result:
            latency = result.part(theirs)
            summary |= latency.numbers(statistics_of(ours, _STATISTICS), latency.unit("unit", _IN_MS))
    return summary
