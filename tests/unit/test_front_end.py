"""Kinds of front ends: times of each, and their ranges."""

import pytest

from pdsim.scenario.front_end import KINDS, FrontEndSettings
from pdsim.sim.simulation import simulate
from tests.support import request, small

LATENCY = "mean_ttft_ms"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lies_between_its_ends(kind):
    specs = [request(i, 40, 4, arrival_ns=i * 10_000_000) for i in range(4)]
    scenario = small(*specs, cost="kernels", front_end=kind)
    fast, slow = (simulate(end).summary()[LATENCY] for end in scenario.ends)
    assert fast < simulate(scenario).summary()[LATENCY] < slow


def test_a_field_beside_a_kind_wins_and_makes_it_certain():
    given = FrontEndSettings(kind="dynamo", latency_in="7 ms")
    assert given.latency_in == 7_000_000
    assert not given.is_uncertain
    assert FrontEndSettings(kind="dynamo", waits_for_prefill=True).is_uncertain
    assert small(request(0, 8, 2), front_end={"kind": "dynamo", "latency_in": "7 ms"}).uncertain_front_end is None


def test_without_a_kind_fields_that_are_left_out_are_nothing():
    assert FrontEndSettings().is_none
    assert not FrontEndSettings().is_uncertain
