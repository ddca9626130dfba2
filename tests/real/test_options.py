"""What flags of real mode make of this machine."""

import os

import pytest

pytest.importorskip("torch", reason="real mode needs torch")

from pdreal.settings.options import Options


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 8, 2, 3, 4, 5, 6})


def test_ranks_on_a_cpu_share_no_core(cores):
    assert [Options().cores_of_rank(i, 3) for i in range(3)] == [(2, 3), (4, 5), (6, 8)]


@pytest.mark.parametrize(("device", "num_ranks"), [("cuda", 2), ("cpu", 8)])
def test_all_cores_are_everybodys_on_gpus_and_where_ranks_are_more(cores, device, num_ranks):
    assert Options(device=device).cores_of_rank(1, num_ranks) == (2, 3, 4, 5, 6, 8, 9)
