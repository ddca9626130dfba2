"""Laws of routing by KV events: the router knows what instances have, and counts blocks in host memory for less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.message_json import from_json, to_json
from pdsim.core.messages import Arrival, CachedTokens
from pdsim.core.routing.ranked_router import RankedRouter
from pdsim.core.routing.role_router import MemorySize, RoleRouter
from pdsim.core.sequence import Spans
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.routing import RoundRobin
from pdsim.scenario.schema import RouterSettings
from tests.laws.test_offloading import offloading
from tests.support import examples, request, run, run_both_ways, small, small_aggregated

NAMES = ["a", "b", "c"]
PAGE = 4
MS = 1_000_000

tiers = st.tuples(st.integers(0, 6), st.integers(0, 6))
arrivals = st.lists(st.tuples(st.lists(tiers, min_size=3, max_size=3), st.integers(1, 50)), min_size=1, max_size=12)
weights = st.builds(
    DynamoKv,
    overlap_score_credit=st.sampled_from([0.0, 1.0, 1.5]),
    prefill_load_scale=st.sampled_from([1.0, 3.0]),
    kv_events=st.just(True),
    host_cache_hit_weight=st.sampled_from([0.0, 0.25, 0.75, 1.0]),
)


@given(arrivals, weights)
def test_costs_and_work_are_those_of_a_twin(arrivals, policy):
    """Twin: Dynamo's formula over the blocks of both tiers; a weighted block is no work any more."""
    router = RoleRouter(NAMES, policy, "prefill", MemorySize(PAGE))
    work = dict.fromkeys(NAMES, 0)
    for number, (blocks, num_more) in enumerate(arrivals):
        prompt = Spans.of(number, 12 * PAGE + num_more)
        router.see([CachedTokens(name, PAGE * d, PAGE * h) for name, (d, h) in zip(NAMES, blocks, strict=True)])
        expected = []
        for name, (device, host) in zip(NAMES, blocks, strict=True):
            credit = policy.overlap_score_credit * device + policy.host_cache_hit_weight * host
            expected.append(policy.prefill_load_scale * max(0, (work[name] + len(prompt)) / PAGE - credit))
        assert policy.costs(prompt, router) == pytest.approx(expected)
        picked = router.pick(prompt, 0, request_id=number)
        assert expected[NAMES.index(picked)] == pytest.approx(min(expected))
        device, host = blocks[NAMES.index(picked)]
        work[picked] += len(prompt) - int(PAGE * (device + policy.host_cache_hit_weight * host) + 0.5)
        assert {name: router.num_uncached_tokens(name) for name in NAMES} == work


def test_a_server_has_what_its_best_rank_has():
    ranks = {"p": ["p/0", "p/1"], "q": ["q/0", "q/1"]}
    policy = DynamoKv(kv_events=True)
    router = RankedRouter(ranks, policy, dict.fromkeys(ranks, RoundRobin()), "prefill", MemorySize(PAGE))
    router.see([CachedTokens("p/0", 8, 0), CachedTokens("p/1", 4, 8), CachedTokens("d", 99, 99)])
    assert [router.tier_tokens(server) for server in ranks] == [(4, 8), (0, 0)]
    assert router.instance_ids == ["p/0", "p/1", "q/0", "q/1"]


def test_a_journal_has_caches_only_where_the_router_asks():
    arrival = Arrival(1, Spans.of(1, 9), 5, cached=(CachedTokens("a", 8, 0),))
    assert from_json(to_json(arrival)) == arrival


def with_events(scenario, **settings):
    router = RouterSettings(prefill=DynamoKv(kv_events=True, **settings), decode=DynamoKv())
    return scenario.model_copy(update={"router": router})


@examples(25)
@given(offloading())
def test_the_router_is_told_what_the_caches_have(scenario):
    many, _ = run_both_ways(with_events(scenario))
    assert all(one.outcome == "finished" for one in many.records.requests)
    for entry in many.journal:
        message = entry.args[0] if entry.call == "on_message" and entry.instance_id == "router" else None
        for one in message.cached if isinstance(message, Arrival) else ():
            assert one.num_device_tokens % scenario.page_size == one.num_host_tokens % scenario.page_size == 0
            assert 0 < one.num_device_tokens + one.num_host_tokens <= len(message.prompt)


SHARED = Spans.of(1, 64)


def routed_again(num_queued, host_weight, cluster=small_aggregated, **changes):
    """The instance of a prompt that is only in the host memory of one of two instances. That instance has a prompt of
    num_queued tokens to compute, and the other instance has nothing to do.
    """
    role = "aggregated" if cluster is small_aggregated else "prefill"
    specs = [
        request(0, SHARED, 1),
        request(1, 76, 1, arrival_ns=200 * MS),
        request(2, 76, 1, arrival_ns=200 * MS + 1),
        request(3, num_queued, 1, arrival_ns=400 * MS),
        request(4, SHARED, 1, arrival_ns=401 * MS),
    ]
    router = {"use": "dynamo_kv", "kv_events": True, "host_cache_hit_weight": host_weight}
    sizes = {f"{role}__instances": 2, f"{role}__pool_tokens": 88, f"{role}__host_cache": "1 GB"}
    traced = run(cluster(*specs, page_size=PAGE, router=router, **{f"{role}__radix_cache": True}, **sizes, **changes))
    places = [one.prefill_id for one in traced.records.requests]
    assert places[1] != places[2]  # each evicts what its instance has
    cached = [
        entry.args[0].cached
        for entry in traced.journal
        if entry.instance_id == "router" and isinstance(entry.args[0], Arrival)
    ]
    assert cached[-1][0].instance_id == places[0]
    return places[4] == places[0], places[3] == places[0], sum(cached[-1][0][1:])


@pytest.mark.parametrize(("host_weight", "is_there"), [(0.75, True), (0.0, False)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_host_memory_draws_a_prompt_to_its_instance(engine, host_weight, is_there):
    """A queue of 12 tokens costs 3 blocks; the blocks in host memory are worth three quarters each."""
    went_back, is_behind, num_cached = routed_again(12, host_weight, engine=engine)
    assert num_cached == len(SHARED)
    assert went_back == (is_there or not is_behind)


def test_without_kv_events_nobody_is_asked():
    router = {"use": "dynamo_kv"}
    traced = run(small(request(0, 40, 2), request(1, 40, 2), router=router, prefill__instances=2))
    assert traced.cluster.router.asked_caches == []
