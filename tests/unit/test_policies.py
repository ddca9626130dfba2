"""Policies against their rules, written down plainly."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.instance import PolicyError
from pdsim.core.messages import Arrival, Failed, Finished, PrefillDone
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.routing.router import Router
from pdsim.core.sequence import Spans
from pdsim.policy.pages import ReserveDecodeTokens, ReserveMaxOutput
from pdsim.policy.prefill import (
    DepthFirst,
    FirstComeFirstServed,
    HighestResponseRatioFirst,
    LongestOutputFirst,
    LongestPrefixFirst,
    RandomOrder,
    ShortestPrefillFirst,
    ShortestPromptFirst,
)
from pdsim.policy.protocols import Admitted, Deferred
from pdsim.policy.routing import CacheAware, LeastLoaded, PowerOfTwo, RandomChoice, RoundRobin
from pdsim.policy.views import Candidate


@dataclass
class Request:
    request_id: int = 0
    arrival_ns: int = 0
    num_prompt_tokens: int = 10
    num_output_tokens: int = 0
    max_output_tokens: int = 10
    prompt: Spans = field(default_factory=lambda: Spans.of(1, 10))
    priority: int = 0

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def entry(self):
        return self.request_id

    @property
    def num_asked_tokens(self):
        return self.max_output_tokens

    @classmethod
    def long(cls, request_id: int, num_prompt_tokens: int = 50) -> "Request":
        """A request that shares nothing with others."""
        prompt = Spans.of(100 + request_id, num_prompt_tokens)
        return cls(request_id, request_id, num_prompt_tokens, prompt=prompt)


@dataclass
class Decode:
    """A DecodeView."""

    num_available_pages: int
    running: list
    now_ns: int = 0
    page_size: int = 4
    num_ahead_tokens: int = 1
    others: list = field(default_factory=list)
    retracted: list = field(default_factory=list)
    resumes_by_tokens: bool = False

    @property
    def active(self):
        return [*self.running, *self.others]

    @property
    def num_active(self):
        return len(self.active)

    @property
    def resume_unit_tokens(self):
        return 1 if self.resumes_by_tokens else self.page_size

    @property
    def num_running_tokens(self):
        return sum(r.num_prompt_tokens + r.num_output_tokens for r in self.running)


requests = st.builds(
    Request,
    num_prompt_tokens=st.integers(1, 3000),
    num_output_tokens=st.integers(1, 500),
    max_output_tokens=st.integers(1, 6000),
)
views = st.builds(
    Decode,
    num_available_pages=st.integers(0, 4000),
    running=st.lists(requests, max_size=6),
    others=st.lists(requests, max_size=3),
    retracted=st.lists(requests, max_size=2),
    page_size=st.sampled_from([1, 4, 64]),
    resumes_by_tokens=st.booleans(),
)


def fits_in_sglang(candidate: Candidate, view: Decode, reserved: int) -> bool:
    """_allocatable_token_budgets and _required_admission_tokens of SGLang, token by token.

    Retracted requests count whole pages in 0.5.23, and tokens in 0.5.12 (_prealloc_required_tokens).
    """
    clip, page = 4096, view.page_size
    unit = 1 if view.resumes_by_tokens else page
    in_batch = view.num_running_tokens
    wholes = [min(r.max_output_tokens, clip) + r.num_prompt_tokens - in_batch for r in view.running]
    single = 0 if candidate.resumes else max(wholes, default=0)
    budget = view.num_available_pages * page - max(reserved * view.num_active, single)
    need = candidate.num_new_pages * page + reserved
    if candidate.resumes:
        need = -(-candidate.num_tokens // unit) * unit + reserved
    else:
        for r in view.retracted:
            kv = r.num_prompt_tokens + r.num_output_tokens - 1
            budget -= -(-kv // unit) * unit + reserved
        request = candidate.request
        alone = request.num_prompt_tokens - candidate.num_cached_tokens + min(request.max_output_tokens, clip)
        need = max(need, alone - in_batch)
    return need <= budget


@given(views, requests, st.integers(0, 100), st.sampled_from([0, 8, 512]), st.booleans())
def test_reserve_decode_tokens_is_sglangs_rule(view, request, cached_pages, reserved, resumes):
    pages = -(-request.num_prompt_tokens // view.page_size)
    cached = min(cached_pages, pages)
    candidate = Candidate(request, request.num_prompt_tokens, cached * view.page_size, pages - cached, resumes)
    answer = ReserveDecodeTokens(reserved_tokens=reserved).admit(candidate, view)
    assert isinstance(answer, Admitted) == fits_in_sglang(candidate, view, reserved)


def test_a_candidate_that_decoding_alone_cannot_help_is_not_asked_about_again():
    view = Decode(5, [Request(num_prompt_tokens=10, num_output_tokens=1)])
    policy = ReserveDecodeTokens(reserved_tokens=4)
    assert policy.admit(Candidate(Request(), 24, 0, 6), view) == Deferred(None)
    # The pages would do, but 10 + 4000 tokens do not, until what runs has grown enough to be given back.
    assert policy.admit(Candidate(Request(max_output_tokens=4000), 10, 0, 2), view) == Deferred(1)


def test_reserve_max_output_counts_what_others_will_grow_to():
    other = Request(num_prompt_tokens=8, num_output_tokens=1, max_output_tokens=9)  # 2 pages now, 4 in the end
    candidate = Candidate(Request(num_prompt_tokens=8, max_output_tokens=5), 8, 0, 2)  # 2 pages now, 3 in the end
    policy = ReserveMaxOutput()
    assert isinstance(policy.admit(candidate, Decode(5, [other])), Admitted)
    assert policy.admit(candidate, Decode(4, [other])) == Deferred(None)


@dataclass
class Prefill:
    """A PrefillView."""

    waiting: list
    now_ns: int = 0
    cached: dict = field(default_factory=dict)
    waited: dict = field(default_factory=dict)
    page_size: int = 1
    paths: dict = field(default_factory=dict)

    def num_cached_tokens(self, request):
        return self.cached.get(request.request_id, 0)

    use_cached_tokens = num_cached_tokens

    def num_waited_tokens(self, request):
        return self.waited.get(request.request_id, 0)

    def cached_path(self, request):
        return self.paths.get(request.request_id, ())


def order(policy, view):
    return [pick.request_id for pick in policy.select(view)]


def test_prefill_orders():
    waiting = [Request.long(i, n) for i, n in enumerate((50, 20, 90))]
    view = Prefill(waiting, now_ns=10, cached={2: 40, 1: 5})
    assert order(FirstComeFirstServed(), view) == [0, 1, 2]
    assert order(ShortestPromptFirst(), view) == [1, 0, 2]
    assert order(ShortestPromptFirst(patience_ns=8), view) == [1, 0, 2]
    assert order(ShortestPromptFirst(patience_ns=9), view) == [0, 1, 2]
    assert order(LongestPrefixFirst(), view) == [2, 1, 0]
    many = Prefill([Request.long(i) for i in range(129)], now_ns=10, cached={2: 40})
    assert order(LongestPrefixFirst(), many) == list(range(129))


def alike(request_id: int, stem: int, num_prompt_tokens: int = 50) -> Request:
    """A request whose prompt begins with 32 tokens of a stem."""
    prompt = Spans(((stem, 0, 32), (1000 + request_id, 0, num_prompt_tokens - 32)))
    return Request(request_id, num_prompt_tokens=num_prompt_tokens, prompt=prompt)


def test_of_prompts_that_begin_alike_with_nothing_cached_the_first_goes_ahead():
    waiting = [alike(i, stem) for i, stem in enumerate((7, 7, 8, 7))]
    assert order(LongestPrefixFirst(), Prefill(waiting)) == [0, 2, 1, 3]
    assert order(LongestPrefixFirst(), Prefill(waiting, cached={1: 33})) == [1, 0, 2, 3]
    assert order(LongestPrefixFirst(), Prefill(waiting, cached={1: 32})) == [0, 2, 1, 3]  # next to nothing is cached


def test_the_longest_output_goes_first_after_priorities():
    asks = [
        Request(i, max_output_tokens=tokens, priority=priority)
        for i, (tokens, priority) in enumerate([(5, 0), (9, 0), (9, 0), (1, 7)])
    ]
    assert order(LongestOutputFirst(), Prefill(asks)) == [3, 1, 2, 0]


def test_the_highest_ratio_of_waiting_to_work_goes_first():
    waiting = [Request.long(i, n) for i, n in enumerate((50, 10, 100, 40))]
    view = Prefill(waiting, waited={0: 100, 1: 30, 2: 200, 3: 0}, cached={2: 50, 3: 39})
    assert order(HighestResponseRatioFirst(), view) == [2, 1, 0, 3]  # 4, 3, 2, 0
    assert order(HighestResponseRatioFirst(), Prefill(waiting, cached={3: 40})) == [3, 0, 1, 2]  # all of it is cached
    alikes = [alike(i, stem) for i, stem in enumerate((7, 7, 8))]
    assert order(HighestResponseRatioFirst(), Prefill(alikes, waited={1: 900})) == [0, 2, 1]


def test_the_fewest_uncached_tokens_go_first_and_a_partial_prompt_leaves_room_for_them():
    waiting = [Request.long(i, n) for i, n in enumerate((50, 20, 90))]
    policy = ShortestPrefillFirst()
    view = Prefill(waiting, cached={2: 80})
    assert order(policy, view) == [2, 1, 0]  # 10, 20, 50 tokens
    view.waiting = waiting[::-1]
    assert policy.max_chunk_tokens(1000, 64, view) == 64 - 10 - 20
    assert policy.max_chunk_tokens(20, 64, view) == 64 - 10  # the second is no shorter
    assert policy.max_chunk_tokens(1000, 10, view) is None  # at least a page is left for the partial prompt
    assert policy.max_chunk_tokens(10, 64, view) is None
    view.page_size = 16
    assert policy.max_chunk_tokens(1000, 64, view) == 64 - 16 - 32
    many = [Request.long(i, 200 - i) for i in range(140)]
    assert order(ShortestPrefillFirst(), Prefill(many)) == list(range(139, -1, -1))


def test_the_heaviest_subtree_goes_first_and_a_node_behind_what_is_below_it():
    paths = {0: (0,), 1: (1,), 2: (1, 0), 3: (1, 1), 4: (1, 1), 5: ()}
    waiting = [Request.long(i) for i in range(6)]
    assert order(DepthFirst(), Prefill(waiting, paths=paths)) == [3, 4, 2, 1, 0, 5]


def test_a_random_order_is_reproducible_and_changes():
    waiting = [Request.long(i) for i in range(20)]
    policies = [RandomOrder(seed=3), RandomOrder(seed=3)]
    first, second = [[order(policy, Prefill(waiting)) for _ in range(2)] for policy in policies]
    assert first == second
    assert first[0] != first[1]
    assert sorted(first[0]) == list(range(20))


def router(policy, count=3):
    ids = [f"i{n}" for n in range(count)]
    return RoleRouter(ids, policy)


def test_round_robin_takes_turns():
    role = router(RoundRobin())
    assert [role.pick(Spans.of(i, 10), 0) for i in range(4)] == ["i0", "i1", "i2", "i0"]


@pytest.mark.parametrize("policy", [RandomChoice, PowerOfTwo])
def test_draws_are_reproducible_and_spread(policy):
    runs = []
    for _ in range(2):
        role = router(policy(seed=5))
        runs.append([role.pick(Spans.of(i, 10), 0) for i in range(300)])
    assert runs[0] == runs[1]
    assert all(70 <= count <= 130 for count in Counter(runs[0]).values())


def test_least_loaded_follows_what_comes_back():
    role = router(LeastLoaded(), count=2)
    assert [role.pick(Spans.of(i, 10), 0) for i in range(3)] == ["i0", "i1", "i0"]
    role.release("i0", 10)
    role.release("i0", 10)
    assert role.pick(Spans.of(9, 10), 0) == "i0"


def test_power_of_two_prefers_fewer_tokens():
    role = router(PowerOfTwo(), count=2)
    role.pick(Spans.of(1, 1000), 0)
    busy = next(load.instance_id for load in role.instances if load.num_tokens)
    assert all(role.pick(Spans.of(i, 1), 0) != busy for i in range(2, 20))


def test_cache_aware_returns_to_where_a_prefix_went():
    role = router(CacheAware(), count=3)
    prefixes = [(n, 0, 640) for n in range(3)]
    first = [role.pick(Spans([prefix, (100 + n, 0, 64)]), 0) for n, prefix in enumerate(prefixes)]
    assert sorted(first) == ["i0", "i1", "i2"]
    again = [role.pick(Spans([prefix, (200 + n, 0, 64)]), 0) for n, prefix in enumerate(prefixes)]
    assert again == first
    assert role.pick(Spans([prefixes[0], (300, 0, 6400)]), 0) in {"i0", "i1", "i2"}  # 9 % matched: by load


def test_cache_aware_gives_way_to_balance():
    policy = CacheAware(balance_abs_threshold=3, balance_rel_threshold=1.5)
    role = router(policy, count=2)
    prompts = [Spans([(7, 0, 640), (100 + n, 0, 64)]) for n in range(6)]
    assert [role.pick(prompt, 0) for prompt in prompts[:5]] == ["i1", "i1", "i1", "i1", "i0"]


def test_unknown_prefixes_go_to_any_of_the_idlest():
    """Eight requests at once on eight instances: one each, in whatever order. One after another: anywhere."""
    at_once = router(CacheAware(), count=8)
    assert sorted(at_once.pick(Spans.of(i, 1000), 0) for i in range(8)) == [f"i{i}" for i in range(8)]
    counts: Counter[str] = Counter()
    for seed in range(50):
        alone = router(CacheAware(seed=seed), count=8)
        for i in range(12):
            counts[instance_id := alone.pick(Spans.of(i, 1000), 0)] += 1
            alone.release(instance_id, 1000)
    assert len(counts) == 8
    assert all(45 <= count <= 105 for count in counts.values())  # 75 each, in the mean


def test_an_unbalanced_load_is_spread_over_the_idlest():
    r = router(CacheAware(balance_abs_threshold=3), count=4)
    busy = {r.pick(Spans.of(1, 1000), 0) for _ in range(4)}
    assert len(busy) == 1
    assert {r.pick(Spans.of(1, 1000), 0) for _ in range(3)} == {"i0", "i1", "i2", "i3"} - busy


def test_the_gateway_of_0_3_2_has_no_affinity_for_prefill_and_decode():
    """Equal prompts go anywhere while the load is in balance, and to the first of the idlest otherwise."""
    policy = CacheAware(gateway="0.3.2", balance_abs_threshold=8)
    pair = RoleRouter([f"i{i}" for i in range(4)], policy, role="decode")
    counts = Counter(picked_and_released(pair, n) for n in range(400))
    assert all(70 <= counts[f"i{i}"] <= 130 for i in range(4))
    for instance_id in ("i0", "i1"):
        pair.load_of(instance_id).add(20, 0)
    assert {picked_and_released(pair, n) for n in range(10)} == {"i2"}


def test_the_gateway_of_0_3_2_keeps_prefixes_of_aggregated_instances():
    role = router(CacheAware(gateway="0.3.2"), count=3)
    first = [role.pick(Spans([(n, 0, 640), (100 + n, 0, 64)]), 0) for n in range(3)]
    assert first == ["i0", "i1", "i2"]
    assert [role.pick(Spans([(n, 0, 640), (200 + n, 0, 64)]), 0) for n in (2, 1, 0)] == ["i2", "i1", "i0"]


def picked_and_released(role: RoleRouter, n: int) -> str:
    prompt = Spans([(7, 0, 640), (100 + n, 0, 64)])
    instance_id = role.pick(prompt, 0)
    role.release(instance_id, len(prompt))
    return instance_id


@dataclass
class Elsewhere:
    def pick(self, prompt, view):
        return "nowhere"


def test_an_unknown_instance_is_refused():
    with pytest.raises(PolicyError, match="'nowhere'; there are i0, i1, i2"):
        router(Elsewhere()).pick(Spans.of(1, 1), 0)


def test_the_router_forgets_what_is_done():
    r = Router(prefill=RoleRouter(["p0", "p1"], LeastLoaded()), decode=RoleRouter(["d0", "d1"], LeastLoaded()))
    for i in range(3):
        r.on_message(Arrival(i, Spans.of(i, 10), 5), 0)
    r.on_message(PrefillDone(0), 1)
    r.on_message(Finished(0), 2)
    r.on_message(PrefillDone(1), 3)
    r.on_message(Failed(2, "too long"), 4)
    totals = [
        (sum(one.num_requests for one in role.loads), sum(one.num_tokens for one in role.loads))
        for role in r.roles.values()
    ]
    assert totals == [(0, 0), (1, 10)]
