"""Stages of TTFT with staging: the page has what stamps and simulations say."""

import importlib
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "sglang-h200"


@pytest.fixture
def staged(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    return importlib.import_module("staged")


def test_the_page_has_the_stages_of_warm_runs(staged):
    page = (STUDY / "README.md").read_text()
    for load in ("warm, three runs", "warm, 160 requests"):
        real = staged.measured(staged.LOADS[load])
        assert staged.row(load, "measured", real) in page
        for name, changes in staged.known().items():
            found = staged.simulated(staged.LOADS[load][0], changes)
            assert staged.row("", name, found)[:-3] in page
            assert found.sum() < real.sum()
