"""Reads the reports of GuideLLM, genai-bench, DynoSim, inference-perf and llm-d."""

import re
from math import isclose
from typing import Any

from pdsim.formats.results.fields import ResultFields, statistics_of
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import STATISTICS, statistics
from pdsim.scenario.yaml_file import ConfigError

_GUIDELLM_VERSIONS = (None, 1, 2)
_GUIDELLM_MOMENTS = {"mean": "mean", "median": "median", "std_dev": "std"}
_GUIDELLM_PERCENTILES = {"p90": "p90", "p95": "p95", "p99": "p99"}
_GUIDELLM_MEANS = {
    "requests_per_second": "request_throughput",
    "prompt_tokens_per_second": "input_throughput",
    "output_tokens_per_second": "output_throughput",
    "tokens_per_second": "total_throughput",
    "request_concurrency": "concurrency",
}
_GUIDELLM_TOKENS = {"prompt_token_count": "total_input_tokens", "output_token_count": "total_output_tokens"}
_GUIDELLM_TPOT = "inter_token_latency_ms"


def benchmarks_of(report: dict[str, Any], where: str) -> list[Any]:
    """The benchmarks in a report of GuideLLM. Raises ConfigError if the report gives a version other than 1 and 2, or
    if `benchmarks` is no array. where: names the file in messages.
    """
    metadata = report.get("metadata")
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version not in _GUIDELLM_VERSIONS:
        raise ConfigError(
            f"{where}: metadata.version: pdsim reads versions 1 and 2 of GuideLLM's reports, found {version!r}"
        )
    if not isinstance(found := report["benchmarks"], list):
        raise ConfigError(f"{where}: benchmarks: expected an array, found {type(found).__name__}")
    return found


def load_of(benchmark: ResultFields) -> str:
    """The load of a benchmark as GuideLLM writes it: concurrent@16, constant@2.5, synchronous."""
    strategy = _strategy(benchmark)
    amount = strategy.get("streams") or strategy.get("rate")
    return f"{strategy.get('type_')}" + (f"@{amount:g}" if isinstance(amount, int | float) else "")


def _strategy(benchmark: ResultFields) -> ResultFields:
    """The strategy of a benchmark of GuideLLM, such as a constant rate. The strategy is in `config` or, before version
    2 of the report, in `args`.
    """
    return benchmark.part("config" if "config" in benchmark else "args").part("strategy")


def guidellm(benchmark: ResultFields) -> dict[str, float]:
    metrics = benchmark.part("metrics")
    summary = benchmark.numbers({"duration": "duration"})
    summary |= _guidellm_totals(benchmark).numbers({"successful": "completed"})
    summary |= _strategy(benchmark).numbers({"streams": "max_concurrency"})
    for theirs, ours in _GUIDELLM_MEANS.items():
        summary |= _guidellm_successful(metrics, theirs).numbers({"mean": ours})
    for theirs, ours in _GUIDELLM_TOKENS.items():
        sums = _guidellm_successful(metrics, theirs).numbers({"total_sum": ours}) if theirs in metrics else {}
        summary |= {name: round(total) for name, total in sums.items()}  # it is a mean times a count there
    summary |= _guidellm_times(_guidellm_successful(metrics, "request_latency"), "e2e_latency", in_ms=1e3)
    summary |= _guidellm_times(_guidellm_successful(metrics, "time_to_first_token_ms"), "ttft")
    if mean_ms := _guidellm_successful(metrics, _GUIDELLM_TPOT).number("mean"):
        summary |= {"mean_itl_ms": mean_ms} | _guidellm_tpot(benchmark, metrics)
    return summary


def _guidellm_totals(benchmark: ResultFields) -> ResultFields:
    """The object with the numbers of requests, which versions of GuideLLM have in three different places. Empty: none
    has it.
    """
    for part, name in (("metrics", "request_totals"), ("", "request_totals"), ("run_stats", "requests_made")):
        holder = benchmark.part(part) if part and part in benchmark else benchmark
        if name in holder:
            return holder.part(name)
    return ResultFields({}, benchmark.where)


def _guidellm_successful(metrics: ResultFields, name: str) -> ResultFields:
    """The values of a metric for requests that succeeded. Empty: the report lacks the metric."""
    if name not in metrics:
        return ResultFields({}, metrics.where)
    return metrics.part(name).part("successful")


def _guidellm_times(distribution: ResultFields, latency: str, in_ms: float = 1) -> dict[str, float]:
    """The statistics of a time, such as TTFT, as fields of a summary. distribution: the report's statistics of the
    time. latency: name of the time in the summary's fields. in_ms: factor from the report's unit to ms. Returns no
    field if the mean is missing or 0: then nothing was measured, for example because answers were not streamed.
    """
    if not distribution.number("mean"):
        return {}
    has_percentiles = "percentiles" in distribution
    part = distribution.part("percentiles") if has_percentiles else ResultFields({}, distribution.where)
    percentiles = part.numbers(statistics_of(latency, _GUIDELLM_PERCENTILES), in_ms)
    return distribution.numbers(statistics_of(latency, _GUIDELLM_MOMENTS), in_ms) | percentiles


def _guidellm_tpot(benchmark: ResultFields, metrics: ResultFields) -> dict[str, float]:
    """Statistics of TPOT in which each request counts once, as fields of a summary. GuideLLM's own statistics count
    each gap between tokens once, so their mean is the mean ITL.

    If all requests have equally many output tokens, GuideLLM's own statistics also count each request equally, and are
    returned. Otherwise the statistics are computed from single requests. Empty: the file lacks some of these requests.
    """
    lengths = _guidellm_successful(metrics, "output_token_count")
    shortest, longest = lengths.number("min"), lengths.number("max")
    if shortest is not None and shortest == longest:
        return _guidellm_times(_guidellm_successful(metrics, _GUIDELLM_TPOT), "tpot")
    if "requests" not in benchmark:
        return {}
    requests = benchmark.part("requests").parts("successful")
    if len(requests) != _guidellm_totals(benchmark).number("successful"):
        return {}
    times_ms = (one.number(_GUIDELLM_TPOT) for one in requests)
    found = statistics("tpot", Samples(each_ms for each_ms in times_ms if each_ms is not None))
    return {name: value_ms for name, value_ms in found.items() if value_ms is not None}


_GENAI_STATISTICS = {"mean": "mean", "p50": "median", "stddev": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_GENAI_TOTALS = {
    "run_duration": "duration",
    "num_completed_requests": "completed",
    "requests_per_second": "request_throughput",
}
_GENAI_TOKEN_RATES = {
    "mean_input_throughput_tokens_per_s": "input_throughput",
    "mean_output_throughput_tokens_per_s": "output_throughput",
    "mean_total_tokens_throughput_tokens_per_s": "total_throughput",
}
_GENAI_IN_MS = {"s": 1e3, "ms": 1.0}


def genai_bench(result: ResultFields) -> dict[str, float]:
    """The summary of a result of genai-bench. A latency that was not measured is null or 0 in the file, and is left
    out.
    """
    metrics = result.part("aggregated_metrics")
    stats = metrics.part("stats")
    in_ms = result.unit("_time_unit", _GENAI_IN_MS) if "_time_unit" in result else _GENAI_IN_MS["s"]
    summary = metrics.numbers(_GENAI_TOTALS)
    for latency in ("e2e_latency", "ttft", "tpot"):
        times = stats.part(latency)
        if times.number("mean"):
            summary |= times.numbers(statistics_of(latency, _GENAI_STATISTICS), in_ms)
    if _counts_all_tokens(metrics, stats):
        summary |= metrics.numbers(_GENAI_TOKEN_RATES)
        summary |= stats.part("num_input_tokens").numbers({"sum": "total_input_tokens"})
        summary |= stats.part("num_output_tokens").numbers({"sum": "total_output_tokens"})
    if metrics.get("iteration_type") == "num_concurrency" and "total_arrivals" not in metrics:
        summary |= metrics.numbers({"num_concurrency": "max_concurrency"})
    return summary


def _counts_all_tokens(metrics: ResultFields, stats: ResultFields) -> bool:
    """True if the report counts the tokens of all completed requests. False: the report lacks the numbers to tell, or
    leaves out the tokens of warm-up or cool-down requests. In the second case the report's tokens per second are too
    few, because it divides by the time of all requests. metrics: the report's section with the number of completed
    requests. stats: the report's section with the token counts.
    """
    tokens = stats.part("num_input_tokens")
    mean, completed = tokens.number("mean"), metrics.number("num_completed_requests")
    return mean is not None and completed is not None and isclose(mean * completed, tokens.number("sum") or 0)


_DYNOSIM_TOTALS = {
    "completed_requests": "completed",
    "total_input_tokens": "total_input_tokens",
    "total_output_tokens": "total_output_tokens",
    "request_throughput_rps": "request_throughput",
    "input_throughput_tok_s": "input_throughput",
    "output_throughput_tok_s": "output_throughput",
    "total_throughput_tok_s": "total_throughput",
}


def is_dynosim(result: ResultFields) -> bool:
    return "request_throughput_rps" in result or {"summary", "coverage"} <= set(result)


def dynosim(result: ResultFields) -> dict[str, float]:
    """The summary of a report of DynoSim. A latency without samples is 0 in the file, and is left out. ITL is read from
    token_gap if the report has it, because the field itl is TPOT in a report with token_gap; otherwise from itl.
    """
    report = result.part("summary") if "summary" in result else result
    summary = report.numbers({"duration_ms": "duration"}, 1e-3) | report.numbers(_DYNOSIM_TOTALS)
    gaps = "token_gap" if "mean_token_gap_ms" in report else "itl"
    for theirs, ours in {"e2e_latency": "e2e_latency", "ttft": "ttft", "tpot": "tpot", gaps: "itl"}.items():
        if report.number(f"mean_{theirs}_ms"):
            summary |= report.numbers({f"{s}_{theirs}_ms": f"{s}_{ours}_ms" for s in STATISTICS})
    return summary


_LATENCIES = {
    "request_latency": "e2e_latency",
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
}
"""Latencies in the reports of inference-perf and llm-d, with their names in summaries. Other latencies of these reports
mean other quantities, and are left out.
"""
_STATISTICS = {
    "mean": "mean", "median": "median", "p50": "median", "std": "std", "stddev": "std",
    "p90": "p90", "p95": "p95", "p99": "p99",
}  # fmt: skip
_RATES = {
    "requests_per_sec": "request_throughput",
    "input_tokens_per_sec": "input_throughput",
    "output_tokens_per_sec": "output_throughput",
    "total_tokens_per_sec": "total_throughput",
}


def inference_perf(result: ResultFields) -> dict[str, float]:
    """The summary of a report of inference-perf. Its latencies are in s. Totals are mean lengths times the number of
    requests.
    """
    successes = result.part("successes")
    summary = successes.numbers({"count": "completed"})
    if "load_summary" in result:
        load = {"achieved_rate": "request_throughput", "concurrency": "max_concurrency"}
        summary |= result.part("load_summary").numbers(load)
    if "throughput" in successes:
        summary |= successes.part("throughput").numbers(_RATES)
    latencies = successes.part("latency") if "latency" in successes else None
    for theirs, ours in _LATENCIES.items():
        if latencies is not None and theirs in latencies:
            summary |= latencies.part(theirs).numbers(statistics_of(ours, _STATISTICS), 1e3)
    for theirs, ours in {"prompt_len": "total_input_tokens", "output_len": "total_output_tokens"}.items():
        mean = successes.part(theirs).number("mean") if theirs in successes else None
        if mean is not None and "completed" in summary:
            summary[ours] = round(mean * summary["completed"])
    return summary


_IN_MS = {"ms": 1.0, "ms/token": 1.0, "s": 1e3, "s/token": 1e3, "us": 1e-3, "ns": 1e-6}
_REPORTED_RATES = {
    "request_rate": "request_throughput",
    "input_token_rate": "input_throughput",
    "output_token_rate": "output_throughput",
    "total_token_rate": "total_throughput",
}
_REPORTED_LENGTHS = {"input_length": "total_input_tokens", "output_length": "total_output_tokens"}


def is_llm_d_report(result: ResultFields) -> bool:
    if "version" not in result:
        return False
    return isinstance(result.get("results"), dict) or isinstance(result.get("metrics"), dict)


_ISO_DURATION = re.compile(r"PT(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?")


def _reported_duration(result: ResultFields, metrics: ResultFields) -> dict[str, float]:
    """The field `duration` in s. Version 0.1 has the number; 0.2 has the duration of the whole run as ISO 8601, such as
    PT2M3S. Empty: the report has neither.
    """
    if "time" in metrics.objects:
        return metrics.part("time").numbers({"duration": "duration"})
    if "run" not in result.objects or "time" not in result.part("run").objects:
        return {}
    found = _ISO_DURATION.fullmatch(str(result.part("run").part("time").get("duration")))
    if found is None or not any(found.groups()):
        return {}
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return {"duration": 3600 * hours + 60 * minutes + seconds}


def llm_d_report(result: ResultFields) -> dict[str, float]:
    """The summary of a benchmark report of llm-d, 0.1 or 0.2. Each latency in the report names its unit."""
    if "metrics" in result:
        metrics = result.part("metrics")
    else:
        metrics = result.part("results").part("request_performance").part("aggregate")
    requests, summary = metrics.part("requests"), dict[str, float]()
    if (total := requests.number("total")) is not None:
        summary["completed"] = total - (requests.number("failures") or 0)
    summary |= _reported_duration(result, metrics)
    for theirs, ours in _REPORTED_LENGTHS.items():
        mean = requests.part(theirs).number("mean") if theirs in requests else None
        if mean is not None and "completed" in summary:
            summary[ours] = round(mean * summary["completed"])
    latencies = metrics.part("latency")
    for theirs, ours in _LATENCIES.items():
        if theirs in latencies:
            latency = latencies.part(theirs)
            summary |= latency.numbers(statistics_of(ours, _STATISTICS), latency.unit("units", _IN_MS))
    rates = metrics.part("throughput")
    summary |= rates.numbers(_RATES)
    for theirs, ours in _REPORTED_RATES.items():
        if theirs in rates:
            summary |= rates.part(theirs).numbers({"mean": ours})
    return summary
