"""Laws of KV-aware routing: counts against sets of pages, and costs against Dynamo's formula, written down plainly."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.instance import PolicyError
from pdsim.core.routing.role_router import MemorySize, RoleRouter
from pdsim.core.sequence import Spans
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.views import RoutingView, TokenSequence
from tests.support import request, run, small, small_aggregated

NAMES = ["a", "b", "c"]
POOL = 10_000
SHORT = 20

prompts = st.builds(
    lambda stem, shared, own: (stem, shared, own), st.integers(0, 1), st.integers(0, 40), st.integers(1, 30)
)
loads = st.lists(st.tuples(prompts, st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=25)
weights = st.builds(
    DynamoKv,
    overlap_score_credit=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    overlap_score_credit_decay=st.sampled_from([0.0, 1.0]),
    prefill_load_scale=st.sampled_from([0.0, 1.0, 3.0]),
    decode_active_request_weight=st.sampled_from([0.0, 2.0]),
)


class Twin:
    """Remembers all prompts of each instance token by token."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.sent = {name: [] for name in NAMES}
        self.live = {}
        """(instance, tokens, uncached tokens until computed) by request."""

    def cached(self, tokens, name):
        whole = [page for sent in self.sent[name] for page in self.pages(sent)]
        return self.page * len([page for page in self.pages(tokens) if page in whole])

    def pages(self, tokens):
        """Beginnings that end with a whole page."""
        return [tuple(tokens[: i + self.page]) for i in range(0, len(tokens) - self.page + 1, self.page)]

    def costs(self, tokens, policy, role):
        queued = {name: sum(u for n, _, u in self.live.values() if n == name) for name in NAMES}
        found = []
        for name in NAMES:
            there = [sent for n, sent, _ in self.live.values() if n == name]
            credit = policy.overlap_score_credit
            excess = (queued[name] - min(queued.values())) / self.page / ceil(len(tokens) / self.page)
            credit /= 1 + policy.overlap_score_credit_decay * excess
            compute = (queued[name] + len(tokens)) / self.page - credit * self.cached(tokens, name) / self.page
            distinct = {page for sent in [*there, tokens] for page in self.pages(sent)}
            used = {"prefill": 0, "aggregated": len(distinct)}
            used["decode"] = sum(len(self.pages(sent)) for sent in [*there, tokens])
            cost = 0 if role == "decode" else policy.prefill_load_scale * max(0, compute)
            found.append(cost + used[role] + policy.decode_active_request_weight * len(there))
        return found


class Told(DynamoKv):
    told = ""

    def pick(self, prompt: TokenSequence, view: RoutingView) -> str:
        return self.told


@given(loads, weights, st.sampled_from(["prefill", "decode", "aggregated"]), st.sampled_from([1, 4, 16]))
def test_costs_are_those_of_a_twin(load, policy, role, page):
    told = Told()
    router, twin = RoleRouter(NAMES, told, role, MemorySize(page, POOL)), Twin(page)
    for number, ((stem, shared, own), place, computes, ends) in enumerate(load):
        prompt = Spans(((stem, 0, shared), (100 + number, 0, own)) if shared else ((100 + number, 0, own),))
        tokens = [(stem, i) for i in range(shared)] + [(100 + number, i) for i in range(own)]
        assert policy.costs(prompt, router) == pytest.approx(twin.costs(tokens, policy, role))
        told.told = name = NAMES[place]
        router.pick(prompt, 0, request_id=number)
        twin.live[number] = (name, tokens, len(tokens) - twin.cached(tokens, name))
        twin.sent[name].append(tokens)
        oldest = next(iter(twin.live))
        there, its_tokens, _ = twin.live[oldest]
        if computes:
            router.on_computed(oldest)
            twin.live[oldest] = (there, its_tokens, 0)
        if ends:
            router.release(there, len(its_tokens), oldest)
            del twin.live[oldest]


@given(loads, st.sampled_from([1, 16]))
def test_nothing_is_left_when_all_requests_have_left(load, page):
    router = RoleRouter(NAMES, DynamoKv(), "aggregated", MemorySize(page, POOL))
    nothing = Spans.of(999, page)
    live = []
    for number, ((_, shared, own), *_) in enumerate(load):
        prompt = Spans(((0, 0, shared + 1), (100 + number, 0, own)))
        live.append((router.pick(prompt, 0, request_id=number), len(prompt), number))
    for one in live:
        router.release(*one)
    for instance in router.loads:
        counted = (instance.num_requests, instance.num_tokens, instance.num_pages)
        assert counted == (0, 0, 0)
        assert router.num_uncached_tokens(instance.instance_id) == 0
        assert router.num_pages_with(nothing, instance.instance_id) == 1


def test_a_policy_says_that_it_is_kv_aware():
    class Careless(DynamoKv):
        is_kv_aware = False

    with pytest.raises(PolicyError, match="is_kv_aware"):
        RoleRouter(NAMES, Careless(), "prefill").pick(Spans.of(1, 100), 0)


def long_among_short(router, **changes):
    """A tenth of the prompts is 50 times as long as the others; prefill is busy for 70 % of the time."""
    lengths = {"use": "mixed", "parts": [{"use": "fixed", "tokens": n} for n in (SHORT, 1000)], "shares": [9, 1]}
    workload = {"use": "random_lengths", "num_requests": 400, "input_tokens": lengths, "output_tokens": 2}
    client = {"use": "open_loop", "arrivals": {"use": "poisson", "rate": "18/s"}}
    return small(workload=workload, client=client, prefill__instances=3, router=router, **changes)


def mean_ttft_ns(router):
    """Of the short prompts."""
    requests = [one for one in run(long_among_short(router)).records.requests if one.num_prompt_tokens == SHORT]
    return sum(one.first_token_ns - one.arrival_ns for one in requests) / len(requests)


def test_short_prompts_wait_less_where_tokens_are_counted():
    counted = mean_ttft_ns("dynamo_kv")
    assert counted < 0.95 * mean_ttft_ns("least_loaded")
    assert counted < 0.5 * mean_ttft_ns("round_robin")


@pytest.mark.parametrize("made", [small, small_aggregated])
def test_the_router_counts_nothing_when_a_run_has_ended(made):
    specs = [request(i, 50 + 10 * i, 1 + i % 3, arrival_ns=i * 5_000_000) for i in range(30)]
    role = "aggregated" if made is small_aggregated else "prefill"
    router = run(made(*specs, router="dynamo_kv", **{f"{role}__instances": 2})).cluster.router
    for instances in router.roles.values():
        for load in instances.loads:
            assert (load.num_requests, load.num_pages, instances.num_uncached_tokens(load.instance_id)) == (0, 0, 0)
