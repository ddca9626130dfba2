"""Prefix cache and leases as a state machine, beside a naive twin that keeps cached sequences in a list."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdsim.core.invariants import check_cache
from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache
from pdsim.core.sequence import TokenIds
from pdsim.policy.pages import FirstInFirstOut, LeastFrequentlyUsed, LeastRecentlyUsed
from tests.support import examples
from tests.twins.page_pool import NaivePagePool
from tests.twins.radix_cache import NaivePrefixCache

NUM_PAGES = 14
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Holder:
    """A request with its lease, and what the twin says of it: its page table, and how many pages are shared."""

    def __init__(self, lease: Lease, ids: list[int], table: list[int]) -> None:
        self.lease, self.ids, self.table, self.num_shared = lease, ids, table, len(table)
        self.num_prompt = len(ids)
        self.num_counted = 0
        self.replaced: list[int] = []
        self.read_pages: list[int] | None = None

    @property
    def sequence(self) -> TokenIds:
        return TokenIds(self.ids)


def below(node: Node) -> list[Node]:
    return [found for child in node.children.values() for found in (child, *below(child))]


class Cache(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 2, 3]),
        policy=st.sampled_from([LeastRecentlyUsed(), LeastFrequentlyUsed(), FirstInFirstOut()]),
        keeps=st.booleans(),
        has_drafts=st.booleans(),
        whole=st.booleans(),
        counts_every_insert=st.booleans(),
        splits=st.booleans(),
        by_page=st.booleans(),
    )
    def start(self, page, policy, keeps, has_drafts, whole, counts_every_insert, splits, by_page) -> None:
        self.by_page = by_page
        self.page, self.keeps, self.has_drafts = page, keeps, has_drafts
        self.counts_every_insert, self.splits = counts_every_insert, splits
        pool = PagePool(NUM_PAGES)
        self.tree = (BlockCache if by_page else RadixCache)(pool, page, policy, has_drafts=has_drafts)
        rules = {"counts_every_insert": counts_every_insert, "splits_at_prompt": splits}
        self.cache = KvCache(pool, page, self.tree, keeps_replaced=keeps, **rules)
        self.tree.uses_whole_nodes = whole
        self.pool = NaivePagePool(NUM_PAGES)
        self.prefixes = NaivePrefixCache(page, policy, uses_whole_nodes=whole, evicts_pages=by_page)
        self.holders: list[Holder] = []

    def keys(self, ids: list[int]) -> list[Any]:
        """What the twin caches by: tokens, or pairs of a token and the next."""
        return list(pairwise(ids)) if self.has_drafts else ids

    def allocate(self, num_pages: int) -> list[int]:
        locked = [self.keys(holder.ids)[: holder.num_shared * self.page] for holder in self.holders]
        while num_pages > len(self.pool.listed | self.pool.freed):
            self.pool.free(self.prefixes.evict(locked))
        return self.pool.allocate(num_pages)

    def grow(self, holder: Holder) -> None:
        num_pages = -(-len(holder.ids) // self.page) - len(holder.table)
        self.cache.grow(holder.lease, num_pages)
        holder.table += self.allocate(num_pages)

    def share(self, holder: Holder) -> None:
        keys = self.keys(holder.ids)
        num_pages = len(keys) // self.page
        pages = self.prefixes.insert(keys[: num_pages * self.page], holder.table[:num_pages])
        replaced = [page for page in holder.table[:num_pages] if page not in pages]
        if self.keeps:
            holder.replaced += replaced
        else:
            self.pool.free(replaced)
        holder.table[:num_pages] = pages
        holder.num_shared = num_pages

    def count_hits(self, holder: Holder, *, is_chunk: bool = False) -> None:
        num_tokens = holder.num_shared * self.page
        behind = None if self.counts_every_insert and is_chunk else 0
        if not self.counts_every_insert:
            behind, holder.num_counted = holder.num_counted, num_tokens
        self.prefixes.touch(self.keys(holder.ids)[:num_tokens], behind)

    def split(self, holder: Holder) -> None:
        if self.splits and holder.num_prompt < len(holder.ids):
            keys = self.keys(holder.ids[: holder.num_prompt])
            self.prefixes.split(keys[: len(keys) // self.page * self.page])

    def drop(self, holder: Holder) -> None:
        self.pool.free([*holder.table[holder.num_shared :], *holder.replaced])

    @rule(ids=tokens, cap=st.integers(0, 14))
    def admit(self, ids, cap) -> None:
        holder = Holder(self.cache.open(TokenIds(ids), cap), ids, self.prefixes.match(self.keys(ids[:cap])))
        if not self.by_page:
            self.prefixes.touch(self.keys(ids)[: len(holder.table) * self.page])
        self.holders.append(holder)
        if len(ids) > (len(holder.table) + self.cache.num_available_pages) * self.page:
            with pytest.raises(RuntimeError, match="asked for"):
                self.cache.grow(holder.lease, self.cache.num_available_pages + 1)
            self.cache.drop(holder.lease)
            self.drop(self.holders.pop())
        else:
            self.grow(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), is_chunk=st.booleans())
    def checkpoint(self, data, is_chunk) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.cache.checkpoint(holder.lease, holder.sequence, len(holder.ids), holder.num_prompt, is_chunk=is_chunk)
        if len(self.keys(holder.ids)) // self.page > holder.num_shared:
            self.share(holder)
        self.count_hits(holder, is_chunk=is_chunk)
        self.split(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def generate(self, data, more) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if len(holder.ids + more) <= (len(holder.table) + self.cache.num_available_pages) * self.page:
            holder.ids = holder.ids + more
            self.grow(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def read(self, data) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.read_pages is None:
            self.cache.add_reader(holder.lease)
            holder.read_pages = holder.table[: holder.num_shared]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), share=st.booleans())
    def leave(self, data, share) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.read_pages is not None:
            self.cache.remove_reader(holder.lease)
        if share:
            self.cache.close(holder.lease, holder.sequence, len(holder.ids), holder.num_prompt)
            self.share(holder)
            self.count_hits(holder)
            self.split(holder)
        else:
            self.cache.drop(holder.lease)
        self.holders.remove(holder)
        self.drop(holder)

    @rule(n=st.integers(1, NUM_PAGES))
    def press(self, n) -> None:
        """Others need pages: take and return them, which evicts."""
        if n <= self.cache.num_available_pages:
            self.cache.pool.free(self.cache.allocate(n))
            self.pool.free(self.allocate(n))

    @invariant()
    def it_does_what_its_twin_does(self) -> None:
        held = {page for holder in self.holders for page in (*holder.table, *holder.replaced)}
        read = {page for holder in self.holders for page in holder.read_pages or ()}
        assert [holder.lease.table for holder in self.holders] == [holder.table for holder in self.holders]
        assert set(self.cache.pool.free_pages()) == self.pool.listed | self.pool.freed
        assert self.cache.num_available_pages == NUM_PAGES - len(held)
        assert self.cache.num_read_tokens == len(read) * self.page
        for holder in self.holders[:2]:
            num_cached_tokens = len(self.prefixes.find(self.keys(holder.ids))) * self.page
            assert self.cache.num_cached_tokens(holder.sequence) == num_cached_tokens

    @invariant()
    def its_nodes_are_what_policies_choose_from(self) -> None:
        nodes = [
            (self.keys(n.sequence.ids())[: n.stop], n.last_access, n.num_hits, n.born) for n in below(self.tree.root)
        ]
        twins = [(p.tokens, p.last_access, p.num_hits, p.born) for p in self.prefixes.prefixes]
        assert sorted(nodes) == sorted(twins)

    @invariant()
    def laws(self) -> None:
        check_cache(self.cache, [holder.lease for holder in self.holders])


TestCache = Cache.TestCase
TestCache.settings = examples(150, stateful_step_count=40)


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


@pytest.mark.parametrize("looks", [False, True])
def test_vllm_evicts_blocks_that_became_unused_together_from_the_last_on_whoever_looks_them_up(looks):
    """A request of six blocks ended. A running request has its own copies of the first three."""
    pool = PagePool(9)
    tree = BlockCache(pool, 1, LeastRecentlyUsed())
    ids, pages, copies = TokenIds([0] * 6), pool.allocate(6), pool.allocate(3)
    middle, _ = tree.insert(ids, 3, pages[:3], tree.root)
    end, _ = tree.insert(ids, 6, pages[3:], middle)
    tree.touch(end)
    tree.lock(middle)
    tree.keep_twins(middle, tree.root, "running", copies)
    for num_left in (5, 4, 3):
        assert tree.evict(1) == 1
        if looks:
            node, found = tree.match(ids, 6)
            tree.unlock(node)
            assert found == pages[:num_left]
    assert pool.free_pages() == pages[:2:-1]
