"""Layout of what commands print on the terminal: tables, and consoles of the right width."""

from collections.abc import Iterable, Sequence
from os import environ
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 180
"""Width in characters if the output goes to no terminal and COLUMNS is not set. All columns fit into it."""
_LEFT = ("", "what happens", "asked for", "arm", "metric", "form", "coefficients, ns", "settings", "in variant")
"""Titles of table columns that have words, and are therefore aligned left. The first column of each table is aligned
left, too.
"""


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column in _LEFT else "right", vertical="bottom")
    return table


def folded(name: str) -> str:
    """A long name, broken into lines at hyphens."""
    return "\n".join(wrap(name, 16))


def print_first_that_fits(variants: Iterable[Sequence[Table]]) -> None:
    """Prints the tables of the first variant that fits the terminal. If no variant fits: those of the last."""
    console = new_console()
    for tables in variants:
        if all(fits(console, table) for table in tables):
            break
    for table in tables:
        console.print(table)


def fits(console: Console, table: Table) -> bool:
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def new_console() -> Console:
    console = Console(emoji=False)
    return console if console.is_terminal or "COLUMNS" in environ else Console(width=_WIDTH, emoji=False)
