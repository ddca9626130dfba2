"""A prefix cache with states as a state machine, beside a naive twin that keeps cached prefixes in lists."""

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdsim.core.decode.admission_queue import AdmissionQueue
from pdsim.core.engine_rules import SGLANG_0_5_23
from pdsim.core.invariants import check_cache
from pdsim.core.memory.hybrid_cache import HybridKvCache, StateLimits
from pdsim.core.memory.kv_cache import Lease
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import NewRequest
from pdsim.core.sequence import Spans, TokenIds
from pdsim.policy.pages import FreePages, LeastRecentlyUsed
from pdsim.scenario.yaml_file import ConfigError
from tests.support import examples, request, run, small, small_aggregated
from tests.twins.hybrid_cache import NaiveHybridCache, Prefix

NUM_PAGES, INTERVAL = 60, 8
branching = st.builds(lambda same, other: [0] * same + [1] * other, st.integers(1, 12), st.integers(0, 12))
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20) | branching


class Holder:
    """A request with its lease. The twin says where its next chunk begins, and from which prefix it continues."""

    def __init__(self, lease: Lease, ids: Prefix, held: Prefix, branch: int) -> None:
        self.lease, self.ids, self.held, self.branch, self.start = lease, ids, held, branch, len(held)


class Cache(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 2, 4]),
        num_slots=st.integers(0, 8),
        own_slots=st.integers(1, 3),
        has_buffer=st.booleans(),
        computes_prompts=st.booleans(),
    )
    def start(self, page, num_slots, own_slots, has_buffer, computes_prompts) -> None:
        self.page = page = page if has_buffer else 1
        self.own_slots, self.has_buffer, self.computes_prompts = own_slots, has_buffer, computes_prompts
        pool = PagePool(NUM_PAGES)
        limits = StateLimits(
            num_slots=num_slots,
            slots_per_request=own_slots,
            chunk_tokens=4,
            interval_tokens=INTERVAL,
            has_buffer=has_buffer,
            computes_prompts=computes_prompts,
        )
        self.cache = HybridKvCache(pool, page, RadixCache(pool, page, LeastRecentlyUsed()), limits)
        self.twin = NaiveHybridCache(page, num_slots)
        self.holders: list[Holder] = []

    @rule(ids=tokens, more=st.integers(0, 24))
    def admit(self, ids, more) -> None:
        ids = tuple(ids)
        state, paged = self.twin.match(ids[:more])
        self.twin.held.append(state)
        self.twin.take_slots(self.own_slots)
        lease = self.cache.open(TokenIds(ids), more)
        assert lease.num_shared * self.page == len(state)
        branch = len(paged) - len(paged) % 4
        self.holders.append(Holder(lease, ids, state, branch))
        if -(-len(ids) // self.page) - lease.num_shared > self.cache.num_available_pages:
            self.cache.drop(lease)
            self.end(self.holders[-1])
        else:
            self.grow(self.holders[-1])

    def grow(self, holder: Holder) -> None:
        num_pages = -(-len(holder.ids) // self.page) - len(holder.lease.table)
        self.twin.evict_pages(num_pages - self.cache.pool.num_free)
        self.cache.grow(holder.lease, num_pages)

    def end(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.twin.held.remove(holder.held)
        self.twin.num_free += self.own_slots

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), share=st.floats(0, 1) | st.just(1.0))
    def compute(self, data, share) -> None:
        """A chunk of the request's tokens is computed."""
        holder = data.draw(st.sampled_from(self.holders))
        start, stop = holder.start, holder.start + int(share * (len(holder.ids) - holder.start))
        last = stop - (stop - start) % 4
        if start < holder.branch <= last and not (holder.branch - start) % 4:
            last = holder.branch
        if not self.has_buffer:
            last = stop
        elif not self.computes_prompts or last == start:
            last = 0
        holder.start = stop
        if last:
            self.twin.take_slots(1)
            prefix = self.twin.whole(holder.ids[:last])
            if len(prefix) > len(holder.held):
                self.twin.held.remove(holder.held)
                holder.held = prefix
                self.twin.held.append(prefix)
            self.twin.num_free += not self.twin.insert(holder.held)
        self.cache.checkpoint(holder.lease, TokenIds(holder.ids), stop)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def generate(self, data, more) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        pages = -(-len(holder.ids + tuple(more)) // self.page) - len(holder.lease.table)
        if pages <= self.cache.num_available_pages:
            holder.ids += tuple(more)
            self.grow(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), shares=st.booleans())
    def leave(self, data, shares) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        last = len(holder.ids)
        if self.has_buffer:
            last -= last % INTERVAL
            last = last if last > holder.start else 0
        if not shares:
            self.cache.drop(holder.lease)
        else:
            self.cache.close(holder.lease, TokenIds(holder.ids), len(holder.ids))
            if last:
                prefix = self.twin.whole(holder.ids[:last])
                self.twin.num_free -= self.twin.insert(max(prefix, holder.held, key=len))
        self.end(holder)

    @rule(ids=tokens)
    def look(self, ids) -> None:
        found = len(self.twin.find(tuple(ids))[0])
        assert self.cache.num_cached_tokens(TokenIds(ids)) == found
        self.twin.match(tuple(ids))
        assert self.cache.use(TokenIds(ids)) == found

    @invariant()
    def it_keeps_the_states_and_prefixes_of_its_twin(self) -> None:
        kept = [node.sequence.ids()[: node.stop] for node in self.cache.states.kept]
        assert [tuple(ids) for ids in kept] == self.twin.states
        assert self.cache.states.num_free == self.twin.num_free
        check_cache(self.cache, [holder.lease for holder in self.holders])

    @invariant()
    def its_nodes_are_those_of_its_twin(self) -> None:
        nodes, rest = {}, [self.cache.prefix_cache.root]
        for node in rest:
            rest += node.children.values()
            if node.parent is not None:
                nodes[tuple(node.sequence.ids()[: node.stop])] = node.last_access
        assert nodes == self.twin.last_use

    def teardown(self) -> None:
        for holder in [*getattr(self, "holders", [])]:
            self.cache.drop(holder.lease)
            self.end(holder)
        if hasattr(self, "cache"):
            assert self.cache.states.num_free + len(self.cache.states.kept) == self.cache.states.num_slots
            self.cache.flush()
            assert self.cache.states.num_free == self.cache.states.num_slots
            assert self.cache.pool.num_free == NUM_PAGES


TestCache = Cache.TestCase
TestCache.settings = examples(100, stateful_step_count=40)


def test_the_second_prompt_leaves_a_state_where_prompts_part_and_the_third_continues_there():
    pool = PagePool(NUM_PAGES)
    limits = StateLimits(num_slots=6, slots_per_request=1, chunk_tokens=4, interval_tokens=8)
    cache = HybridKvCache(pool, 1, RadixCache(pool, 1, LeastRecentlyUsed()), limits)
    num_cached, kept = [], []
    for prompt in ([0] * 13, [0] * 6 + [1] * 10, [0] * 5 + [2] * 10):
        sequence = TokenIds(tuple(prompt))
        lease = cache.open(sequence, len(prompt) - 1)
        num_cached.append(lease.num_shared)
        cache.grow(lease, len(prompt) - lease.num_shared)
        cache.checkpoint(lease, sequence, len(prompt))
        kept.append([node.stop for node in cache.states.kept])
        cache.close(lease, sequence, len(prompt))
    assert num_cached == [0, 0, 4]
    assert kept == [[12], [12, 4], [12, 4, 12]]


def test_decode_admits_a_prompt_when_slots_for_its_states_are_free():
    """Of 3 slots, one has a state that request 1 continues from, and requests 1 and 2 have one each."""
    pool, view = PagePool(NUM_PAGES), SimpleNamespace(num_active=0, num_available_pages=NUM_PAGES)
    limits = StateLimits(num_slots=3, slots_per_request=1, chunk_tokens=4, interval_tokens=8, has_buffer=False)
    cache = HybridKvCache(pool, 1, RadixCache(pool, 1, LeastRecentlyUsed()), limits)
    queue = AdmissionQueue("decode-0", cache, FreePages(), SGLANG_0_5_23, grants_computed_only=False)
    first = cache.open(TokenIds((0,) * 6), 6)
    cache.grow(first, 6)
    cache.close(first, TokenIds((0,) * 6), 6)
    for i, ids in enumerate([(0,) * 8, (1,) * 8, (2,) * 8], start=1):
        queue.on_new_request(NewRequest(i, 0, TokenIds(ids), 4, "prefill-0", "decode-0"))
    admitted = [queue.admit_next(view, 9) for _ in range(3)]
    assert [one and one.request_id for one in admitted] == [1, 2, None]
    assert queue.blocked_by == "slots"
    assert [lease.num_shared for lease in (admitted[0].lease, admitted[1].lease)] == [6, 0]
    cache.drop(admitted[0].lease)
    assert queue.admit_next(view, 9).request_id == 3


@pytest.mark.parametrize(("model", "branch"), [("qwen3.5-35b-a3b", 320), ("nemotron-3-nano", 256)])
def test_a_hybrid_server_finds_prompts_of_a_group_from_the_third_on(model, branch):
    """Prompts part at token 350: the second leaves a state at the last multiple of the model's chunk before."""
    specs = [request(i, Spans([(7, 0, 350), (100 + i, 0, 90)]), output=4, arrival_ns=i * 10**10) for i in range(4)]
    changes = {"model": model, "aggregated__chunked_prefill_tokens": 1024}
    result = run(small_aggregated(*specs, **changes))
    assert [found.num_prefill_cached_tokens for found in result.records.requests] == [0, 0, branch, branch]


@pytest.mark.parametrize(("interval", "found"), [(None, 512), (192, 576), (128, 512)])
def test_decode_finds_a_conversation_up_to_the_last_tracked_output_token(interval, found):
    """Outputs begin at token 300 and end behind 639: the last common multiple of the interval and 64 has a state."""
    turns = [Spans([(7, 0, 300)]), Spans([(7, 0, 300), (8, 0, 340), (9, 0, 10)])]
    first = request(0, turns[0], 340)._replace(output=Spans([(8, 0, 340)]))
    scenario = small(
        first,
        request(1, turns[1], 4, arrival_ns=10**11),
        model="qwen3.5-35b-a3b",
        decode__radix_cache=True,
        decode__retraction_backup=True,
        decode__mamba_track_interval=interval,
    )
    assert [one.num_decode_cached_tokens for one in run(scenario).records.requests] == [0, found]


@pytest.mark.parametrize(
    ("model", "interval", "wrong"),
    [
        ("qwen3-8b", 256, "qwen3-8b has no layers of linear attention"),
        ("qwen3.5-35b-a3b", 66, "multiple of the page, 4 tokens"),
        ("nemotron-3-nano", 64, "at least the model's chunk, 128 tokens"),
    ],
)
def test_intervals_that_sglang_refuses(model, interval, wrong):
    scenario = small_aggregated(request(0, 10, 2), model=model, aggregated__mamba_track_interval=interval)
    with pytest.raises(ConfigError, match=f"aggregated.mamba_track_interval: {interval}, but .*{wrong}"):
        run(scenario)
