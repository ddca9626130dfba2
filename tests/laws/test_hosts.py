"""Servers over several hosts: their exchanges, and KV beside them on the same NICs."""

from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.host_traffic import EXCHANGE_NS, HostMoves, host_traffic, num_other_hosts
from pdsim.scenario.building import wiring
from pdsim.scenario.building.sizing import layout_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import SlowLink
from pdsim.sim.bus import Timeline
from pdsim.sim.links.host_exchange import HostExchange
from pdsim.sim.links.network import Flows
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.memory import Layout
from tests.laws.test_lockstep import rounds
from tests.support import examples, request, run, small, small_aggregated

RATE = 45e9
PARTS = 8
NIC = "nic out"


def layout(num_hosts: int, **changes: Any) -> Layout:
    """DeepSeek-V3 with data-parallel attention and whole experts over hosts of 8 H800."""
    sizes = {"tp": 1, "dp": 8 * num_hosts, "has_whole_experts": True} | changes
    return Layout(model=load_model("deepseek-v3"), gpu=load_gpu("h800"), kv_dtype="bf16", **sizes)


DEEPEP_US = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
"""Dispatch and combine of 128 tokens a GPU by low-latency kernels (DeepEP docs/legacy.md at 0297fc8, H800)."""


@pytest.mark.parametrize(("num_gpus", "published_us"), DEEPEP_US.items())
def test_an_exchange_takes_the_time_that_deepep_publishes(num_gpus, published_us):
    place = layout(num_gpus // 8)
    traffic = host_traffic(place)
    assert place.model.experts is not None
    assert traffic is not None
    layer_us = traffic.decode.ns(128, 128) / place.model.experts.num_layers / 1e3
    assert layer_us == pytest.approx(sum(published_us), rel=0.1)


@given(st.integers(1, 5), st.floats(1, 1e5))
def test_a_token_goes_once_to_each_host_in_prefill_and_once_to_each_expert_in_decode(num_hosts, num_tokens):
    traffic = host_traffic(layout(num_hosts))
    if num_hosts == 1:
        assert traffic is None
        return
    assert traffic is not None
    element = 58 * 7168 * (1 + 4 / 128 + 2)
    assert traffic.decode.out_bytes(num_tokens) == pytest.approx(num_tokens * element * 8 * (1 - 1 / num_hosts))
    assert traffic.prefill.out_bytes(num_tokens) <= num_tokens * element * min(num_hosts - 1, 8)
    assert traffic.prefill.fixed_ns == 2 * 58 * EXCHANGE_NS


def test_without_an_all_to_all_library_every_host_gets_all_tokens():
    whole, divided = layout(3, moe_a2a_backend="none"), layout(3, has_whole_experts=False)
    assert host_traffic(whole) == host_traffic(divided) != host_traffic(layout(3))


def test_experts_of_few_groups_are_on_few_hosts():
    """A token chooses 4 of 8 groups, each on a host of its own."""
    spec = load_model("deepseek-v3")
    assert num_other_hosts(spec, 8) == pytest.approx(7 * (4 / 8) * (1 - (3 / 4) ** 8))


def test_an_all_reduce_over_hosts_sums_a_share_of_each_gpu():
    traffic = host_traffic(layout(2, tp=16, dp=1, has_whole_experts=False))
    assert traffic is not None
    assert traffic.prefill.reduced_bytes == pytest.approx(2 * 61 * 2 * 7168 / 8)
    assert traffic.prefill.exchanged_bytes == 0


def on_one_link(num_bytes: float, computing_ns: int, kv_bytes: float, *, overlaps: bool) -> tuple[int, int]:
    """Ends of a forward and of KV that begin together on one link, in ns; 0: there is no KV."""
    timeline, ends = Timeline(), [0, 0]

    def arrived(owner: Any) -> None:
        if isinstance(owner, HostExchange):
            owner.arrived()
        else:
            ends[1] = timeline.now_ns

    flows = Flows(timeline, {NIC: RATE}, arrived)
    forward = HostExchange(
        timeline,
        flows,
        [(num_bytes, ((NIC, 1.0),))],
        computing_ns,
        PARTS,
        overlaps=overlaps,
        on_part=lambda *_: None,
        on_end=lambda: ends.__setitem__(0, timeline.now_ns),
    )
    forward.begin_after(0)
    if kv_bytes:
        flows.begin("KV", int(kv_bytes), ((NIC, 1.0),), inf)
    timeline.run_all()
    return ends[0], ends[1]


sizes = st.floats(1e6, 1e9), st.integers(0, 10**8)


@given(*sizes)
def test_alone_a_forward_computes_and_exchanges_in_turns_or_at_once(num_bytes, computing_ns):
    moving_ns = 1e9 * num_bytes / RATE
    in_turns, _ = on_one_link(num_bytes, computing_ns, 0, overlaps=False)
    assert in_turns == pytest.approx(computing_ns + moving_ns, abs=2 * PARTS)
    at_once, _ = on_one_link(num_bytes, computing_ns, 0, overlaps=True)
    assert at_once == pytest.approx(max(computing_ns, moving_ns), abs=2 * PARTS)


@given(*sizes)
def test_kv_and_an_exchange_on_one_link_halve_each_other(num_bytes, computing_ns):
    """KV is under way longer than the forward, whose bytes therefore take twice their time."""
    kv_bytes = 2 * num_bytes + RATE * computing_ns / 1e9
    forward_ns, kv_ns = on_one_link(num_bytes, computing_ns, kv_bytes, overlaps=False)
    assert forward_ns == pytest.approx(computing_ns + 2e9 * num_bytes / RATE, abs=4 * PARTS)
    assert kv_ns == pytest.approx(1e9 * (kv_bytes + num_bytes) / RATE, abs=4 * PARTS), "the link is never idle"


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_busiest_way_sets_the_time(own, routed):
    moves = HostMoves(fixed_ns=0, reduced_bytes=3, exchanged_bytes=5, bandwidth=1e9)
    assert moves.moving_ns(own, routed) == pytest.approx(max(8 * own, 3 * own + 5 * routed))


OVER_HOSTS = {"gpu": "h100", "tp": 16, "dp": 16, "pool_tokens": 8192}
COMPUTING = OVER_HOSTS | {"chunked_prefill_tokens": 65536}
MODEL = "qwen3-30b-a3b"
KERNELS = {"model": MODEL, "cost": "roofline", "network__transport": "mooncake-rdma"}


def over_hosts(*specs: Any, **changes: Any) -> Scenario:
    given = {"prefill": COMPUTING, "decode": OVER_HOSTS, "page_size": 16, "network": {}}
    return small(*specs, **{**given, **KERNELS, **changes})


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=24), st.booleans())
@examples(15)
def test_ranks_step_together_over_hosts(sizes, overlaps):
    specs = [request(i, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    servers = OVER_HOSTS | {"two_batch_overlap": overlaps}
    for scenario in (
        over_hosts(*specs, prefill=servers, decode=servers),
        small_aggregated(*specs, aggregated=servers, page_size=16, model=MODEL, cost="roofline"),
    ):
        traced, single = run(scenario, checked=True), run(scenario, single_steps=True)
        assert all(one.outcome == "finished" for one in traced.records.requests)
        assert traced.journal == single.journal
        for pairs in rounds(traced.records).values():
            for (_, end_ns), (next_start_ns, _) in pairwise(pairs):
                assert next_start_ns >= end_ns


def forward_ns(scenario: Scenario) -> int:
    (step,) = [step for step in run(scenario).records.steps if step.kind == "prefill"]
    duration_ns: int = step.duration_ns
    return duration_ns


def test_on_idle_links_a_forward_takes_what_the_cost_model_says():
    scenario = small_aggregated(request(0, 4000, 1), aggregated=COMPUTING, page_size=16, model=MODEL, cost="roofline")
    traffic = host_traffic(layout_of(scenario, "aggregated"))
    assert traffic is not None
    moving_ns = traffic.prefill.moving_ns(4000, 4000 / 16)
    alone_ns = forward_ns(scenario)
    slow = scenario.model_copy(update={"network": scenario.network.model_copy(update={"bandwidth": RATE / 3})})
    assert forward_ns(slow) - alone_ns == pytest.approx(2 * moving_ns, rel=1e-3), "a third of the link"


@pytest.mark.parametrize("skew", [0, 0.5])
def test_on_idle_links_equal_ranks_take_what_the_cost_model_says(skew):
    """With skew, what the busiest GPU's experts receive takes longer than what each rank sends."""
    servers = COMPUTING | {"expert_skew": skew}
    specs = [request(i, 250, 1) for i in range(16)]
    scenario = small_aggregated(*specs, aggregated=servers, page_size=16, model=MODEL, cost="roofline")
    model = scenario.cost.prefill.model(layout_of(scenario, "aggregated"))
    step = PrefillStep(0, (PrefillChunk(0, 0, 250, is_last=True),))
    found = [step.duration_ns for step in run(scenario).records.steps if step.kind == "prefill"]
    assert len(found) == 16
    assert found == pytest.approx([model.prefill_ns(step, 0, 250)] * 16, rel=1e-4)


def test_a_slow_link_of_kv_slows_the_exchange():
    scenario = over_hosts(request(0, 4000, 1), prefill__load_balance_method="round_robin")
    slow = SlowLink(at_ns=0, link="prefill-0.dp0", bandwidth_factor=0.25)
    assert forward_ns(scenario.model_copy(update={"faults": (slow,)})) > 1.2 * forward_ns(scenario)


def test_a_server_of_several_hosts_has_nics_of_its_own_hosts():
    """One prefill server of 4 GPUs, then decode on two hosts of 8."""
    scenario = over_hosts(request(0, 10, 1), prefill={"gpu": "h100", "tp": 4, "dp": 4}, network__gpus_per_nic=8)
    places = wiring.placed(scenario)
    assert [places[f"prefill-0.dp{i}"] for i in range(4)] == [0, 1, 2, 3]
    assert [places[f"decode-0.dp{i}"] for i in range(16)] == list(range(8, 24))
    assert sorted(wiring.host_nics(scenario).capacity) == ["nic 1 in", "nic 1 out", "nic 2 in", "nic 2 out"]
