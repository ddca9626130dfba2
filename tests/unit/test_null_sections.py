"""Null in a file stands for what the field has by default: an empty section, as `network:` alone, changes nothing."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from pdsim.scenario.loading import parse_scenario as parse_scenario_at
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import AggregatedSettings
from pdsim.scenario.yaml_file import ConfigError


def parse_scenario(data):
    return parse_scenario_at(data, base=Path())


DATA = {
    "model": "qwen3-8b",
    "prefill": {"gpu": "h100"},
    "decode": {"gpu": "h100"},
    "workload": {"use": "random_lengths", "num_requests": 4, "input_tokens": 8, "output_tokens": 2},
}
OPTIONAL = [name for name, field in Scenario.model_fields.items() if not field.is_required()]
SECTIONS = ("prefill", "decode", "network", "front_end", "router", "cost")


def fields_of(section):
    part = getattr(parse_scenario({**DATA, **({} if section in DATA else {section: {}})}), section)
    assert isinstance(part, BaseModel)
    return [name for name, field in type(part).model_fields.items() if not field.is_required()]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", [name for name in OPTIONAL if name not in ("prefill", "decode", "engine")])
def test_null_is_as_if_a_field_were_not_there(engine, name):
    data = {**DATA, "engine": engine}
    assert parse_scenario({**data, name: None}) == parse_scenario(data)


@pytest.mark.parametrize("priorities", [{}, {"chat": 1}])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("section", SECTIONS)
def test_null_is_as_if_a_field_of_a_section_were_not_there(section, engine, priorities):
    data = {**DATA, "engine": engine, "priorities": priorities}
    given = data.get(section, {})
    expected = parse_scenario({**data, section: given})
    for name in fields_of(section):
        assert parse_scenario({**data, section: {**given, name: None}}) == expected, name


@pytest.mark.parametrize("priorities", [{}, {"chat": 1}])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_null_is_as_if_a_field_of_aggregated_servers_were_not_there(engine, priorities):
    given = {"gpu": "h100"}
    data = {"model": DATA["model"], "workload": DATA["workload"], "engine": engine, "priorities": priorities}
    expected = parse_scenario({**data, "aggregated": given})
    names = [name for name, field in AggregatedSettings.model_fields.items() if not field.is_required()]
    for name in names:
        assert parse_scenario({**data, "aggregated": {**given, name: None}}) == expected, name


@pytest.mark.parametrize("name", ["model", "workload", "prefill"])
def test_null_where_a_value_is_needed_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        parse_scenario({**DATA, name: None})
