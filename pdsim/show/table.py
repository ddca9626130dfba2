"""A table of report pages and of documentation: cells that know what they are sorted by."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdsim.metrics.summary_rows import significant


@dataclass(frozen=True)
class Cell:
    """`order` is what its column is sorted by; None: the text."""

    text: str
    order: float | None = None
    tone: str = ""
    """good, bad, or nothing."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def markdown(self) -> str:
        """Columns and rows, without title and caption."""
        texts = [list(self.columns), *([cell.text for cell in row] for row in self.rows)]
        head, *lines = ["|" + "|".join(f" {text} " if text else " " for text in row) + "|" for row in texts]
        return "\n".join([head, "|---" * len(self.columns) + "|", *lines])


def cell(value: float | None, shown: str = "") -> Cell:
    """A number, sorted by its value; empty, and sorted below all others, if there is none."""
    return Cell("") if value is None else Cell(format(value, shown) if shown else significant(value), value)
