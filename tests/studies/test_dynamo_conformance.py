"""Whether pdsim's dynamo_kv makes the choices of Dynamo's own router (experiments/conformance/dynamo)."""

from importlib import import_module
from pathlib import Path

import pytest

STUDY = Path("experiments/conformance/dynamo")


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return import_module("compare_choices")


def test_costs_and_choices_are_dynamos(study):
    found = {name: study.compare(name) for name in study.LOADS}
    assert {name: one.num_differing for name, one in found.items()} == dict.fromkeys(found, 0)
    assert sum(one.num_choices for one in found.values()) == 2012


def test_draws_are_as_frequent_as_dynamos(study):
    theirs, ours = study.drawn()
    for share, own in zip(theirs, ours, strict=True):
        assert abs(share - own) < 5 * (2 * share * (1 - share) / len(study.replay("temperature").rest)) ** 0.5
