"""Links that transfers share, beside naive twins that share them out anew at every event."""

from functools import partial
from math import inf
from operator import is_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.sim.bus import Timeline
from pdsim.sim.links.network import Flow, Flows, fair_rates
from tests.support import MILLISECOND, examples, request, run, small
from tests.twins.fair_links import NaiveFlow, ends_ns, share

LINKS = "abcd"
paths = st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True).flatmap(
    lambda links: st.tuples(*(st.tuples(st.just(link), st.sampled_from([1, 2, 0.5])) for link in links))
)
limits = st.sampled_from([float("inf"), float("inf"), 20, 150])


@given(
    st.lists(st.tuples(paths, limits), max_size=8),
    st.fixed_dictionaries({link: st.sampled_from([100, 150, 400]) for link in LINKS}),
)
@examples(300)
def test_rates_rise_together_until_a_link_is_full(flows, capacity):
    clever = [Flow(None, path, limit, remaining=1.0) for path, limit in flows]
    naive = [NaiveFlow(path, limit=None if limit == float("inf") else limit) for path, limit in flows]
    fair_rates(clever, capacity)
    share(naive, capacity)
    assert [flow.rate for flow in clever] == pytest.approx([float(flow.rate) for flow in naive])


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 60)), min_size=1, max_size=10),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, "150 MB/s", "1 GB/s"]),
)
@examples(40)
def test_transfers_arrive_when_fair_links_bring_them(loads, gpus_per_nic, shared_bandwidth):
    """Three prefill and three decode instances of two ranks each; each rank sends half of the bytes."""
    traced = run(
        small(
            *(request(i, prompt, 2, arrival_ns=at * MILLISECOND) for i, (prompt, at) in enumerate(loads)),
            router="random",
            prefill__instances=3,
            prefill__tp=2,
            decode__instances=3,
            decode__tp=2,
            network__bandwidth="100 MB/s",
            network__gpus_per_nic=gpus_per_nic,
            network__shared_bandwidth=shared_bandwidth,
        )
    )
    topology = traced.cluster.interconnect.topology
    transfers = [t for t in traced.records.transfers if t.num_bytes]
    flows = [
        NaiveFlow(
            topology.ways_out[t.source] + topology.ways_in[t.target],
            t.num_bytes / 2,
            t.start_ns + t.setup_ns + t.posting_ns,
        )
        for t in transfers
    ]
    ends = ends_ns(flows, topology.capacity)
    for transfer, flow in zip(transfers, flows, strict=True):
        assert transfer.end_ns == pytest.approx(ends[flow], abs=100)


@given(
    st.lists(
        st.tuples(paths, st.integers(1, 1000), st.integers(0, 10**9), st.none() | st.integers(1, 10**10)),
        min_size=1,
        max_size=8,
    ),
    st.fixed_dictionaries({link: st.sampled_from([100, 150, 400]) for link in LINKS}),
)
@examples(100)
def test_flows_that_are_dropped_leave_their_share_from_then_on(loads, capacity):
    """Each begins at its time; some are dropped so long after."""
    naive = [
        NaiveFlow(path, num_bytes, begin_ns, dropped_ns=inf if lasts_ns is None else begin_ns + lasts_ns)
        for path, num_bytes, begin_ns, lasts_ns in loads
    ]
    timeline, arrived = Timeline(), {}
    flows = Flows(timeline, capacity, lambda flow: arrived.setdefault(flow, timeline.now_ns))
    for flow in naive:
        timeline.after(flow.begin_ns, lambda flow: flows.begin(flow, flow.num_bytes, flow.path), flow)
        if flow.dropped_ns < inf:
            timeline.after(flow.dropped_ns, lambda flow: flows.drop(partial(is_, flow)), flow)
    timeline.run_all()
    ends = ends_ns(naive, capacity)
    close = {flow for flow, end_ns in ends.items() if flow.dropped_ns - end_ns < 100}
    assert arrived.keys() | close == ends.keys() | close
    assert [ends[flow] for flow in arrived] == pytest.approx(list(arrived.values()), abs=100)
