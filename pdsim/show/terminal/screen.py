"""Parts of what commands print first: sentences, narrow tables, and the confidence."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from pdsim.show.terminal.layout import new_table
from pdsim.study.measurement import Measurement
from pdsim.study.verdict.confidence import Confidence

_WORDS = ("cluster", "why not", "")
"""Titles of columns that have words, which may be broken into lines. All other columns have numbers."""
_HEAD = 14
"""Maximum number of characters in a line of the title of a column with numbers. Longer words are broken only if the
terminal has no room for them.
"""


def print_headline(console: Console, text: str) -> None:
    console.print(text, style="bold", highlight=False, markup=False)


def print_sentence(console: Console, text: str) -> None:
    """Prints a sentence, indented below a headline."""
    console.print(Padding(text, (0, 0, 0, 2)), highlight=False, markup=False)


def print_command(console: Console, text: str) -> None:
    """Prints a command on a single line, so that it can be copied."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_confidence(console: Console, confidence: Confidence, measure: Measurement | None) -> None:
    """Prints the confidence and its reason. measure: the measurement that would raise the confidence; None: there is
    none.
    """
    print_headline(console, f"Confidence: {confidence.word}")
    print_sentence(console, confidence.reason)
    if measure is not None:
        print_sentence(console, f"To be sure, measure a server ({measure.minutes} minutes):")
        print_command(console, f"    {measure.command}")


def screen_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = new_table("")
    table.padding = (0, 1, 0, 0)
    for i, column in enumerate(columns):
        is_number = column not in _WORDS
        head = "\n".join(wrap(column, _HEAD, break_long_words=False)) if is_number else column
        width = max((len(line) for row in rows for line in row[i].splitlines()), default=0) if is_number else None
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(head, justify=justify, vertical="bottom", min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
