"""Results of other tools as summaries of ours. A field that a tool does not report is absent, and never 0.

The fields of a result tell whose it is.

tool         file                              TPOT is called                  ITL
SGLang       JSON lines of bench_serving       tpot                            gap between tokens
vLLM         JSON of `vllm bench serve`        tpot                            gap between chunks
AIPerf       profile_export_aiperf.json        inter_token_latency             none: its inter_chunk_latency is a list
InferenceX   agg_*.json, one row or an array   tpot, in seconds                gap between chunks
GuideLLM     benchmarks.json, version 2        inter_token_latency_ms          its mean, weighted by tokens
genai-bench  one JSON of a scenario and load   tpot, in seconds                none
DynoSim      JSON of --report-json             tpot                            gap between tokens
"""

import json
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.inputs import finite, parse_json, read_text, shown, whole
from pdsim.metrics.distribution import Samples
from pdsim.metrics.summary import STATISTICS, statistics
from pdsim.scenario.yaml_file import ConfigError


class ResultFields:
    """A JSON object of a result that knows where it stands, so that errors name file and field.

    Fields that are null count as absent.
    """

    def __init__(self, found: Any, where: str, path: str = "") -> None:
        self.where = f"{where}: {path}" if path else where
        if not isinstance(found, dict):
            raise ConfigError(f"{self.where}: expected an object, found {_kind(found)}")
        self._found: dict[str, Any] = found
        self._file, self._path = where, path

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __contains__(self, name: str) -> bool:
        return self._found.get(name) is not None

    def get(self, name: str) -> Any:
        return self._found.get(name)

    def part(self, name: str) -> "ResultFields":
        return ResultFields(self.get(name), self._file, self._to(name))

    def parts(self, name: str) -> "list[ResultFields]":
        found = self.get(name)
        if not isinstance(found, list):
            raise ConfigError(f"{self._file}: {self._to(name)}: expected an array, found {_kind(found)}")
        return [ResultFields(one, self._file, f"{self._to(name)}[{number}]") for number, one in enumerate(found)]

    def number(self, name: str) -> float | None:
        """Finite; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        try:
            finite(value if isinstance(value, int | float) else None)
        except ValueError:
            raise self._foreign(name, "a finite number") from None
        number: float = value
        return number

    def count(self, name: str) -> int:
        """A whole number, which may be written as text."""
        value = self.get(name)
        try:
            return whole(value)
        except ValueError:
            raise self._foreign(name, "a whole number") from None

    def numbers(self, names: Mapping[str, str], factor: float = 1) -> dict[str, float]:
        """Numbers that are there, under our names: `names` are ours by theirs."""
        found = {ours: self.number(theirs) for theirs, ours in names.items()}
        return {ours: value * factor for ours, value in found.items() if value is not None}

    def unit(self, name: str, units: Mapping[str, float]) -> float:
        """The factor of the named unit."""
        unit = self.get(name)
        if not isinstance(unit, str) or unit not in units:
            raise ConfigError(f"{self.where}: no unit {unit!r}; there are {', '.join(units)}")
        return units[unit]

    def _foreign(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self._file}: {self._to(name)}: expected {expected}, found {shown(self.get(name))}")

    def _to(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _statistics_of(latency: str, names: Mapping[str, str]) -> dict[str, str]:
    """Our fields of a latency by a tool's names of statistics."""
    return {theirs: f"{ours}_{latency}_ms" for theirs, ours in names.items()}


def _kind(found: Any) -> str:
    return "nothing" if found is None else type(found).__name__


_SGLANG_COUNTS = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "max_concurrency", "concurrency",
)  # fmt: skip
_SGLANG_RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
_SGLANG_TIMES = tuple(f"{s}_{latency}_ms" for latency in ("e2e_latency", "ttft", "tpot", "itl") for s in STATISTICS)
_SGLANG_SAME = {name: name for name in (*_SGLANG_COUNTS, *_SGLANG_RATES, "accept_length", *_SGLANG_TIMES)}
_VLLM = {"total_token_throughput": "total_throughput"} | {f"{s}_e2el_ms": f"{s}_e2e_latency_ms" for s in STATISTICS}


def sglang(result: ResultFields) -> dict[str, float]:
    return result.numbers(_SGLANG_SAME)


def vllm(result: ResultFields) -> dict[str, float]:
    return result.numbers(_SGLANG_SAME | _VLLM)


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
_AIPERF_DURATION = "benchmark_duration"
_AIPERF_IN_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
_AIPERF_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def aiperf(result: ResultFields) -> dict[str, float]:
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
            summary |= latency.numbers(_statistics_of(ours, _AIPERF_STATISTICS), latency.unit("unit", _AIPERF_IN_MS))
    return summary


_INFERENCEX_LATENCIES = {"e2el": "e2e_latency", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
_INFERENCEX_TIMES = {
    f"{s}_{theirs}": f"{s}_{ours}_ms" for theirs, ours in _INFERENCEX_LATENCIES.items() for s in STATISTICS
}


def inferencex(row: ResultFields) -> dict[str, float]:
    is_pair = row.get("disagg") in (True, "true", "True")
    sizes = ("num_prefill_gpu", "num_decode_gpu") if is_pair else ("tp",)
    if missing := [name for name in sizes if not row.get(name)]:
        raise ConfigError(f"{row.where}: InferenceX's row has no {', '.join(missing)}, which its rates per GPU are of")
    gpus = [row.count(name) for name in sizes]
    return {
        **row.numbers(_INFERENCEX_TIMES, 1e3),
        **row.numbers({"tput_per_gpu": "total_throughput"}, sum(gpus)),
        **row.numbers({"output_tput_per_gpu": "output_throughput"}, gpus[-1]),
        **row.numbers({"input_tput_per_gpu": "input_throughput"}, gpus[0]),
        **({"max_concurrency": row.count("conc")} if row.get("conc") else {}),
    }


_GUIDELLM_VERSION = 2
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
    """Raises ConfigError for another version."""
    version = ResultFields(report, where).part("metadata").get("version")
    if version != _GUIDELLM_VERSION:
        raise ConfigError(
            f"{where}: metadata.version: of GuideLLM's reports {_GUIDELLM_VERSION} is read, found {version!r}"
        )
    if not isinstance(found := report["benchmarks"], list):
        raise ConfigError(f"{where}: benchmarks: expected an array, found {type(found).__name__}")
    return found


def load_of(benchmark: ResultFields) -> str:
    """The load as GuideLLM writes it: concurrent@16, constant@2.5, synchronous."""
    strategy = benchmark.part("config").part("strategy")
    amount = strategy.get("streams") or strategy.get("rate")
    return f"{strategy.get('type_')}" + (f"@{amount:g}" if isinstance(amount, int | float) else "")


def guidellm(benchmark: ResultFields) -> dict[str, float]:
    metrics = benchmark.part("metrics")
    summary = benchmark.numbers({"duration": "duration"})
    summary |= metrics.part("request_totals").numbers({"successful": "completed"})
    summary |= benchmark.part("config").part("strategy").numbers({"streams": "max_concurrency"})
    for theirs, ours in _GUIDELLM_MEANS.items():
        summary |= _guidellm_successful(metrics, theirs).numbers({"mean": ours})
    for theirs, ours in _GUIDELLM_TOKENS.items():
        sums = _guidellm_successful(metrics, theirs).numbers({"total_sum": ours})
        summary |= {name: round(total) for name, total in sums.items()}  # it is a mean times a count there
    summary |= _guidellm_times(_guidellm_successful(metrics, "request_latency"), "e2e_latency", in_ms=1e3)
    summary |= _guidellm_times(_guidellm_successful(metrics, "time_to_first_token_ms"), "ttft")
    if mean_ms := _guidellm_successful(metrics, _GUIDELLM_TPOT).number("mean"):
        summary |= {"mean_itl_ms": mean_ms} | _guidellm_tpot(benchmark, metrics)
    return summary


def _guidellm_successful(metrics: ResultFields, name: str) -> ResultFields:
    return metrics.part(name).part("successful")


def _guidellm_times(distribution: ResultFields, latency: str, in_ms: float = 1) -> dict[str, float]:
    """None where their mean is 0: nothing was measured, as without streaming."""
    if not distribution.number("mean"):
        return {}
    percentiles = distribution.part("percentiles").numbers(_statistics_of(latency, _GUIDELLM_PERCENTILES), in_ms)
    return distribution.numbers(_statistics_of(latency, _GUIDELLM_MOMENTS), in_ms) | percentiles


def _guidellm_tpot(benchmark: ResultFields, metrics: ResultFields) -> dict[str, float]:
    """Each request counts once here, and once for each of its gaps in the file's distribution, whose mean is ITL's.

    So where requests are not equally long, they must all be in the file, one by one.
    """
    lengths = _guidellm_successful(metrics, "output_token_count")
    if lengths.number("min") == lengths.number("max"):
        return _guidellm_times(_guidellm_successful(metrics, _GUIDELLM_TPOT), "tpot")
    requests = benchmark.part("requests").parts("successful")
    if len(requests) != metrics.part("request_totals").number("successful"):
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
    """A latency that was not measured is null or 0 there."""
    metrics = result.part("aggregated_metrics")
    stats = metrics.part("stats")
    in_ms = result.unit("_time_unit", _GENAI_IN_MS) if "_time_unit" in result else _GENAI_IN_MS["s"]
    summary = metrics.numbers(_GENAI_TOTALS)
    for latency in ("e2e_latency", "ttft", "tpot"):
        times = stats.part(latency)
        if times.number("mean"):
            summary |= times.numbers(_statistics_of(latency, _GENAI_STATISTICS), in_ms)
    if _counts_all_tokens(metrics, stats):
        summary |= metrics.numbers(_GENAI_TOKEN_RATES)
        summary |= stats.part("num_input_tokens").numbers({"sum": "total_input_tokens"})
        summary |= stats.part("num_output_tokens").numbers({"sum": "total_output_tokens"})
    if metrics.get("iteration_type") == "num_concurrency" and "total_arrivals" not in metrics:
        summary |= metrics.numbers({"num_concurrency": "max_concurrency"})
    return summary


def _counts_all_tokens(metrics: ResultFields, stats: ResultFields) -> bool:
    """True if no request was left out as warm-up or cool-down: the time that tokens are divided by leaves none out."""
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
    """A latency without samples is 0 there. Reports that tell token gaps mean by ITL what others call TPOT."""
    report = result.part("summary") if "summary" in result else result
    summary = report.numbers({"duration_ms": "duration"}, 1e-3) | report.numbers(_DYNOSIM_TOTALS)
    gaps = "token_gap" if "mean_token_gap_ms" in report else "itl"
    for theirs, ours in {"e2e_latency": "e2e_latency", "ttft": "ttft", "tpot": "tpot", gaps: "itl"}.items():
        if report.number(f"mean_{theirs}_ms"):
            summary |= report.numbers({f"{s}_{theirs}_ms": f"{s}_{ours}_ms" for s in STATISTICS})
    return summary


class ImportedResult(NamedTuple):
    name: str
    tool: str
    summary: dict[str, Any]


class _Tool(NamedTuple):
    name: str
    wrote: Callable[[ResultFields], bool]
    label: Callable[[ResultFields], str | None]
    """The name of the result in the file."""
    summary: Callable[[ResultFields], dict[str, float]]


_TOOLS = (
    _Tool(
        "AIPerf",
        lambda row: "aiperf_version" in row or isinstance(row.get("request_latency"), dict),
        lambda _: None,
        aiperf,
    ),
    _Tool("InferenceX", lambda row: "tput_per_gpu" in row, lambda row: row.get("infmax_model_prefix"), inferencex),
    _Tool("GuideLLM", lambda row: "metrics" in row and "scheduler_metrics" in row, load_of, guidellm),
    _Tool("genai-bench", lambda row: "aggregated_metrics" in row, lambda _: None, genai_bench),
    _Tool("DynoSim", is_dynosim, lambda _: None, dynosim),
    _Tool("SGLang", lambda row: "mean_e2e_latency_ms" in row, lambda row: row.get("tag"), sglang),
    _Tool("vLLM", lambda row: "mean_ttft_ms" in row, lambda row: row.get("label"), vllm),
)
"""DynoSim's report has SGLang's names, and SGLang's result has vLLM's: the more particular comes first."""


def read_results(path: Path) -> list[ImportedResult]:
    """Results, a line, element or benchmark of the file each. Raises ConfigError for what no tool writes."""
    found = [_imported(path, number, row) for number, row in enumerate(_rows(path), start=1)]
    if not found:
        raise ConfigError(f"{path} has no results")
    return found


def _rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON object, an array, or lines of objects. Infinity, which SGLang writes, is read."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    text = read_text(path, "JSON")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield parse_json(line, f"{path}, line {number}", has_infinity=True)
        return
    except (ValueError, RecursionError):
        found = parse_json(text, str(path), has_infinity=True)  # which says what is wrong
    if isinstance(found, dict) and {"metadata", "benchmarks"} <= found.keys():
        yield from benchmarks_of(found, f"{path}")
    else:
        yield from found if isinstance(found, list) else [found]


def _imported(path: Path, number: int, row: Any) -> ImportedResult:
    result = ResultFields(row, f"{path}, result {number}")
    for tool in _TOOLS:
        if tool.wrote(result):
            name = f"{tool.label(result) or path.stem}" + (f" #{number}" if number > 1 else "")
            return ImportedResult(name, tool.name, tool.summary(result))
    raise ConfigError(
        f"{result.where} is no result of SGLang's bench_serving, vLLM's bench serve, AIPerf, InferenceX, GuideLLM, "
        f"genai-bench or DynoSim: it has {', '.join(list(result)[:12]) or 'no fields'}"
    )
