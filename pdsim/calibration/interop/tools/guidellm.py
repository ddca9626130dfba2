"""GuideLLM's report: benchmarks of one load each, of whose requests the successful ones count."""

from typing import Any

from pdsim.calibration.interop.tools.fields import Fields, statistics_of
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import statistics
from pdsim.scenario.yaml_file import ConfigError

_VERSION = 2
_MOMENTS = {"mean": "mean", "median": "median", "std_dev": "std"}
_PERCENTILES = {"p90": "p90", "p95": "p95", "p99": "p99"}
_MEANS = {
    "requests_per_second": "request_throughput",
    "prompt_tokens_per_second": "input_throughput",
    "output_tokens_per_second": "output_throughput",
    "tokens_per_second": "total_throughput",
    "request_concurrency": "concurrency",
}
_TOKENS = {"prompt_token_count": "total_input_tokens", "output_token_count": "total_output_tokens"}
_TPOT = "inter_token_latency_ms"


def benchmarks_of(report: dict[str, Any], where: str) -> list[Any]:
    """Raises ConfigError for another version."""
    version = Fields(report, where).part("metadata").get("version")
    if version != _VERSION:
        raise ConfigError(f"{where}: metadata.version: of GuideLLM's reports {_VERSION} is read, found {version!r}")
    if not isinstance(found := report["benchmarks"], list):
        raise ConfigError(f"{where}: benchmarks: expected an array, found {type(found).__name__}")
    return found


def load_of(benchmark: Fields) -> str:
    """As GuideLLM writes it: concurrent@16, constant@2.5, synchronous."""
    strategy = benchmark.part("config").part("strategy")
    amount = strategy.get("streams") or strategy.get("rate")
    return f"{strategy.get('type_')}" + (f"@{amount:g}" if isinstance(amount, int | float) else "")


def guidellm(benchmark: Fields) -> dict[str, float]:
    metrics = benchmark.part("metrics")
    summary = benchmark.numbers({"duration": "duration"})
    summary |= metrics.part("request_totals").numbers({"successful": "completed"})
    summary |= benchmark.part("config").part("strategy").numbers({"streams": "max_concurrency"})
    for theirs, ours in _MEANS.items():
        summary |= _successful(metrics, theirs).numbers({"mean": ours})
    for theirs, ours in _TOKENS.items():
        sums = _successful(metrics, theirs).numbers({"total_sum": ours})
        summary |= {name: round(total) for name, total in sums.items()}  # it is a mean times a count there
    summary |= _times(_successful(metrics, "request_latency"), "e2e_latency", in_ms=1e3)
    summary |= _times(_successful(metrics, "time_to_first_token_ms"), "ttft")
    if mean_ms := _successful(metrics, _TPOT).number("mean"):
        summary |= {"mean_itl_ms": mean_ms} | _tpot(benchmark, metrics)
    return summary


def _successful(metrics: Fields, name: str) -> Fields:
    return metrics.part(name).part("successful")


def _times(distribution: Fields, latency: str, in_ms: float = 1) -> dict[str, float]:
    """None where their mean is 0: nothing was measured, as without streaming."""
    if not distribution.number("mean"):
        return {}
    percentiles = distribution.part("percentiles").numbers(statistics_of(latency, _PERCENTILES), in_ms)
    return distribution.numbers(statistics_of(latency, _MOMENTS), in_ms) | percentiles


def _tpot(benchmark: Fields, metrics: Fields) -> dict[str, float]:
    """Each request counts once here, and once for each of its gaps in the file's distribution, whose mean is ITL's.

    So where requests are not equally long, they must all be in the file, one by one.
    """
    lengths = _successful(metrics, "output_token_count")
    if lengths.number("min") == lengths.number("max"):
        return _times(_successful(metrics, _TPOT), "tpot")
    requests = benchmark.part("requests").parts("successful")
    if len(requests) != metrics.part("request_totals").number("successful"):
        return {}
    return statistics("tpot", Samples(each_ms for one in requests if (each_ms := one.number(_TPOT)) is not None))
