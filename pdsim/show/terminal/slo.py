"""Prints whether a run meets an SLO, and a table: each limit beside the value that was found, in the limit's unit."""

from collections.abc import Mapping
from typing import Any

from pdsim.show.terminal.layout import new_console, new_table
from pdsim.study.verdict.readings import Reading


def print_slo(judged: Mapping[str, Any]) -> None:
    """Prints whether a run meets its SLO. judged: the run's outcome under the SLO, as JSON files have it."""
    verdict = "meets the SLO" if judged["meets"] else f"misses the SLO: {judged['reason']}"
    table = new_table("", "", "limit", "found")
    for reading in map(Reading.from_json, [*judged["limits"], *judged["terms"]]):
        table.add_row(reading.name, reading.limit_text, reading.value_text)
    console = new_console()
    console.print(verdict, style="bold", highlight=False, markup=False)
    console.print(table)
