"""How much of what vLLM's Scheduler decided pdsim's vLLM instance decides too (experiments/conformance/vllm)."""

from importlib import import_module
from pathlib import Path

import pytest

STUDY = Path("experiments/conformance/vllm")
NUM_COMPARED = 81_559
"""Decisions that agree: behind a first difference, none counts."""


@pytest.fixture
def replay(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return import_module("replay")


def test_no_fewer_decisions_agree(replay):
    assert sum(replay.compare(name).num_compared for name in replay.names()) >= NUM_COMPARED
