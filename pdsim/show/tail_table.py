"""The slowest requests of a run on the terminal, and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pdsim.metrics.summary_rows import counted, time_text
from pdsim.metrics.tail import Tail, TailGroup
from pdsim.show.tables import new_console, new_table
from pdsim.sim.sensitivity import relief_of

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency"}
_VISIBLE_LOAD = 1.5
"""More arrivals than usual by this factor are a burst."""
_FEW = 3
"""Fewer requests are no burst."""


def tail_json(tail: Tail, command: str) -> dict[str, Any]:
    """The tail's fields; each group has `relief` and `explain`, the command for its example."""
    groups = [
        {
            **asdict(group),
            "relief": relief_of(group.resource, aggregated=tail.is_aggregated),
            "explain": _explains(command, group),
        }
        for group in tail.groups
    ]
    return {**asdict(tail), "groups": groups}


def print_tail(tail: Tail, command: str) -> None:
    """A table of the groups, then a paragraph on each; `command` explains the run."""
    console = new_console()
    title, unit = _TITLES[tail.metric], " a token" * (tail.metric == "tpot")
    size = f"{tail.num_requests:,} of {counted(tail.num_all, 'request')}"
    console.print(f"[bold]The slowest {tail.percent:g}% by {title}: {size}[/bold]", highlight=False)
    console.print(f"{time_text(tail.from_ms)} or more; median of all: {time_text(tail.median_ms)}", highlight=False)
    table = new_table("")
    for column in ("what they waited for", "requests", "share", f"median{unit}", "of all"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    for group in tail.groups:
        times = (time_text(group.median_ms), time_text(group.all_median_ms))
        table.add_row(group.cause, f"{group.num_requests:,}", f"{group.share:.0%}", *times)
    console.print(table)
    for group in tail.groups:
        console.print(f"[bold]{group.cause}[/bold]", highlight=False)
        relief = relief_of(group.resource, aggregated=tail.is_aggregated)
        for line in (_sizes(group), _where_and_when(group), f"relieved by {relief}" if relief else ""):
            if line:
                console.print(line, highlight=False, markup=False)
        console.print(f"  {_explains(command, group)}\n", highlight=False, markup=False, soft_wrap=True)


def _explains(command: str, group: TailGroup) -> str:
    return f"{command} --request {group.example}"


def _sizes(group: TailGroup) -> str:
    if group.tokens is None or group.all_tokens is None:
        return ""
    what = "tokens computed" if group.part == "prefill compute" else "output tokens"
    return f"{what}, median: {group.tokens:,.0f}; of all requests: {group.all_tokens:,.0f}"


def _where_and_when(group: TailGroup) -> str:
    where = _counts(group.instances, group.num_requests)
    when = f"arrived at {group.first_s:,.2f} s"
    if group.last_s > group.first_s:
        share = f"{max(0.01, group.window_share):.0%} of the run"
        when = f"arrived from {group.first_s:,.2f} to {group.last_s:,.2f} s, {share}"
    if group.load is not None and group.load >= _VISIBLE_LOAD and group.num_requests >= _FEW:
        when += f", in a burst: {group.load:.1f} times the usual arrivals"
    return "; ".join(filter(None, (where, when)))


def _counts(instances: Mapping[str, int], total: int) -> str:
    if not instances:
        return ""
    return f"on {', '.join(name if n == total else f'{name} ({n:,})' for name, n in instances.items())}"
