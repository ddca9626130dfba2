"""Each refusal is the engine's, by file and line, or says that pdsim does not model it (engine_rules.yaml)."""

import os
import re
from pathlib import Path

import pytest

import pdsim
from pdsim.scenario.yaml_file import read_yaml
from tests.launch import engine_parsers

RULES = read_yaml(Path(__file__).with_name("engine_rules.yaml"))
OURS = Path(pdsim.__file__).parent
CITED = re.compile(r"([a-z_]+\.py):(\d+)")


def citations():
    """File and line of each citation in messages of scenarios and launches."""
    for path in sorted([*(OURS / "scenario").glob("*.py"), *(OURS / "launch").glob("*.py")]):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield from CITED.findall(line) if "0.5.23" in line or "0.33.0" in line else ()


def test_what_a_message_cites_is_in_the_table():
    at = {tuple(rule["at"].rpartition("/")[2].split(":")) for rule in RULES}
    assert {*citations()} <= at


def test_rules_name_files_of_ours_that_refuse():
    for rule in RULES:
        assert rule["ours"] in ("runs", "said") or (OURS / rule["ours"]).is_file(), rule
        assert ("takes" not in rule["does"]) or rule["ours"] == "runs" or "not modelled" in rule["does"], rule


@pytest.mark.parametrize("rule", RULES, ids=[rule["rule"] for rule in RULES])
def test_the_engine_has_the_rule_where_the_table_says(rule):
    folder = os.environ.get("PDSIM_ENGINES")
    if folder is None:
        pytest.skip("PDSIM_ENGINES names no folder of unpacked wheels")
    found = engine_parsers.wheels(Path(folder))
    if rule["engine"] not in found:
        pytest.skip(f"{folder} has no wheel of {rule['engine']}")
    path, _, line = rule["at"].rpartition(":")
    lines = (found[rule["engine"]][0] / path).read_text(encoding="utf-8").splitlines()
    assert [i for i, text in enumerate(lines, 1) if rule["finds"] in text].count(int(line)) == 1, rule
