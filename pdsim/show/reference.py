"""The reference of `pdsim fields`: the fields of scenarios and of run folders, explained by the docstrings of
the code.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich import box
from rich.markup import escape
from rich.table import Table

from pdsim.core.instance import Levels
from pdsim.cost.model import CostSettings
from pdsim.metrics.explanation.explain import PARTS
from pdsim.metrics.explanation.stages import ALL_STAGES
from pdsim.metrics.records import LevelRecord, RequestRecord, StepRecord, TransferRecord
from pdsim.metrics.summary_rows import OWN_FIELDS, SUMMARY_FIELDS
from pdsim.policy import protocols
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import BUILT_IN, default_of, describe_component, settings_of
from pdsim.scenario.sections.faults import Fault
from pdsim.scenario.sections.fields import Quantity, Section, in_words, meanings
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.show.terminal.layout import new_console
from pdsim.workload.client import Arrivals, Client
from pdsim.workload.lengths import Lengths
from pdsim.workload.request_spec import Workload

REQUIRED = "required"
COMPONENTS: dict[Any, str] = {
    protocols.PrefillPolicy: "prefill policies",
    protocols.TransferPolicy: "transfer policies",
    protocols.AdmissionPolicy: "admission policies",
    protocols.PreemptionPolicy: "preemption policies",
    protocols.EvictionPolicy: "eviction policies",
    protocols.RoutingPolicy: "routing policies",
    protocols.DisaggregationPolicy: "disaggregation policies",
    protocols.SheddingPolicy: "shedding policies",
    protocols.QueuePolicy: "queue policies",
    protocols.ScalingPolicy: "scaling policies",
    CostSettings: "cost models",
    Workload: "workloads",
    Client: "clients",
    Arrivals: "arrivals",
    Lengths: "lengths",
    Fault: "faults",
}


class ReferenceEntry(NamedTuple):
    """The reference of a section, of a kind of component, or of a file in a run folder: a table whose last column
    explains the row.
    """

    name: str
    """Name of the section, kind or file. An entry for one component or field has the name of the component or field."""
    about: str
    """Text above the entry's table."""
    columns: tuple[str, ...]
    """Titles of the columns."""
    rows: Sequence[tuple[str, ...]]
    """Rows of texts, one text per column."""


def scenario_entries() -> Iterator[ReferenceEntry]:
    yield from _section("scenario", Scenario)
    for seam, title in COMPONENTS.items():
        rows = [row for name in BUILT_IN[seam] for row in _component(seam, name)]
        yield ReferenceEntry(title, ", ".join(BUILT_IN[seam]), ("use", "setting", "default", "meaning"), rows)


def run_entries() -> Iterator[ReferenceEntry]:
    for name, meaning_of in (("summary", SUMMARY_FIELDS), ("summary.pdsim", OWN_FIELDS), ("parts", PARTS)):
        yield ReferenceEntry(name, "", ("field", "meaning"), list(meaning_of.items()))
    stages = [(stage, first, last, meaning) for stage, (first, last, meaning) in ALL_STAGES.items()]
    yield ReferenceEntry("stages", "", ("stage", "from", "to", "meaning"), stages)
    for name, record in (("requests", RequestRecord), ("steps", StepRecord), ("transfers", TransferRecord)):
        yield ReferenceEntry(name, in_words(record.__doc__), ("column", "meaning"), _columns(record))
    levels = [row for row in _columns(LevelRecord) if row[0] != "levels"]
    yield ReferenceEntry("levels", in_words(LevelRecord.__doc__), ("column", "meaning"), [*levels, *_columns(Levels)])


def entries() -> Iterator[ReferenceEntry]:
    yield from scenario_entries()
    yield from run_entries()


@cache
def _by_name() -> dict[str, ReferenceEntry]:
    return {found.name: found for found in entries()}


def entry(name: str) -> ReferenceEntry:
    """The reference of a section, a table, a component, or one field such as "decode.tp". Raises ConfigError if nothing
    has this name.
    """
    known = _by_name()
    if name in known:
        return known[name]
    section, _, field = name.rpartition(".")
    if section in known and (rows := [row for row in known[section].rows if row[0] == field]):
        return ReferenceEntry(name, "", known[section].columns, rows)
    for seam, title in COMPONENTS.items():
        if name in BUILT_IN[seam]:
            return ReferenceEntry(f"{title}: {name}", "", known[title].columns, _component(seam, name))
    if not name:
        raise ConfigError("an empty name; without a name, pdsim fields lists the sections")
    if fields := [f"{found.name}.{name}" for found in known.values() if any(row[0] == name for row in found.rows)]:
        raise ConfigError(f"{name!r} is the name of a field: say {' or '.join(fields)}")
    every = [*known, *(use for built_in in BUILT_IN.values() for use in built_in)]
    raise ConfigError(
        f"no section, component or table {name!r}{did_you_mean(name, every)}; there are {', '.join(known)}"
    )


def _section(name: str, section: type[Section]) -> Iterator[ReferenceEntry]:
    """Yields the reference of a section, and of each section inside it."""
    said = meanings(section)
    inner, rows = {}, []
    for key, field in section.model_fields.items():
        rows.append((field.alias or key, default_in(field), said.get(key, "")))
        for hint in (field.annotation, *get_args(field.annotation)):
            if isinstance(hint, type) and issubclass(hint, Section):
                inner[key] = hint
    yield ReferenceEntry(name, in_words(section.__doc__), ("field", "default", "meaning"), rows)
    for key, kind in inner.items():
        yield from _section(key if section is Scenario else f"{name}.{key}", kind)


def _component(seam: Any, name: str) -> list[tuple[str, ...]]:
    """Rows of a reference table: one for the component `name`, and one for each of its settings, except those that a
    built-in base class lists already. seam: kind of the component, a key of BUILT_IN.
    """
    module, _, kind = BUILT_IN[seam][name].partition(":")
    component = getattr(import_module(module), kind)
    said = meanings(component)
    bases = [
        base for base in component.__mro__[1:] if f"{base.__module__}:{base.__qualname__}" in BUILT_IN[seam].values()
    ]
    inherited = {field.name for base in bases for field in fields(base)}
    rows: list[tuple[str, ...]] = [(name, "", "", in_words(component.__doc__))]
    for field, key, dimension in settings_of(component):
        if field.name in inherited:
            continue
        default = default_of(field, dimension)
        rows.append(("", key, REQUIRED if default is MISSING else text_of(default), said.get(field.name, "")))
    return rows


def _columns(record: type[Any]) -> list[tuple[str, ...]]:
    if is_dataclass(record):
        names = [field.name for field in fields(record) if field.metadata.get("in_table", True)]
    else:
        names = record._fields
    said = meanings(record)
    return [(name, said.get(name, "")) for name in names]


def default_in(field: FieldInfo) -> str:
    """The default of a field, as files have it. Empty: the field is a section, whose fields have defaults."""
    if field.default is PydanticUndefined:
        return REQUIRED
    if isinstance(field.default, Section):
        return ""
    quantity = next((m for m in field.metadata if isinstance(m, Quantity)), None)
    return text_of(quantity.dimension.show(field.default) if quantity and field.default is not None else field.default)


def text_of(value: Any) -> str:
    if is_dataclass(value):
        value = describe_component(value)
        value = value if isinstance(value, str) else value["use"]
    return value or '""' if isinstance(value, str) else json.dumps(value)


def print_entry(found: ReferenceEntry) -> None:
    table = Table(*found.columns, box=box.SIMPLE_HEAD)
    for row in found.rows:
        table.add_row(*map(escape, row))
    console = new_console()
    console.print(found.name, style="bold", highlight=False)
    console.print(escape(found.about), highlight=False)
    console.print(table)
