"""Prefix cache and leases as a state machine, against a model that knows every page's tokens.

Each page the pool hands out is written by its holder; the model remembers what. Then a cached prefix is right if every
page of it holds the tokens that it should, whatever was split, shared, replaced or evicted on the way.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdsim.core.invariants import check_cache
from pdsim.core.kv_cache import KvCache, Lease
from pdsim.core.page_pool import PagePool
from pdsim.core.radix_cache import RadixCache
from pdsim.core.sequence import TokenIds
from pdsim.policy.eviction import FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Holder:
    def __init__(self, lease: Lease, ids: list[int]) -> None:
        self.lease, self.ids, self.num_written, self.reads = lease, ids, 0, False

    @property
    def sequence(self) -> TokenIds:
        return TokenIds(self.ids)


class Cache(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 2, 3]),
        policy=st.sampled_from([LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()]),
        cached=st.booleans(),
    )
    def start(self, page, policy, cached) -> None:
        self.page = page
        pool = PagePool(24)
        self.cache = KvCache(pool, page, RadixCache(pool, page, policy) if cached else None)
        self.holders: list[Holder] = []
        self.content: dict[int, list[int]] = {}

    def write(self, holder: Holder) -> None:
        """Fill the holder's own pages with its tokens."""
        for i in range(holder.lease.num_shared, len(holder.lease.table)):
            self.content[holder.lease.table[i]] = holder.ids[i * self.page : (i + 1) * self.page]
        holder.num_written = len(holder.ids)

    @rule(ids=tokens, cap=st.integers(0, 14))
    def admit(self, ids, cap) -> None:
        lease = self.cache.open(TokenIds(ids), min(cap, len(ids)))
        for i, page in enumerate(lease.table):
            assert self.content[page] == ids[i * self.page : (i + 1) * self.page]
        need = -(-len(ids) // self.page) - len(lease.table)
        if need > self.cache.num_available_pages:
            with pytest.raises(RuntimeError, match="asked for"):
                self.cache.allocate(need + self.cache.pool.num_pages)
            self.cache.drop(lease)
            return
        self.cache.grow(lease, need)
        self.holders.append(Holder(lease, ids))
        self.write(self.holders[-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def checkpoint(self, data) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.lease and self.cache.checkpoint(holder.lease, holder.sequence, len(holder.ids))
        for i in range(holder.lease.num_shared):
            assert self.content[holder.lease.table[i]] == holder.ids[i * self.page : (i + 1) * self.page]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def generate(self, data, more) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        need = -(-(len(holder.ids) + len(more)) // self.page) - len(holder.lease.table)
        if need <= self.cache.num_available_pages:
            self.cache.grow(holder.lease, need)
            holder.ids = holder.ids + more
            self.write(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def read(self, data) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if not holder.reads:
            self.cache.checkpoint(holder.lease, holder.sequence, len(holder.ids))
            self.cache.add_reader(holder.lease)
            holder.reads = True

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), share=st.booleans())
    def leave(self, data, share) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if holder.reads:
            self.cache.remove_reader(holder.lease)
        if share:
            self.cache.close(holder.lease, holder.sequence, len(holder.ids))
        else:
            self.cache.drop(holder.lease)

    @rule(n=st.integers(1, 6))
    def press(self, n) -> None:
        """Others need pages: take and return them, which evicts."""
        if n <= self.cache.num_available_pages:
            self.cache.pool.free(self.cache.allocate(n))

    @invariant()
    def laws(self) -> None:
        check_cache(self.cache, [holder.lease for holder in self.holders])

    @invariant()
    def a_peek_finds_what_a_match_finds(self) -> None:
        for holder in self.holders[:2]:
            num_cached = self.cache.num_cached_tokens(holder.sequence)
            lease = self.cache.open(holder.sequence, len(holder.ids))
            assert lease.num_shared * self.page == num_cached
            self.cache.drop(lease)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=30)


def cache_of(num_pages: int, policy: object, page: int = 1) -> KvCache:
    pool = PagePool(num_pages)
    return KvCache(pool, page, RadixCache(pool, page, policy))


def keep(cache: KvCache, ids: list[int]) -> None:
    sequence = TokenIds(ids)
    lease = cache.open(sequence, len(ids))
    cache.grow(lease, -(-len(ids) // cache.page_size) - len(lease.table))
    cache.close(lease, sequence, len(ids))


def cached(cache: KvCache, ids: list[int]) -> int:
    return cache.num_cached_tokens(TokenIds(ids))


def look(cache: KvCache, ids: list[int]) -> None:
    cache.drop(cache.open(TokenIds(ids), len(ids)))


@pytest.mark.parametrize(
    ("policy", "gone"), [(LeastRecentlyUsed(), 2), (LeastFrequentlyUsed(), 3), (FirstInFirstOut(), 1)]
)
def test_who_is_evicted_first(policy, gone):
    cache = cache_of(3, policy)
    for ids in ([1], [2], [3], [2], [1]):  # 1 is oldest, 2 least recently used after the look at 3, 3 least often
        keep(cache, ids)
    look(cache, [3])
    cache.pool.free(cache.allocate(1))
    assert [i for i in (1, 2, 3) if not cached(cache, [i])] == [gone]


def test_leaves_go_before_their_parents_and_locked_paths_stay():
    cache = cache_of(6, LeastRecentlyUsed())
    keep(cache, [1, 2, 3])
    keep(cache, [1, 2, 4])
    lease = cache.open(TokenIds([1, 2, 4]), 3)
    assert cache.num_available_pages == 3
    pages = cache.allocate(3)
    assert (cached(cache, [1, 2, 3]), cached(cache, [1, 2, 4])) == (2, 3)
    with pytest.raises(RuntimeError, match="asked for"):
        cache.allocate(1)
    cache.drop(lease)
    cache.pool.free(pages)


def test_concurrent_copies_of_a_prefix_are_freed_when_the_second_is_shared():
    cache = cache_of(8, LeastRecentlyUsed())
    leases = [cache.open(TokenIds([1, 2, 3]), 3) for _ in range(2)]
    for lease in leases:
        cache.grow(lease, 3)
    assert cache.pool.num_free == 2
    for lease in leases:
        cache.checkpoint(lease, TokenIds([1, 2, 3]), 3)
    assert cache.pool.num_free == 5
    assert leases[0].table == leases[1].table


def test_eviction_looks_at_leaves_only():
    """Not at the tree: the work of one eviction does not grow with what is cached."""
    calls = 0

    class Counting(LeastRecentlyUsed):
        def key(self, leaf):
            nonlocal calls
            calls += 1
            return super().key(leaf)

    cache = cache_of(2000, Counting())
    for i in range(1000):
        keep(cache, [i, 5000 + i])
    before = calls
    cache.pool.free(cache.allocate(2))
    assert calls - before <= 2
