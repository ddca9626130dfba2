"""The numbers of a summary that are shown to users: their order, units and precision.

If step times were not measured on a server, a number has a range: its smallest and largest value over the run and its
repetitions with the fastest and the slowest step times.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pdsim.dataclass import dataclass

_LONG_MS = 1000.0
_LONG_NUMBER = 1000
_VISIBLE = 0.005
"""A relative difference below this counts neither as better nor as worse."""


class Difference(NamedTuple):
    text: str
    is_better: bool | None = None
    """True: the number improved. False: it became worse. None: neither."""


@dataclass(frozen=True)
class SummaryRow:
    field: str
    title: str
    kind: Literal["count", "time", "share", "bytes"]
    decimals: int = 0
    better: int = 0
    """1: more is better. -1: less is better. 0: neither."""

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """The row's number in a summary.

        0: the run did not count this quantity. None: a summary of another tool lacks the number, or the number is a
        time that no request has.
        """
        value: Any = summary
        for key in self.field.split("."):
            value = value.get(key, 0 if "pdsim" in summary else {} if key == "pdsim" else None)
        is_missing = value is None and ("pdsim" not in summary or self.kind == "time")
        return None if is_missing else float(value or 0)

    def cells(self, values: Sequence[float | None]) -> tuple[str, list[str]]:
        """The row's title with a unit, and texts of the values in this unit."""
        if self.kind == "time":
            unit = unit_of([value for value in values if value is not None])
            return f"{self.title}, {unit}", [
                _if_any(value, lambda v: in_unit(v, unit, self.decimals)) for value in values
            ]
        if self.kind == "share":
            return self.title, [_if_any(value, lambda v: f"{v:.1%}") for value in values]
        scale = 1e9 if self.kind == "bytes" else 1
        return self.title, [_if_any(value, lambda v: f"{v / scale:,.{self.decimals}f}") for value in values]

    def difference(self, value: float | None, reference: float | None) -> Difference:
        if value is None or reference is None:
            return Difference("")
        if self.kind == "share":
            return Difference(f"{signed(100 * (value - reference))} pt")
        if not reference:
            return Difference("")
        change = value / reference - 1
        text = percentage(change)
        if not self.better or abs(change) < _VISIBLE:
            return Difference(text)
        return Difference(text, is_better=change * self.better > 0)


SUMMARY_ROWS = (
    SummaryRow("completed", "requests completed", "count"),
    SummaryRow("pdsim.warm_up_requests", "warm-up, left out", "count"),
    SummaryRow("duration", "duration, s", "count", 1),
    SummaryRow("request_throughput", "requests/s", "count", 3, +1),
    SummaryRow("input_throughput", "input tokens/s", "count", 0, +1),
    SummaryRow("output_throughput", "output tokens/s", "count", 1, +1),
    SummaryRow("mean_ttft_ms", "TTFT mean", "time", 1, -1),
    SummaryRow("median_ttft_ms", "TTFT median", "time", 1, -1),
    SummaryRow("p99_ttft_ms", "TTFT p99", "time", 1, -1),
    SummaryRow("mean_tpot_ms", "TPOT mean", "time", 2, -1),
    SummaryRow("p99_tpot_ms", "TPOT p99", "time", 2, -1),
    SummaryRow("mean_itl_ms", "ITL mean", "time", 2, -1),
    SummaryRow("p99_itl_ms", "ITL p99", "time", 2, -1),
    SummaryRow("median_e2e_latency_ms", "latency median", "time", 1, -1),
    SummaryRow("p99_e2e_latency_ms", "latency p99", "time", 1, -1),
    SummaryRow("concurrency", "concurrency", "count", 1),
    SummaryRow("accept_length", "tokens a verified step", "count", 2),
    SummaryRow("pdsim.mean_running_requests", "decoding, mean", "count", 1),
    SummaryRow("pdsim.prefill_cache_hit_rate", "prefill cache hits", "share"),
    SummaryRow("pdsim.decode_cache_hit_rate", "decode cache hits", "share"),
    SummaryRow("pdsim.host_hit_tokens", "tokens from host memory", "count"),
    SummaryRow("pdsim.storage_read_tokens", "tokens from storage", "count"),
    SummaryRow("pdsim.storage_reads_s", "reads from storage, s", "count", 3, -1),
    SummaryRow("pdsim.storage_writes_s", "writes to storage, s", "count", 3, -1),
    SummaryRow("pdsim.transfer_bytes", "KV sent, GB", "bytes", 1, -1),
    SummaryRow("pdsim.retractions", "retractions", "count", 0, -1),
    SummaryRow("pdsim.retraction_copies_s", "KV of retracted copied, s", "count", 3, -1),
    SummaryRow("pdsim.retries", "retries", "count", 0, -1),
    SummaryRow("pdsim.failed", "requests failed", "count", 0, -1),
)

_IF_ANY = {
    "pdsim.warm_up_requests",
    "accept_length",
    "pdsim.host_hit_tokens",
    "pdsim.retraction_copies_s",
    "pdsim.retries",
    "pdsim.failed",
}
"""Summary fields whose rows are shown only if at least one of the shown runs has a value other than 0."""


def rows_to_show(summaries: Iterable[Mapping[str, Any]]) -> list[tuple[SummaryRow, list[float | None]]]:
    """Rows of a table that shows the summaries of some runs: each row with its value in each run, in order. Rows of
    _IF_ANY are left out if their value is 0 or unknown in every run.
    """
    summaries = list(summaries)
    rows = [(row, [row.value(summary) for summary in summaries]) for row in SUMMARY_ROWS]
    return [(row, values) for row, values in rows if row.field not in _IF_ANY or any(values)]


def _if_any(value: float | None, shown: Callable[[float], str]) -> str:
    return "" if value is None else shown(value)


def unit_of(values_ms: Iterable[float]) -> str:
    return "s" if max(values_ms, default=0.0) >= _LONG_MS else "ms"


def in_unit(value_ms: float, unit: str, decimals: int) -> str:
    """Text of a time in a unit, without the unit's name. Seconds have two decimals, ms have `decimals`, and ms below 1
    have two.
    """
    if unit == "s":
        return f"{value_ms / 1e3:,.2f}"
    return f"{value_ms:,.{decimals if value_ms >= 1 else 2}f}"


def time_text(value_ms: float) -> str:
    """Text of a time with its unit, such as "12.3 ms"."""
    unit = unit_of([value_ms])
    return f"{in_unit(value_ms, unit, 1)} {unit}"


def signed(value: float) -> str:
    """Text of a number with its sign and one decimal. Zero has no sign."""
    text = f"{value:+,.1f}"
    return "0.0" if text in {"+0.0", "-0.0"} else text


def percentage(error: float) -> str:
    return f"{signed(100 * error)}%"


def counted(count: int, noun: str) -> str:
    """Text of a number with its noun: "1 request", "2,000 requests"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def significant(value: float) -> str:
    """Text of a number with four significant digits. All digits before the decimal point are kept."""
    return f"{value:,.0f}" if abs(value) >= _LONG_NUMBER else f"{value:.4g}"


_OF_MARKDOWN = re.compile(r"\\|\||`|\](?=[(\[])|<(?=[A-Za-z/!?])|&(?=[A-Za-z#])")


def markdown_text(text: str) -> str:
    """The text on one line, changed so that Markdown finds no HTML, link, code or table cell in it."""
    escaped = _OF_MARKDOWN.sub(lambda found: {"<": "&lt;", "&": "&amp;"}.get(found[0], f"\\{found[0]}"), text)
    return escaped.replace("\n", " ")


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose cells are plain texts."""
    return table_of_markdown(list(map(markdown_text, titles)), (list(map(markdown_text, row)) for row in rows))


def table_of_markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose cells are Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


_TIMES = ("ttft", "tpot", "itl", "e2e_latency")
RANGED_FIELDS = (
    *(f"{what}_throughput" for what in ("request", "input", "output")),
    *(f"{statistic}_{time}_ms" for time in _TIMES for statistic in ("mean", "median", "p90", "p95", "p99")),
)
RANGED = tuple(row for row in SUMMARY_ROWS if row.field in RANGED_FIELDS)
"""Rows of the summary whose numbers may have a range: the smallest and the largest value over a run and its repetitions
with the fastest and with the slowest step times.
"""
HEADLINES = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "output_throughput")
"""Summary fields whose ranges are shown if a terminal has no room for those of all RANGED fields. A very narrow
terminal shows only the first of these fields.
"""

Ranges = Mapping[str, Sequence[float]]
"""Smallest and largest value, by summary field."""


def ranges(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """[Smallest, largest] value of each field of RANGED_FIELDS over the given summaries: those of a run, and of its
    repetitions with the fastest and slowest step times. A field that one of the summaries lacks, or has as null, is
    left out.
    """
    values = {field: [summary.get(field) for summary in summaries] for field in RANGED_FIELDS}
    known = {field: [float(value) for value in found if value is not None] for field, found in values.items()}
    return {field: [min(found), max(found)] for field, found in known.items() if len(found) == len(summaries)}


def ranges_of(summary: Mapping[str, Any]) -> Ranges:
    """Returns the ranges in a summary: for each field, the smallest and the largest value over the run and two further
    runs, one with the fastest and one with the slowest step times. Empty: these two runs were not made, because step
    times were measured, the run was interrupted, or the user wanted no ranges.
    """
    found: Ranges = summary.get("pdsim", {}).get("interval") or {}
    return found


def range_note(summary: Mapping[str, Any]) -> str:
    """A sentence on ranges that were estimated from the first requests of a load: how many requests these were, and how
    large the error is. Empty: all requests were simulated, or there are no ranges.
    """
    own = summary.get("pdsim", {})
    if "interval_requests" not in own:
        return ""
    return (
        f"ranges: the fastest and the slowest server were simulated until {own['interval_requests']:,} requests had "
        f"ended, so means are known to about {own['interval_error']:.1%}; --whole-ranges simulates all requests"
    )


def range_text(row: SummaryRow, found: Ranges, *beside: float | None) -> str:
    """Text of a row's range without its unit, such as "1.2 to 3.4". Empty: the row's field has no range. found: ranges
    by field. beside: values that are shown next to the range; the unit is chosen by the sizes of these values and of
    the range.
    """
    if row.field not in found:
        return ""
    _, (*_, least, most) = row.cells([*beside, *found[row.field]])
    return f"{least} to {most}"


def between(field: str, found: Ranges, beside: str = "") -> str:
    """A note for a number: a text, then the number's range, such as "p99 2.00 s, 1.20 to 3.40 s". Ranges of times have
    a unit, other ranges have none. Without a range: the text alone. field: the number's summary field. found: ranges by
    field. beside: the text; empty: the range alone.
    """
    if field not in found:
        return beside
    least, most = found[field]
    text = f"{significant(least)} to {significant(most)}"
    if field.endswith("_ms"):
        unit = unit_of(found[field])
        text = f"{in_unit(least, unit, 1)} to {in_unit(most, unit, 1)} {unit}"
    return f"{beside}, {text}" if beside else text


SUMMARY_FIELDS = {
    "tag": "name of the scenario",
    "backend": '"pdsim", or "pdreal" of a real run',
    "dataset_name": "class of the workload",
    "request_rate": 'arrivals per s; "inf": closed loop; "trace": the workload\'s times',
    "max_concurrency": "sessions of a closed loop, else null",
    "duration": "s: max e - min a",
    "completed": "finished requests",
    "total_input_tokens": "sum of prompt tokens",
    "total_input_text_tokens": "prompt tokens that stand neither for images nor for audio clips",
    "total_input_vision_tokens": "prompt tokens that stand for images",
    "total_output_tokens": "sum of output tokens; total_output_tokens_retokenized is the same",
    "request_throughput": "completed / duration, 1/s",
    "input_throughput": "total input tokens / duration, tokens/s",
    "output_throughput": "total output tokens / duration, tokens/s",
    "total_throughput": "sum of the two",
    "*_e2e_latency_ms": "e - a",
    "*_ttft_ms": "f - a",
    "*_tpot_ms": "(e - f) / (n - 1), of requests with n > 1",
    "*_itl_ms": "gaps between two tokens of a request; of k tokens that come together, each has a k-th of the gap",
    "max_itl_ms": "longest gap",
    "concurrency": "sum of (e - a) / duration",
    "accept_length": "tokens per request and decode step; null without speculation",
    "max_output_tokens_per_s": "largest number of output tokens in one whole second",
    "max_concurrent_requests": "largest number of requests in the cluster in one such second",
    "pdsim": "further numbers",
}
"""How bench_serving defines each field. A request of n output tokens is sent at a; its first token arrives at f and its
last at e.
"""

OWN_FIELDS = {
    "failed": "requests that failed, with a reason in requests.parquet",
    "failures": "failed requests by reason, what helps, and whether the scenario asks for it; absent if none failed",
    "unfinished": "requests that neither finished nor failed",
    "retractions": "how often a request lost its pages while decoding",
    "retraction_copies_s": "time for which decode loops waited for copies of retracted or written-back KV",
    "retries": "attempts after the first",
    "prefill_steps": "forwards of all instances",
    "decode_steps": "decode steps of all instances",
    "mean_running_requests": "mean number of decoding requests over the duration",
    "mean_running_requests_per_step": "mean batch over decode steps",
    "prefill_cache_hit_rate": "tokens cached on prefill / prompt tokens",
    "decode_cache_hit_rate": "tokens cached on decode / prompt tokens",
    "transfer_bytes": "KV and state sent by all ranks",
    "transfers": "units sent, empty ones included",
    "*_inter_chunk_latency_ms": "time between two groups of tokens; absent without stream_interval",
    "classes": "latencies of each class; absent if requests have no classes",
    "host_hit_tokens": "tokens loaded from host caches, which the hit rates count, too; absent without host caches",
    "host_loaded_bytes": "bytes loaded from host caches by all ranks",
    "host_written_bytes": "bytes written to host caches by all ranks",
    "storage_read_tokens": "tokens read from storage, used or not; absent without storage",
    "storage_read_bytes": "bytes read from storage by all ranks",
    "storage_written_bytes": "bytes written to storage by all ranks",
    "storage_reads_s": "sum of the durations of all batches of reads from storage, in s",
    "storage_writes_s": "sum of the durations of all writes to storage, in s",
    "gpu_hours": "hours of all running GPUs; this field and the next three: elastic clusters only",
    "role_switches": "changes of a server's role",
    "servers_started": "servers that started",
    "servers_stopped": "servers that stopped",
    "events": "events of the simulator",
    "stalled": "whether the run halted with requests left",
    "device": "GPUs, or what a profile was measured on; of real runs cpu or cuda",
    "confirmed_drafts": "real runs with drafts: share of accepted drafts that the target itself chose",
    "near_ties": "real runs with drafts: share of other accepted drafts whose scores are within bf16's precision",
    "reference_match": "real runs with drafts: share of output tokens that equal those of a run without drafts",
    "warnings": "sizes and loads that lie outside the measurements; absent if none do",
    "interval": "smallest and largest throughputs and latencies, if no server was measured; written by commands",
    "interval_requests": "requests after which the runs with the fastest and slowest times stopped; absent: all",
    "interval_error": "relative standard error of the change of mean TTFT and latency in these shorter runs",
    "interrupted": "whether the user interrupted the run; written by commands",
    "journal": "number of calls in the journal, and a digest of its lines; absent without a journal",
}
