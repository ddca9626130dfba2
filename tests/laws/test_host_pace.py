"""Work of a host takes as long as its pace says, however often that changes meanwhile."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.scenario.sections.cost import HostSettings
from pdsim.sim.bus import Timeline
from pdsim.sim.instances.actor import Host
from tests.support import MILLISECOND, request, run, small

changes = st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.03, 1)), max_size=8)


@given(works=st.lists(st.integers(1, 5000), min_size=1, max_size=5), changes=changes)
def test_works_end_when_the_integral_of_the_pace_reaches_them(works, changes):
    timeline = Timeline()
    host, ends = Host(timeline, HostSettings()), []
    for at_ns, pace in changes:
        timeline.after(at_ns, host.go_at, pace)
    for work_ns in works:
        host.work(work_ns)
        host.when_free(lambda _: ends.append(timeline.now_ns))
    timeline.run_all()
    paces = [(0, 1.0), *sorted(changes, key=lambda change: change[0]), (max(ends) + 1, 1.0)]
    for k, end_ns in enumerate(ends, 1):
        stretches = [
            (max(0, min(until_ns, end_ns) - since_ns), pace) for (since_ns, pace), (until_ns, _) in pairwise(paces)
        ]
        slack = 1 + len(changes)  # less than one ns is lost at each change
        assert sum(ns * pace for ns, pace in stretches) == pytest.approx(sum(works[:k]), abs=slack)


def test_a_result_waits_until_the_one_before_it_is_handed_on():
    """Launches of 3 ms hide forwards of 1 ms, so that both results are seen at once. A forward ends with its launch."""
    specs = [request(i, 1, 6, arrival_ns=i * MILLISECOND) for i in range(2)]
    lines = {"use": "affine", "prefill_per_token": "1 ms", "decode_base": "10 ms"}
    scenario = small(
        *specs, prefill__overlap=True, cost={"prefill": lines, "decode": lines, "host": {"launch": "3 ms"}}
    )
    records = run(scenario).records
    assert all(request.outcome == "finished" for request in records.requests)
    assert {step.duration_ns for step in records.steps if step.kind == "prefill"} == {3 * MILLISECOND}


STAGED = {"prefill__tp": 2, "network__staging": {"ring": "1 GB"}}


@pytest.mark.parametrize(
    ("changes", "waits_ms"), [({}, [1]), ({}, [2, 2]), ({}, [2, 3, 4, 4]), (STAGED, [1]), (STAGED, [3, 4, 5, 6])]
)
def test_a_transfer_begins_when_the_next_is_handed_on_or_none_is_left(changes, waits_ms):
    """One forward computes all requests; each is handed on in 1 ms.

    Gathers begin one request later, and take 0.8 ms each.
    """
    specs = [request(i, 1, 2) for i in range(len(waits_ms))]
    lines = {"use": "affine", "prefill_base": "10 ms", "decode_base": "10 ms"}
    cost = {"prefill": lines, "decode": lines, "host": {"send": "1 ms"}}
    scenario = small(*specs, cost=cost, network__transfer_latency=0, **changes)
    waits: dict[int, int] = {}
    for row in run(scenario).records.transfers:
        waits.setdefault(row.request_id, round((row.start_ns - row.queued_ns) / MILLISECOND))
    assert sorted(waits.values()) == waits_ms
