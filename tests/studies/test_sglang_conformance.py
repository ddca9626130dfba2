"""What pdsim's instances decide beside what SGLang's schedulers decided (experiments/conformance/sglang-cpu)."""

from importlib import import_module
from pathlib import Path

import pytest

STUDY = Path("experiments/conformance/sglang-cpu")
LOADS = [path.name.removesuffix(".jsonl.gz") for path in sorted((STUDY / "logs").glob("*.jsonl.gz"))]

NUM_PASSED = 2
"""Choices for requests of which one passed the other on its way to the router."""

EQUAL = {"two-each-round-robin": ("decode-0", "decode-1")}
"""Instances that decide as SGLang's to the end. Of the others the README says where they begin to differ."""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return import_module("compare").compare


@pytest.mark.parametrize("load", LOADS)
def test_decisions_are_compared(load, compare):
    outcomes = dict(compare(load))
    assert all(outcome.num_compared for outcome in outcomes.values())
    assert not any(outcomes[name].difference for name in EQUAL.get(load, ()))
    assert "router" not in outcomes or outcomes["router"].num_differing <= NUM_PASSED


def test_there_are_loads_of_every_kind():
    assert len(LOADS) >= 12
