"""Kinds of front ends: times of each, and their ranges."""

import pytest

import pdsim
from pdsim.scenario.sections.front_end import KINDS, FrontEndSettings
from pdsim.sim.bus import Timeline
from pdsim.sim.clients import FrontEnd
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


class Seen:
    """Stands in for clients: what they see, and when."""

    def __init__(self, timeline):
        self.first_tokens_ms = {}
        self._timeline = timeline

    def arrive(self, spec):
        pass

    route = arrive

    def see_first_token(self, request_id):
        self.first_tokens_ms[request_id] = self._timeline.now_ns / 1e6


INTERPRETED = pytest.mark.skipif(pdsim.is_compiled(), reason="a compiled front end takes no stand-in")


def front_end(**settings):
    timeline = Timeline()
    seen = Seen(timeline)
    return timeline, seen, FrontEnd(timeline, FrontEndSettings(**settings), seen)


@INTERPRETED
def test_after_a_retry_the_answer_of_another_prefill_instance_is_waited_for():
    timeline, seen, passing = front_end(waits_for_prefill=True)
    passing.send(request(0, 8, 2))
    for tell in (passing.on_prefill_answer, passing.on_retry, passing.on_streamed):
        tell(0)
    timeline.run_all()
    assert seen.first_tokens_ms == {}
    passing.on_prefill_answer(0)
    timeline.run_all()
    assert seen.first_tokens_ms == {0: 0}


@INTERPRETED
def test_a_client_takes_the_connection_that_was_idle_longest():
    """One that was used less than 40 ms ago stalls."""
    timeline, seen, passing = front_end(stall="7 ms")

    def serve(request_id, begin_ms, end_ms):
        timeline.after(begin_ms * 10**6, lambda _: passing.send(request(request_id, 8, 2)))
        timeline.after(begin_ms * 10**6, lambda _: passing.on_streamed(request_id))
        timeline.after(end_ms * 10**6, lambda _: passing.on_end(request_id, lambda: None, failed=False))

    for times in ((0, 100, 110), (1, 105, 145), (2, 155, 156), (3, 157, 158)):
        serve(*times)
    timeline.run_all()
    assert seen.first_tokens_ms == {0: 100, 1: 105, 2: 155, 3: 157 + 7}
