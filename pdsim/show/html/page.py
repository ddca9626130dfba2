"""An HTML page in one file, which loads nothing from elsewhere. The page has first the answer, then figures, then
tables.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from pdsim import __version__
from pdsim.dataclass import dataclass
from pdsim.metrics.summary_rows import counted, significant
from pdsim.show.html.figures import FigureBlock
from pdsim.study.points.tasks import shown


@dataclass(frozen=True)
class Cell:
    """A cell of a table. order: key by which the column is sorted; None: the text is the key."""

    text: str
    order: float | None = None
    tone: str = ""
    """Meaning of the cell's colour: good or bad. Empty: the cell is not coloured."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    """Titles of the columns."""
    rows: Sequence[Sequence[Cell]]
    """Rows of cells, one cell per column."""
    caption: str = ""
    stacks: bool = False
    """True: if the page is narrow, each row is shown as a list of its columns."""


def cell(value: float | None, shown: str = "") -> Cell:
    """A cell with a number, by which its column is sorted. shown: format of the number; empty: four significant digits.
    value None: an empty cell, which is sorted below all numbers.
    """
    return Cell("") if value is None else Cell(format(value, shown) if shown else significant(value), value)


@dataclass(frozen=True)
class Card:
    """A number or a word, such as a confidence, that is shown in large type with its title."""

    title: str
    value: str
    """The number or word. The unit of a number is here or in `note`."""
    note: str = ""
    """Text below the number. Empty: none."""


@dataclass(frozen=True)
class TextList:
    """A list of sentences on a page, with a title."""

    title: str
    items: Sequence[str]


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    """Text below the title."""
    answer: str
    """A sentence with the result. If there is no result: the reason."""
    detail: str
    """Text below the answer."""
    cards: Sequence[Card]
    figures: Sequence[FigureBlock]
    tables: Sequence[Table]
    warnings: Sequence[str] = field(default=())
    lists: Sequence[TextList] = field(default=())
    """Lists of sentences, which stand below the tables."""
    setup: str = ""
    """The model and its GPUs as text. Empty: not known."""
    differences: Table | None = None
    """Table of the scenario fields in which the runs differ. None: they do not differ."""


def render(page: Page) -> str:
    assets = {name: _asset(name) for name in ("colours.css", "report.css", "report.js")}
    style = assets["colours.css"] + assets["report.css"]
    html: str = _template().render(page=page, version=__version__, style=style, script=assets["report.js"])
    return html


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return (files("pdsim.show") / "assets" / name).read_text(encoding="utf-8")


Fields = Mapping[str, Any]
"""A resolved scenario as plain data: values by field."""

_ROLES = ("prefill", "decode", "aggregated")
_NOT_SETUP = ("name", "description", "checkpoint")
_MOST_FIELDS = 12
"""Maximum number of rows in a table of differences."""
_MOST_ALTERNATIVES = 2


def setup_sentence(scenarios: Sequence[Fields]) -> str:
    """A sentence on model, servers, page size, costs and load. If scenarios differ in one of them, the sentence has
    both values; of more than two, it has the first and the number of the others. scenarios: scenarios as nested
    dictionaries of their fields.
    """
    parts = [_either(scenarios, _model)]
    parts += [_either([s for s in scenarios if s.get(role)], partial(_servers, role)) for role in _ROLES]
    parts += [_either(scenarios, lambda s: f"pages of {counted(s['page_size'], 'token')}"), _either(scenarios, _steps)]
    parts += [_either([s for s in scenarios if "workload" in s], _load)]
    return "; ".join(part for part in parts if part)


def differences(scenarios: Mapping[str, Fields]) -> Table | None:
    """Table of the fields in which scenarios differ, fields of `cost` last. None: the scenarios do not differ."""
    flat = {name: dict(_flat(fields)) for name, fields in scenarios.items()}
    paths = list(dict.fromkeys(path for fields in flat.values() for path in fields))
    found = [path for path in paths if len({fields.get(path) for fields in flat.values()}) > 1]
    found.sort(key=lambda path: path.startswith("cost."))
    if not found:
        return None
    rows = [[Cell(path), *(Cell(fields.get(path, "—")) for fields in flat.values())] for path in found[:_MOST_FIELDS]]
    rest = len(found) - len(rows)
    return Table("What differs", ["field", *flat], rows, f"And {counted(rest, 'field')} more." if rest else "")


def _flat(fields: Fields, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each field, and its value as scenario files write it, such as 0 for 0.0. Leaves out
    fields that are None, and name, description and checkpoint. prefix: beginning of each path.
    """
    for name, value in fields.items():
        if prefix + name in _NOT_SETUP or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, re.sub(r"(?<=\d)\.0\b", "", shown(value))


def _either(scenarios: Sequence[Fields], part: Callable[[Fields], str]) -> str:
    found = list(dict.fromkeys(part(scenario) for scenario in scenarios))
    return " or ".join(found) if len(found) <= _MOST_ALTERNATIVES else f"{found[0]} or one of {len(found) - 1} others"


def _model(scenario: Fields) -> str:
    weights = f"{scenario['weight_dtype']} weights, " if scenario.get("weight_dtype") else ""
    return f"{scenario['model']} ({weights}{scenario['kv_dtype']} KV)"


def _servers(role: str, scenario: Fields) -> str:
    servers = scenario[role]
    attention = f", DP{servers['dp']}" if servers["dp"] > 1 else ""
    sizes = {size: servers.get(size, 1) for size in ("pp", "cp", "dcp")}
    stages = "".join(f", {size.upper()}{number}" for size, number in sizes.items() if number > 1)
    num_gpus = servers["instances"] * servers["tp"] * sizes["pp"]
    return f"{role} {servers['instances']} x TP{servers['tp']}{attention}{stages} on {num_gpus} {servers['gpu']}"


def _steps(scenario: Fields) -> str:
    uses = dict.fromkeys(_use(scenario["cost"][role]) for role in ("prefill", "decode"))
    return f"steps timed by {' and '.join(uses)}"


def _load(scenario: Fields) -> str:
    return f"load {_use(scenario['workload'])}, {_use(scenario['client'])}"


def _use(component: Any) -> str:
    """The name of a component. component: a name, or a mapping with `use` and settings."""
    return str(component["use"] if isinstance(component, Mapping) else component)
