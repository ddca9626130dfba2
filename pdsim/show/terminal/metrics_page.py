"""Prints the numbers in a saved page of a server's metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.formats.pages import QUANTITIES
from pdsim.metrics.summary_rows import SUMMARY_ROWS, percentage
from pdsim.show.terminal.layout import new_console, new_table

_TITLES = {
    **{name: quantity.what for name, quantity in QUANTITIES.items() if not name.endswith(("_sum", "_count"))},
    "page_tokens": "tokens of a page",
    **{row.field: row.title for row in SUMMARY_ROWS},
    "mean_e2e_latency_ms": "latency mean",
}
_SHARES = ("cache_usage", "hit_share")


def print_page(
    observed: Mapping[str, float], told: Mapping[str, Any], simulated: Mapping[str, float] | None, notes: Sequence[str]
) -> None:
    """Prints the observed numbers. If there is a simulation: also the simulated numbers and their differences. told:
    fields of the server's setup. notes: sentences that are printed below.
    """
    console = new_console()
    columns = ("", "observed") if simulated is None else ("", "observed", "simulated", "difference")
    table = new_table("metrics", *columns)
    for name, title in _TITLES.items():
        if name not in observed:
            continue
        cells = [title, _text(name, observed[name])]
        if simulated is not None:
            value = simulated.get(name)
            cells.append("" if value is None else _text(name, value))
            cells.append("" if value is None or not observed[name] else percentage(value / observed[name] - 1))
        table.add_row(*cells)
    console.print(table)
    for name, value in told.items():
        console.print(f"{name}: {value}", highlight=False)
    for note in notes:
        console.print(f"pdsim: {note}", highlight=False)


def _text(name: str, value: float) -> str:
    if name in _SHARES:
        return f"{value:.1%}"
    if name.endswith("_ms"):
        return f"{value:,.1f} ms"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
