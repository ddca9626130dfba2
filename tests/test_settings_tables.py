"""Tables of settings against the code: every field, component, unit and transport, with its default."""

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import get_args

import pytest
from pydantic_core import PydanticUndefined

from pdsim.policy import protocols
from pdsim.scenario.component import BUILT_IN, _describe, _in_file, describe_component
from pdsim.scenario.cost import HostSettings
from pdsim.scenario.fields import DURATION, RATE, SIZE, Quantity, Section
from pdsim.scenario.network import StagingSettings
from pdsim.scenario.profile import MeasuredSettings
from pdsim.scenario.schema import Scenario
from pdsim.scenario.storage import HostCacheSettings
from pdsim.study.sweep_file import Sample, SearchSettings, SloSettings, SweepFile, sweep_schema
from pdsim.system.catalog import load_transport, names
from pdsim.workload.arrivals import Arrivals
from pdsim.workload.lengths import Lengths
from tests.markdown import ROOT, plain, sections, table

DOCS = ROOT / "docs"
SWEEPS = sections(DOCS / "sweeps.md")
SCENARIO = sections(DOCS / "scenario.md")

BY_FIELD = {"Top level": Scenario} | {
    name: hint
    for name, field in Scenario.model_fields.items()
    for hint in (field.annotation, *get_args(field.annotation))
    if isinstance(hint, type) and issubclass(hint, Section)
}
BY_FIELD |= {"network.staging": StagingSettings, "cost.host": HostSettings, "host_cache": HostCacheSettings}
BY_FIELD |= {"cost.measured": MeasuredSettings}

BY_USE = {
    "Prefill": protocols.PrefillPolicy,
    "Transfer": protocols.TransferPolicy,
    "Admission on decode": protocols.AdmissionPolicy,
    "Preemption on decode": protocols.PreemptionPolicy,
    "Eviction": protocols.EvictionPolicy,
    "Routing": protocols.RoutingPolicy,
    "Scaling": protocols.ScalingPolicy,
    "Disaggregation": protocols.DisaggregationPolicy,
    "Shedding": protocols.SheddingPolicy,
    "Arrivals": Arrivals,
    "Lengths": Lengths,
}
"""Headings of tables with a column `use`. Every other component has a heading of its own."""

BY_NAME = {
    name: path for seam, table in BUILT_IN.items() if seam not in BY_USE.values() for name, path in table.items()
}

GOES_ON_FROM = {"table": "affine"}
"""Whose settings it has as well."""


def shown(value) -> str:
    if is_dataclass(value):
        value = describe_component(value)
        value = value if isinstance(value, str) else value["use"]
    return value or '""' if isinstance(value, str) else json.dumps(value)


def settings(path: str) -> dict[str, str]:
    """Settings of a component and their defaults."""
    module, _, name = path.partition(":")
    found = {}
    for field in fields(getattr(import_module(module), name)):
        if field.init:
            key, dimension = _in_file(field.name)
            needed = field.default is MISSING and field.default_factory is MISSING
            found[key] = "required" if needed else shown(_describe(field.default, dimension))
    return found


def field_default(field) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, Section):
        return ""
    quantity = next((m for m in field.metadata if isinstance(m, Quantity)), None)
    return shown(quantity.dimension.show(field.default) if quantity and field.default is not None else field.default)


@pytest.mark.parametrize("heading", BY_FIELD)
def test_every_field_of_a_section_is_documented_with_its_default(heading):
    shared = table(SCENARIO["Instances"]) if heading in {"prefill", "decode", "aggregated"} else []
    if heading == "aggregated":
        of_roles = [*table(SCENARIO["prefill"]), *table(SCENARIO["decode"])]
        shared += [row for row in of_roles if plain(row[0]) in BY_FIELD[heading].model_fields]
    documented = {plain(row[0]): plain(row[2]) for row in [*shared, *table(SCENARIO[heading])]}
    assert documented == {name: field_default(field) for name, field in BY_FIELD[heading].model_fields.items()}


@pytest.mark.parametrize("heading", BY_USE)
def test_every_component_of_a_table_is_documented_with_its_defaults(heading):
    documented: dict[str, dict[str, str]] = {}
    name = ""
    for use, setting, default, _ in table(SCENARIO[heading]):
        name = plain(use) or name
        documented.setdefault(name, {}).update({plain(setting): plain(default)} if setting else {})
    assert documented == {name: settings(path) for name, path in BUILT_IN[BY_USE[heading]].items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_other_component_is_documented_with_its_defaults(name):
    documented = {plain(row[0]): plain(row[2]) for row in table(SCENARIO[name])}
    if "path" in settings(BY_NAME[name]):
        shared = {plain(row[0]): plain(row[2]) for row in table(SCENARIO["Workloads"])}
        documented |= {key: default for key, default in shared.items() if key in settings(BY_NAME[name])}
    of_base = settings(BY_NAME[GOES_ON_FROM[name]]) if name in GOES_ON_FROM else {}
    assert documented | of_base == settings(BY_NAME[name])


def test_every_property_of_the_json_schema_is_named():
    schema = json.loads((ROOT / "pdsim.schema.json").read_text())
    named = set(re.findall(r"`(\w+)`", (DOCS / "scenario.md").read_text()))
    for part in [schema, *schema["$defs"].values()]:
        assert part.get("properties", {}).keys() <= named


def test_every_unit_is_named():
    text = (DOCS / "scenario.md").read_text()
    for dimension in (DURATION, RATE, SIZE):
        assert all(f"`{unit}`" in text for unit in dimension.units)


def test_every_transport_is_named_with_its_link():
    links = {"Over NVLink": "nvlink", "Over NICs": "nic", "In a host": "host"}
    lists = re.findall(r"(Over NVLink|Over NICs|In a host): (.*?)\.", SCENARIO["Transports"], re.DOTALL)
    documented = {name: links[where] for where, text in lists for name in re.findall(r"`([\w-]+)`", text)}
    assert documented == {name: load_transport(name).link for name in names("transports")}


@pytest.mark.parametrize(
    ("heading", "section"),
    [("The file", SweepFile), ("random and sobol", Sample), ("slos", SloSettings), ("search", SearchSettings)],
)
def test_every_field_of_a_sweep_file_is_documented_with_its_default(heading, section):
    rows = [row for row in table(SWEEPS[heading]) if len(row) == 4]
    documented = {plain(row[0]): plain(row[2]) for row in rows}
    assert documented == {field.alias or name: field_default(field) for name, field in section.model_fields.items()}


def test_the_schema_of_sweep_files_is_current():
    assert json.loads((ROOT / "pdsim.sweep.schema.json").read_text()) == sweep_schema()
