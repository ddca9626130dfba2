"""What pdsim's instances decide is what SGLang's schedulers decided (experiments/conformance/sglang-cpu)."""

from importlib import import_module
from pathlib import Path

import pytest

STUDY = Path("experiments/conformance/sglang-cpu")
LOGS = [path.name.removesuffix(".jsonl.gz") for path in sorted((STUDY / "logs").glob("*.jsonl.gz"))]
LOADS = [name for name in LOGS if not name.startswith("drawn-overlap-")]
OVERLAPPED = [int(name.rpartition("-")[2]) for name in LOGS if name.startswith("drawn-overlap-")]

NUM_PASSED = 2
"""Choices for requests of which one passed the other on its way to the router."""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return import_module("compare").compare


@pytest.mark.parametrize("load", LOADS)
def test_every_decision_is_sglangs(load, compare):
    outcomes = dict(compare(load))
    router = outcomes.pop("router", None)
    assert {name: outcome.difference for name, outcome in outcomes.items() if outcome.difference} == {}
    assert all(outcome.num_compared for outcome in outcomes.values())
    assert router is None or router.num_differing <= NUM_PASSED


def test_with_overlap_only_requests_that_stop_early_are_computed_once_more(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    overlap = import_module("overlap")
    found = [overlap.counts(seed) for seed in OVERLAPPED]
    assert len(found) >= 6
    assert all(each.longest and not each.longest_in_vain for each in found)
    assert sum(each.stopped_in_vain for each in found) > 0.8 * sum(each.stopped for each in found)


def test_there_are_loads_of_every_kind():
    assert len(LOADS) >= 12
