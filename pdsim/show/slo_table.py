"""An SLO on the terminal: each limit beside what was found, in the limit's own unit."""

from collections.abc import Mapping
from typing import Any

from pdsim.metrics.summary_rows import significant, time_text
from pdsim.show.tables import new_console, new_table


def print_slo(judged: Mapping[str, Any]) -> None:
    """judged: an outcome as JSON, with the SLO as text."""
    verdict = "meets the SLO" if judged["meets"] else f"misses the SLO: {judged['reason']}"
    table = new_table(verdict, "", "limit", "found")
    for reading in [*judged["limits"], *judged["terms"]]:
        table.add_row(reading["name"], limit_text(reading), value_text(reading))
    new_console().print(table)


def limit_text(reading: Mapping[str, Any]) -> str:
    """The limit in its unit, with the side of it that is good."""
    if reading["unit"] == "%":
        return f"at least {reading['limit']:g} %"
    return f"at most {time_text(reading['limit'])}"


def value_text(reading: Mapping[str, Any]) -> str:
    """The number found; a percentile among requests that failed has none."""
    if reading["value"] is None:
        return "failed"
    return f"{significant(round(reading['value'], 1))} %" if reading["unit"] == "%" else time_text(reading["value"])
