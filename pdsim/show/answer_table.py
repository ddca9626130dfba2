"""An answer on the terminal: what to do, why, and the table behind it."""

from collections.abc import Mapping
from functools import partial
from textwrap import wrap

from rich.table import Table

from pdsim.show.tables import new_console, new_table, print_first_that_fits
from pdsim.study.questions.answer import Answer

_LEAST = 4
"""Columns of numbers: intervals are left out before there are fewer."""
_TITLE = 8
"""Characters of a line, where words allow it."""

EXAMPLE = "pdsim ask pd-ratio --set model=qwen3-8b --set client.concurrency=32"


def print_questions(asks: Mapping[str, str]) -> None:
    """Each by its name, then one to begin with."""
    console = new_console()
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, what in asks.items():
        table.add_row(name, what)
    console.print(table)
    console.print(f"\nFor example: {EXAMPLE}", highlight=False, soft_wrap=True)


def print_answer(made: Answer) -> None:
    console = new_console()
    console.print(made.load, style="dim", highlight=False, markup=False)
    console.print()
    console.print(made.text, style="bold", highlight=False, markup=False)
    console.print()
    for note in made.remarks():
        console.print(f"- {note}", highlight=False, markup=False)
    most = len(made.columns)
    sizes = [(count, True) for count in range(most, _LEAST - 1, -1)] + [(count, False) for count in range(most, 0, -1)]
    print_first_that_fits(console, *(partial(_table, made, count, spread=spread) for count, spread in sizes))


def _table(made: Answer, count: int, *, spread: bool) -> Table:
    """The first columns, titles in several lines; without intervals where there is no room for them."""
    table = new_table("")
    table.padding = (0, 1, 0, 0)
    titles = [made.titles[0], *made.titles[1 : count + 1], made.titles[-1]]
    for i, title in enumerate(titles):
        is_number = 0 < i <= count
        lines = wrap(title.replace(",", ""), _TITLE, break_long_words=False)
        table.add_column("\n".join(lines), justify="right" if is_number else "left", vertical="bottom")
    for row in made.rows:
        arm, *cells, remark = made.cells(row)
        table.add_row(arm, *(cell if spread else cell.partition(" ±")[0] for cell in cells[:count]), remark)
    left_out = [made.title(name).replace(",", "") for name in made.columns[count:]]
    if left_out:
        table.caption_justify = "left"
        table.caption = f"  no room for: {', '.join(left_out)}"
    return table
