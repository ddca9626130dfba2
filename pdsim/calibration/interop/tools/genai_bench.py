"""genai-bench: one file of a scenario and load, with times in seconds unless it says otherwise."""

from math import isclose

from pdsim.calibration.interop.tools.fields import Fields, statistics_of

_STATISTICS = {"mean": "mean", "p50": "median", "stddev": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_TOTALS = {
    "run_duration": "duration",
    "num_completed_requests": "completed",
    "requests_per_second": "request_throughput",
}
_TOKEN_RATES = {
    "mean_input_throughput_tokens_per_s": "input_throughput",
    "mean_output_throughput_tokens_per_s": "output_throughput",
    "mean_total_tokens_throughput_tokens_per_s": "total_throughput",
}
_IN_MS = {"s": 1e3, "ms": 1.0}


def genai_bench(result: Fields) -> dict[str, float]:
    """A latency that was not measured is null or 0 there."""
    metrics = result.part("aggregated_metrics")
    stats = metrics.part("stats")
    in_ms = result.unit("_time_unit", _IN_MS) if "_time_unit" in result else _IN_MS["s"]
    summary = metrics.numbers(_TOTALS)
    for latency in ("e2e_latency", "ttft", "tpot"):
        times = stats.part(latency)
        if times.number("mean"):
            summary |= times.numbers(statistics_of(latency, _STATISTICS), in_ms)
    if _counts_all_tokens(metrics, stats):
        summary |= metrics.numbers(_TOKEN_RATES)
        summary |= stats.part("num_input_tokens").numbers({"sum": "total_input_tokens"})
        summary |= stats.part("num_output_tokens").numbers({"sum": "total_output_tokens"})
    if metrics.get("iteration_type") == "num_concurrency" and "total_arrivals" not in metrics:
        summary |= metrics.numbers({"num_concurrency": "max_concurrency"})
    return summary


def _counts_all_tokens(metrics: Fields, stats: Fields) -> bool:
    """Its statistics leave out warm-up and cool-down, but the time through which it divides tokens does not."""
    tokens = stats.part("num_input_tokens")
    mean, completed = tokens.number("mean"), metrics.number("num_completed_requests")
    return mean is not None and completed is not None and isclose(mean * completed, tokens.number("sum") or 0)
