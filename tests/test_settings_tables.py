"""The reference of fields against the code, and tables of the documentation: units, transports, sweep files."""

import json
import re

import pytest

from docs.fields import reference
from pdsim.scenario.sections.component import BUILT_IN
from pdsim.scenario.sections.fields import DURATION, RATE, SIZE
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.reference import COMPONENTS, REQUIRED, default_in, entries, entry
from pdsim.study.sweeping.sweep_file import Sample, SearchSettings, SweepFile, sweep_schema
from pdsim.system.catalog import SHIPPED, load_transport
from tests.markdown import ROOT, plain, sections, table

DOCS = ROOT / "docs"
SWEEPS = sections(DOCS / "sweeps.md")
SCENARIO = sections(DOCS / "scenario.md")


@pytest.mark.parametrize("name", [found.name for found in entries()])
def test_every_field_setting_and_column_has_a_meaning(name):
    """A dataclass without a docstring has its signature as one."""
    for row in entry(name).rows:
        assert row[-1], row
        assert not re.match(r"\w+\(", row[-1]), row


def test_every_component_has_a_place():
    assert set(COMPONENTS) == set(BUILT_IN)
    assert all(entry(use).rows[0][0] == use for built_in in BUILT_IN.values() for use in built_in)


def test_a_field_has_an_entry_and_its_bare_name_leads_to_it():
    assert entry("decode.dcp").rows == [row for row in entry("decode").rows if row[0] == "dcp"]
    with pytest.raises(ConfigError, match=r"'dcp' is the name of a field: say decode\.dcp or aggregated\.dcp"):
        entry("dcp")


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="an empty name"):
        entry("")


def test_defaults_are_written_as_files_have_them():
    rows = {found.name: {row[-3]: row[-2] for row in found.rows} for found in entries() if "default" in found.columns}
    assert rows["network"]["message_latency"] == "50 us"
    assert rows["prefill"]["policy"] == "fcfs"
    assert rows["decode"]["radix_cache"] == "false"
    assert rows["decode"]["gpu"] == REQUIRED
    assert rows["storage"]["read_bandwidth"] == "6900 MB/s"
    assert rows["prefill policies"]["patience"] == "10 s"


def test_every_property_of_the_json_schema_is_shown_and_described():
    schema = json.loads((ROOT / "pdsim.schema.json").read_text())
    shown = set(re.findall(r"^\| `(\w+)`", reference(), re.MULTILINE))
    for part in [schema, *schema["$defs"].values()]:
        for name, field in part.get("properties", {}).items():
            assert name in shown
            assert field["description"]


def test_every_unit_is_named():
    text = (DOCS / "scenario.md").read_text()
    for dimension in (DURATION, RATE, SIZE):
        assert all(f"`{unit}`" in text for unit in dimension.units)


def test_every_transport_is_named_with_its_link():
    links = {"over NVLink": "nvlink", "over NICs": "nic", "within a host": "host"}
    lists = re.findall(r"^- ([\w ]+): ((?:.|\n  )*)", SCENARIO["Transports"], re.MULTILINE)
    documented = {name: links[where] for where, text in lists for name in re.findall(r"`([\w-]+)`", text)}
    shipped = [path.stem for path in (SHIPPED / "transports").glob("*.yaml")]
    assert documented == {name: load_transport(name).link for name in shipped}


@pytest.mark.parametrize(
    ("heading", "section"),
    [("The file", SweepFile), ("random and sobol", Sample), ("search", SearchSettings)],
)
def test_every_field_of_a_sweep_file_is_documented_with_its_default(heading, section):
    rows = [row for row in table(SWEEPS[heading]) if len(row) == 4]
    documented = {plain(row[0]): plain(row[2]) for row in rows}
    assert documented == {field.alias or name: default_in(field) for name, field in section.model_fields.items()}


def test_the_schema_of_sweep_files_is_current():
    assert json.loads((ROOT / "pdsim.sweep.schema.json").read_text()) == sweep_schema()
