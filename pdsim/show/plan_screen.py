"""The answer of `pdsim plan` on the terminal, the most important first."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pdsim.metrics.run_folder import SCENARIO
from pdsim.show.tables import new_console, new_table
from pdsim.study.planning.plan import Plan
from pdsim.study.planning.screen import Screen, TextTable

_WORDS = ("cluster", "why not", "")
"""Columns with words, which may wrap. Other columns have numbers."""
_HEAD = 14
"""Characters of a line of a column head, where words allow it."""


def print_plan(plan: Plan, *, details: bool, out: Path | None) -> None:
    """Prints a plan. out: the folder with its scenario; None: the scenario was not kept."""
    screen, console = Screen(plan), new_console()
    console.print(screen.headline, style="bold", highlight=False, markup=False)
    for line in filter(None, (screen.saving, screen.setting, screen.words)):
        _print(console, line)
    if screen.limits.rows:
        console.print(_table(screen.limits))
        _print_confidence(console, screen, plan)
    console.print(_table(screen.clusters))
    for line in screen.failing:
        _print(console, line)
    if details:
        console.print()
        for line in screen.details:
            _print(console, f"- {line}")
    console.print()
    for line in _next(plan, out, details=details):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_confidence(console: Console, screen: Screen, plan: Plan) -> None:
    confidence = screen.confidence
    console.print(f"Confidence: {confidence.word}", style="bold", highlight=False, markup=False)
    _print(console, confidence.reason)
    if plan.measure is not None:
        _print(console, f"To be sure, measure a server ({plan.measure.minutes} minutes):")
        console.print(f"    {plan.measure.command}", highlight=False, markup=False, soft_wrap=True)


def _next(plan: Plan, out: Path | None, *, details: bool) -> list[str]:
    """Commands to run next."""
    found = []
    if plan.chosen is not None and out is not None:
        found += [f"Start it:   pdsim launch {shlex.quote(str(out / SCENARIO))} --engine sglang"]
    elif plan.chosen is not None:
        found += ["Start it:   the same command with --out DIR, then pdsim launch DIR/scenario.yaml"]
    if out is not None:
        found += [f"As a page:  pdsim report {shlex.quote(str(out))}"]
    return found if details else [*found, "Say more:   the same command with --details"]


def _print(console: Console, text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 2)), highlight=False, markup=False)


def _table(shown: TextTable) -> Table:
    table = new_table("")
    table.padding = (0, 1, 0, 0)
    for column in shown.columns:
        is_number = column not in _WORDS
        head = "\n".join(wrap(column, _HEAD)) if is_number else column
        width = _longest(shown, column)
        table.add_column(head, justify="right" if is_number else "left", vertical="bottom", min_width=width)
    for row in shown.rows:
        table.add_row(*row)
    return table


def _longest(shown: TextTable, column: str) -> int | None:
    """Width of a number's cells, which are never cut; words may be wrapped."""
    if column in _WORDS:
        return None
    place: Sequence[str] = [row[list(shown.columns).index(column)] for row in shown.rows]
    return max(map(len, place), default=0)
