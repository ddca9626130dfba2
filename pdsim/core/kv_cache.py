"""The KV memory of one instance: a page pool, and a prefix cache over it unless that is switched off.

A request holds a `Lease` from the moment it is admitted until it goes:
  [0, num_shared_pages)             the prefix cache owns these pages, locked for the request
  [num_shared_pages, num_pages)     the request owns these
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdsim.core.page_pool import PagePool
from pdsim.core.pages import PageRuns, append_pages, count_pages, cut_pages, deal_pages
from pdsim.core.radix_cache import Node, RadixCache
from pdsim.policy.views import TokenSequence


@dataclass(slots=True)
class Lease:
    """What one request holds: its page table, and its lock in the prefix cache."""

    node: Node | None = None
    table: list[range] = field(default_factory=list)
    num_pages: int = 0
    num_shared_pages: int = 0


class KvCache:
    """What can happen to a lease: open, grow, checkpoint, and close or drop."""

    def __init__(self, pool: PagePool, page_size: int, prefix_cache: RadixCache | None) -> None:
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache

    @property
    def num_available_pages(self) -> int:
        if self.prefix_cache is None:
            return self.pool.num_free
        return self.pool.num_free + self.prefix_cache.num_evictable_pages

    def levels(self) -> tuple[int, int, int]:
        """Pages in use, evictable and free: together all."""
        free, available = self.pool.num_free, self.num_available_pages
        return self.pool.num_pages - available, available - free, free

    def num_cached_tokens(self, sequence: TokenSequence) -> int:
        return 0 if self.prefix_cache is None else self.prefix_cache.peek(sequence)

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """A lease on the longest cached prefix of at most max_tokens, locked."""
        if self.prefix_cache is None:
            return Lease()
        match = self.prefix_cache.match(sequence, max_tokens)
        self.prefix_cache.lock(match.node)
        num_pages = match.num_tokens // self.page_size
        return Lease(match.node, match.pages, num_pages, num_pages)

    def grow(self, lease: Lease, num_pages: int) -> None:
        """Lengthen the page table. The caller has seen num_available_pages."""
        append_pages(lease.table, self.allocate(num_pages))
        lease.num_pages += num_pages

    def grow_all(self, leases: Sequence[Lease], num_pages: int) -> None:
        """Lengthen several page tables in turn, a page each time, until num_pages are handed out."""
        if len(leases) == 1:
            return self.grow(leases[0], num_pages)
        runs = self.allocate(num_pages)
        for lease, hand in zip(leases, deal_pages(runs, len(leases)), strict=True):
            append_pages(lease.table, hand)
            lease.num_pages += count_pages(hand)

    def allocate(self, num_pages: int) -> PageRuns:
        """Free pages first, then evicted ones, leaf by leaf: a + b pages are the same as a and then b."""
        runs: PageRuns = ()
        while num_pages > (free := self.pool.num_free):
            runs += self.pool.allocate(free)
            num_pages -= free
            if self.prefix_cache is None or not self.prefix_cache.evict(1):
                raise RuntimeError(f"{num_pages} more pages asked for than are free or evictable")
        return runs + self.pool.allocate(num_pages)

    def checkpoint(self, lease: Lease, sequence: TokenSequence, num_tokens: int) -> None:
        """Share the whole pages of the first num_tokens, whose KV is complete; keep them locked."""
        if self.prefix_cache is None:
            return
        node = self._share(lease, sequence, num_tokens)
        self.prefix_cache.lock(node, below=lease.node)
        lease.node = node

    def close(self, lease: Lease, sequence: TokenSequence, num_tokens: int) -> None:
        """Share the whole pages of the first num_tokens and give up the lease."""
        if self.prefix_cache is not None:
            self._share(lease, sequence, num_tokens)
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """Give up the lease; what the request owns is freed."""
        if lease.num_pages > lease.num_shared_pages:
            self.pool.free(cut_pages(lease.table, lease.num_shared_pages))
        if self.prefix_cache is not None:
            assert lease.node is not None
            self.prefix_cache.unlock(lease.node)
        lease.node, lease.table, lease.num_pages, lease.num_shared_pages = None, [], 0, 0

    def _share(self, lease: Lease, sequence: TokenSequence, num_tokens: int) -> Node:
        """Hand the whole pages to the prefix cache; what it holds already is freed and replaced in the table."""
        assert self.prefix_cache is not None
        assert lease.node is not None
        shared, whole = lease.num_shared_pages, num_tokens // self.page_size
        if whole <= shared:
            return lease.node
        mine = cut_pages(lease.table, shared, whole)
        found = self.prefix_cache.insert(sequence, whole * self.page_size, mine, lease.node)
        num_duplicates = found.num_tokens // self.page_size - shared
        if num_duplicates:
            self.pool.free(cut_pages(mine, 0, num_duplicates))
            behind = cut_pages(lease.table, shared + num_duplicates)
            lease.table = [*cut_pages(lease.table, 0, shared), *found.pages, *behind]
        lease.num_shared_pages = whole
        return found.node
