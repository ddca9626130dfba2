"""Whether pdsim's cache of pages and states does what SGLang's own does (experiments/conformance/hybrid)."""

from importlib import import_module
from pathlib import Path


def test_every_operation_of_the_log_is_sglangs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path("experiments/conformance/hybrid")))
    found = import_module("replay_cache").outcomes().values()
    assert [outcome.difference for outcome in found if outcome.difference] == []
    assert sum(outcome.num_equal for outcome in found) == 3383
