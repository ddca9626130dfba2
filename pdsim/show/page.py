"""A page: its answer first, then figures, then tables. One file that needs no other and no network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from pdsim import __version__
from pdsim.metrics.summary_rows import significant
from pdsim.show.style import to_svg


@dataclass(frozen=True)
class Card:
    """One number of the answer."""

    title: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """A figure, and one line that says how to read it."""

    name: str
    """Unique on its page: letters, digits and hyphens."""
    title: str
    caption: str
    figure: Figure
    wide: bool = True
    """It takes the page's width; two that do not stand side by side."""

    @property
    def svg(self) -> str:
        return to_svg(self.figure, self.name)


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


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    answer: str
    """One sentence: what came out, or what limits."""
    detail: str
    cards: Sequence[Card]
    figures: Sequence[Shown]
    tables: Sequence[Table]
    warnings: Sequence[str] = field(default=())
    setup: str = ""
    """Which model on which GPUs; empty: not known."""
    differences: Table | None = None
    """The fields in which runs differ."""


def render(page: Page) -> str:
    assets = {name: _asset(name) for name in ("report.css", "report.js")}
    html: str = _template().render(
        page=page, version=__version__, style=assets["report.css"], script=assets["report.js"]
    )
    return html


def cell(value: float | None, shown: str = "") -> Cell:
    """A number, sorted by its value; empty, and sorted below all others, if there is none."""
    return Cell("") if value is None else Cell(format(value, shown) if shown else significant(value), value)


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return (files("pdsim.show") / "assets" / name).read_text(encoding="utf-8")
