"""Ranges: what the numbers of a run lie between, if it is simulated at both ends of the times that nobody measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.metrics.summary_rows import SUMMARY_ROWS, SummaryRow, in_unit, significant, unit_of

_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_TIMES = ("ttft", "tpot", "itl", "e2e_latency")
_FIELDS = (
    *(f"{what}_throughput" for what in ("request", "input", "output")),
    *(f"{statistic}_{time}_ms" for time in _TIMES for statistic in _STATISTICS),
)
RANGED = tuple(row for row in SUMMARY_ROWS if row.field in _FIELDS)
"""Rows of a summary that have one."""
HEADLINES = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "output_throughput")
"""Numbers that are shown where there is no room for all."""

Ranges = Mapping[str, Sequence[float]]
"""Least and most, by the field of a summary."""


def ranges(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Ranges of a run and of its ends, without numbers that one of them does not have."""
    values = {field: [summary.get(field) for summary in summaries] for field in _FIELDS}
    known = {field: [float(value) for value in found if value is not None] for field, found in values.items()}
    return {field: [min(found), max(found)] for field, found in known.items() if len(found) == len(summaries)}


def ranges_of(summary: Mapping[str, Any]) -> Ranges:
    """Ranges that a summary has; none of a run whose times are certain."""
    found: Ranges = summary.get("pdsim", {}).get("interval") or {}
    return found


def shown(row: SummaryRow, found: Ranges, *beside: float | None) -> str:
    """Text such as "1.2 to 3.4", in the unit of the values that it stands beside."""
    if row.field not in found:
        return ""
    _, (*_, least, most) = row.cells([*beside, *found[row.field]])
    return f"{least} to {most}"


def between(field: str, found: Ranges, beside: str = "") -> str:
    """Text such as "1.2 to 3.4 s" behind what it stands beside; nothing where there is none."""
    if field not in found:
        return beside
    least, most = found[field]
    text = f"{significant(least)} to {significant(most)}"
    if field.endswith("_ms"):
        unit = unit_of(found[field])
        text = f"{in_unit(least, unit, 1)} to {in_unit(most, unit, 1)} {unit}"
    return f"{beside}, {text}" if beside else text
