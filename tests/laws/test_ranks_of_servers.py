"""Laws of servers that pick their data-parallel ranks: loads add up, and each method is SGLang's."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.messages import FlushCache, PeerDown, PeerUp, Send
from pdsim.core.routing.ranked_router import RankedRouter
from pdsim.core.sequence import Spans
from pdsim.policy.ranks import LoadBalanceMethod, rank_policy
from pdsim.policy.routing import LeastLoaded, RoundRobin
from tests.support import request, run, small

RANKS = {"decode-0": ["decode-0.dp0", "decode-0.dp1", "decode-0.dp2"], "decode-1": ["decode-1.dp0", "decode-1.dp1"]}


def servers(method: LoadBalanceMethod, policy=None) -> RankedRouter:
    return RankedRouter(RANKS, policy or LeastLoaded(), {server: rank_policy(method, 0) for server in RANKS})


def rank_loads(router: RankedRouter) -> dict[str, tuple[int, int]]:
    loads = {rank: router.load_of(rank) for ranks in RANKS.values() for rank in ranks}
    return {rank: (load.num_requests, load.num_tokens) for rank, load in loads.items()}


@given(
    st.sampled_from(get_args(LoadBalanceMethod)), st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=40)
)
def test_a_server_has_the_load_of_its_ranks(method, arrivals):
    router, live = servers(method), []
    for i, (num_tokens, ends_one) in enumerate(arrivals):
        live.append((router.pick(Spans.of(i, num_tokens), 0), num_tokens))
        if ends_one:
            router.release(*live.pop(0))
    loads = rank_loads(router)
    held = Counter(rank for rank, _ in live)
    assert {rank: count for rank, (count, _) in loads.items() if count} == held
    for load in router.loads:
        own = [loads[rank] for rank in RANKS[load.instance_id]]
        assert (load.num_requests, load.num_tokens) == tuple(map(sum, zip(*own, strict=True)))


class Budget:
    """A twin of SGLang's DPBudget.dispatch, whose counts are never stale."""

    def __init__(self, num_ranks: int) -> None:
        self.requests, self.tokens = [0] * num_ranks, [0] * num_ranks

    def dispatch(self, method: str, num_tokens: int) -> int:
        if method == "total_requests":
            rank = self.requests.index(min(self.requests))
        else:
            rank = min(range(len(self.tokens)), key=lambda i: (self.tokens[i], self.requests[i]))
        self.add(rank, 1, num_tokens)
        return rank

    def add(self, rank: int, num_requests: int, num_tokens: int) -> None:
        self.requests[rank] += num_requests
        self.tokens[rank] += num_tokens


@given(
    st.sampled_from(["total_requests", "total_tokens"]),
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 2)), max_size=40),
)
def test_the_lightest_rank_is_that_of_sglangs_budget(method, arrivals):
    ranks = [f"decode-0.dp{rank}" for rank in range(4)]
    router, budget = RankedRouter({"decode-0": ranks}, RoundRobin(), {"decode-0": rank_policy(method, 0)}), Budget(4)
    live: list[tuple[int, int]] = []
    for i, (num_tokens, num_ends) in enumerate(arrivals):
        rank = budget.dispatch(method, num_tokens)
        assert router.pick(Spans.of(i, num_tokens), 0) == ranks[rank]
        live.append((rank, num_tokens))
        for _ in range(min(num_ends, len(live))):
            ended, freed_tokens = live.pop(0)
            router.release(ranks[ended], freed_tokens)
            budget.add(ended, -1, -freed_tokens)


def test_a_server_is_offered_until_its_last_rank_is_down():
    router = servers("round_robin", RoundRobin())
    router.note(PeerDown("decode-1.dp0"))
    assert [router.pick(Spans.of(i, 8), 0) for i in (1, 2)] == ["decode-0.dp0", "decode-1.dp1"]
    router.note(PeerDown("decode-1.dp1"))
    assert {router.pick(Spans.of(i, 8), 0).partition(".")[0] for i in range(3, 9)} == {"decode-0"}
    router.note(PeerUp("decode-1.dp1"))
    assert "decode-1.dp1" in {router.pick(Spans.of(i, 8), 0) for i in range(9, 13)}
    assert router.forget() == [Send(rank, FlushCache()) for ranks in RANKS.values() for rank in ranks]


def test_a_server_whose_ranks_have_all_restarted_has_no_cached_prompts():
    router, prompt = servers("round_robin"), Spans.of(1, 640)
    assert router.num_cached_tokens(prompt, "decode-1") == 0
    router.pick(prompt, 0, avoid="decode-0.dp0")
    assert router.num_cached_tokens(prompt, "decode-1") == 640
    router.note(PeerDown("decode-1.dp0", has_restarted=True))
    assert router.num_cached_tokens(prompt, "decode-1") == 640
    router.note(PeerDown("decode-1.dp1", has_restarted=True))
    assert router.num_cached_tokens(prompt, "decode-1") == 0
    assert not router.all_down
    router.pick(prompt, 0, avoid="decode-0.dp0")
    router.note(PeerDown("decode-1.dp0"))
    router.note(PeerUp("decode-1.dp0"))
    assert router.num_cached_tokens(prompt, "decode-1") == 640


def ranks_of(role: str, method: str, num_requests: int = 64) -> Counter:
    """Requests of each rank in a run of one server with four ranks in each role."""
    changes = {f"{role}__load_balance_method": method} if method else {}
    for name in ("prefill", "decode"):
        changes |= {f"{name}__tp": 4, f"{name}__dp": 4}
    scenario = small(*(request(i, 8, 2, arrival_ns=i) for i in range(num_requests)), **changes)
    return Counter(getattr(record, f"{role}_id") for record in run(scenario).records.requests)


def test_by_default_prefill_follows_the_room_and_decode_takes_turns():
    assert set(ranks_of("decode", "").values()) == {16}
    drawn = ranks_of("prefill", "")
    assert len(drawn) == 4
    assert drawn == ranks_of("prefill", "follow_bootstrap_room")
    assert max(drawn.values()) > 16


@pytest.mark.parametrize("method", ["round_robin", "total_requests", "router"])
def test_other_methods_spread_equal_prompts_evenly(method):
    assert set(ranks_of("prefill", method).values()) == {16}
