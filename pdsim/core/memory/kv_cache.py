"""The KV memory of one instance: a page pool, and a prefix cache over it unless that is switched off.

A request holds a `Lease` from its admission to its end. Owners of the pages in its page table:
  [0, num_shared)      the prefix cache, which locks them for the request
  [num_shared, end)    the request
The last num_loaded of the shared pages were loaded from host memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.host_cache import HostCache, Prefetcher
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.page_pool import PagePool
from pdsim.core.memory.radix_cache import Node, RadixCache
from pdsim.core.messages import HostCopy, LoadBack
from pdsim.policy.views import TokenSequence


@dataclass(slots=True, eq=False)
class Lease:
    """A request's page table, and the lock on its prefix in the cache."""

    node: Node | None = None
    table: list[int] = field(default_factory=list)
    num_shared: int = 0
    replaced: list[int] = field(default_factory=list)
    """Pages of the request whose KV the prefix cache has in other pages. Other requests may still read them."""
    has_twins: bool = False
    """True: the request holds its own copies of some pages that the prefix cache also has."""
    read_node: Node | None = None
    """Last node of the cached path that decode steps read for this request."""
    num_loaded: int = 0
    """Number of pages that were loaded from host memory for this request when it was admitted."""
    num_counted_tokens: int = 0
    """Number of leading tokens whose nodes have already counted a hit of this request."""


NO_LEASE = Lease()
"""The lease of a request that has not been admitted. This object never changes."""


class KvCache:
    """Leases of one instance: open, grow, checkpoint, and close or drop."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: RadixCache | None,
        *,
        host: HostCache | None = None,
        prefetcher: Prefetcher | None = None,
        offload: OffloadCache | None = None,
        chunks: ChunkCache | None = None,
        keeps_replaced: bool = False,
        counts_every_insert: bool = False,
        splits_at_prompt: bool = False,
    ) -> None:
        """host: memory behind the prefix cache; prefetcher: reads into it from storage. offload, chunks: host
        memory of vLLM's OffloadingConnector or LMCacheConnectorV1.

        keeps_replaced: a page whose tokens the prefix cache holds already is freed when its lease ends, not at once.
        counts_every_insert, splits_at_prompt: as in EngineRules.
        """
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.host = host
        self.prefetcher = prefetcher
        self.offload = offload
        self.chunks = chunks
        self._keeps_replaced = keeps_replaced
        self._keeps_twins = False
        """True: a request that recomputes a cached page uses its own copy."""
        self._counts_every_insert = counts_every_insert
        self._splits_at_prompt = splits_at_prompt
        self.num_left_pages = 0
        """Number of pages of states that running requests read in the step under way, and then no more."""
        self.pages_per_growth = 1
        """Number of pages that the next page of a running request needs at once."""
        self.evicts_early = prefix_cache is not None
        """True: eviction frees more pages than are lacking, as in SGLang."""
        self.frees_ahead = self.evicts_early and page_size > 1
        """True: before pages are allocated, one further page per request must be free (alloc_paged_token_slots_extend,
        _decode)."""

    def evict_as_vllm(self) -> None:
        """Switches to vLLM's eviction: only lacking pages, page by page, in the order in which they became unused."""
        self.evicts_early = self.frees_ahead = False
        self._keeps_twins = True
        if self.prefix_cache is not None:
            self.prefix_cache.uses_whole_nodes = False
            self.prefix_cache.evicts_pages = True
        if self.host is not None:
            self.host.tree.uses_whole_nodes = False

    @property
    def capacity_tokens(self) -> int:
        return self.pool.num_pages * self.page_size

    @property
    def num_available_pages(self) -> int:
        if self.prefix_cache is None:
            return self.pool.num_free
        return self.pool.num_free + self.prefix_cache.num_evictable_pages

    @property
    def num_unblocked_pages(self) -> int:
        """Number of available pages that the loop can get without waiting for a copy to host memory."""
        assert self.host is not None
        return self.pool.num_free if self.host.writes_back else self.num_available_pages

    def levels(self) -> tuple[int, int, int]:
        """Pages in use, evictable and free. Their sum is all pages."""
        free, available = self.pool.num_free, self.num_available_pages
        return self.pool.num_pages - available, available - free, free

    def num_cached_tokens(self, sequence: TokenSequence) -> int:
        return 0 if self.prefix_cache is None else self.prefix_cache.peek(sequence)

    def use(self, sequence: TokenSequence) -> int:
        """Number of tokens of the longest cached prefix. The call counts as a use of the prefix."""
        if self.prefix_cache is None:
            return 0
        node, _ = self.prefix_cache.match(sequence, len(sequence))
        self.prefix_cache.unlock(node)
        return node.stop

    def makes_room_for_states(self) -> bool:
        """Evicts states of linear-attention layers until a request's slots are free. False: they are not."""
        return True

    def begin_step(self) -> None:
        """Begins the choice of a step."""

    def waits(self, lease: Lease) -> bool:
        """True if a lease that was just opened continues from what the step that is being chosen will compute."""
        return False

    def chunk_tokens(self, lease: Lease, start: int, num_tokens: int, prefill_end: int, limit: int) -> int:
        """Number of tokens of a chunk that may have num_tokens."""
        return num_tokens

    def num_state_pages(self, start: int, end: int, prefill_end: int) -> int:
        """Number of pages that a chunk of the tokens from start to end needs beside its KV."""
        return 0

    def begin_chunk(self, lease: Lease, prompt: TokenSequence, start: int, end: int, prefill_end: int) -> None:
        """Takes what a chunk needs beside its KV, which is cached."""

    def end_chunk(self, lease: Lease) -> None:
        """Gives back what only a chunk that is now computed needed."""

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix of at most max_tokens, and locks the prefix."""
        if self.prefix_cache is None:
            return Lease()
        node, pages = self.prefix_cache.match(sequence, max_tokens)
        return Lease(node, pages, len(pages))

    def open_for_load(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest prefix of at most max_tokens whose KV is cached, for a load that continues
        it.
        """
        return self.open(sequence, max_tokens)

    def take_state(self, lease: Lease) -> list[int]:
        """Takes pages for the state that a load brings, if the model has states. Returns them."""
        return []

    def kept_states(self, lease: Lease) -> list[tuple[int, list[int]]]:
        """States that a computed chunk has kept: number of tokens and pages of each."""
        return []

    def num_loadable_pages(self, lease: Lease, sequence: TokenSequence, max_tokens: int) -> int:
        """Number of host-memory pages that continue the cached prefix of a lease that was just opened."""
        if self.chunks is not None:  # a whole prompt too: its last token is computed again
            return self.chunks.num_loadable_pages(sequence, lease.num_shared, max_tokens + 1)
        return 0 if self.host is None else self.host.num_loadable_pages(sequence, lease.num_shared, max_tokens)

    def load(self, lease: Lease, sequence: TokenSequence, num_pages: int, request_id: int) -> None:
        """Loads pages from host memory into a lease that was just opened, and caches them; chunks are cached with the
        prompt's first forward. The caller has checked that the pages fit.
        """
        if self.chunks is not None:
            self.grow(lease, num_pages)
            self.chunks.load(request_id, sequence, lease.num_shared, lease.table[lease.num_shared :])
            return
        host, tree = self.host, self.prefix_cache
        assert host is not None
        assert tree is not None
        assert lease.node is not None
        end, host_pages = host.tree.lock_path(sequence, (lease.num_shared + num_pages) * self.page_size)
        if num_pages > self.pool.num_free:  # SGLang evicts as many as it loads
            self._evict(tree, num_pages)
        pages = self.pool.allocate(num_pages)
        node, start = lease.node, lease.num_shared
        for part in host.path_behind(end, start * self.page_size):
            span = slice(node.stop // self.page_size - start, part.stop // self.page_size - start)
            node, _ = tree.insert(sequence, part.stop, pages[span], node)
            host.keep(node, part)
        host.tree.unlock(end)
        host.copies.append(LoadBack(request_id, tuple(host_pages[len(host_pages) - num_pages :]), tuple(pages)))
        tree.lock(node, below=lease.node)
        tree.touch(node)
        lease.node, lease.num_loaded = node, num_pages
        lease.table += pages
        lease.num_shared += num_pages

    def prefetch(self, request_id: int, prompt: TokenSequence, now_ns: int) -> None:
        """Begins to read a new prompt's KV from storage, if there is storage."""
        if self.prefetcher is not None:
            lease = self.open(prompt, len(prompt))
            num_tokens = lease.num_shared * self.page_size
            self.drop(lease)
            self.prefetcher.begin(request_id, prompt, num_tokens, now_ns)

    def stop_prefetch(self, request_id: int) -> None:
        """Stops the prefetch of a prompt that was given up."""
        if self.prefetcher is not None:
            self.prefetcher.stop(request_id)

    def grow(self, lease: Lease, num_pages: int) -> None:
        """Lengthens the page table of a lease. The caller has checked num_available_pages."""
        if num_pages:
            lease.table += self.allocate(num_pages)

    def grow_all(self, leases: Sequence[Lease], num_pages: int) -> None:
        """Gives num_pages to the leases in turn, one page at a time."""
        pages = self.allocate(num_pages)
        if num_pages == len(leases):
            for lease, page in zip(leases, pages, strict=True):
                lease.table.append(page)
        else:
            for i, lease in enumerate(leases):
                lease.table += pages[i :: len(leases)]

    def make_free(self, num_pages: int) -> None:
        """Evicts cached pages until num_pages are free, or no page is evictable."""
        if num_pages > self.pool.num_free and self.prefix_cache is not None:
            self._evict(self.prefix_cache, num_pages - self.pool.num_free)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocates pages, and evicts leaves of the prefix cache as needed."""
        pool = self.pool
        if num_pages > pool.num_free:
            if self.prefix_cache is None or num_pages > self.num_available_pages:
                raise RuntimeError(f"asked for {num_pages} pages, {self.num_available_pages} are free or evictable")
            self._evict(self.prefix_cache, num_pages - pool.num_free)
        return pool.allocate(num_pages)

    def _evict(self, prefix_cache: RadixCache, num_pages: int) -> None:
        host = self.host
        if host is None:
            prefix_cache.evict(num_pages)
        else:
            prefix_cache.evict(num_pages, host.on_evict)
            host.settle()

    def checkpoint(
        self,
        lease: Lease,
        sequence: TokenSequence,
        num_tokens: int,
        num_prompt_tokens: int = 0,
        *,
        is_chunk: bool = False,
    ) -> None:
        """Puts the whole pages of the first num_tokens into the prefix cache, and keeps them locked. The KV of these
        tokens is complete. num_prompt_tokens: tokens after these are outputs. is_chunk: the prompt has further chunks.
        """
        if self.prefix_cache is not None:
            node = self._share(lease, sequence, num_tokens, self.prefix_cache)
            if node is not lease.node:
                self.prefix_cache.lock(node, below=lease.node)
                if lease.replaced and self._keeps_twins:
                    assert lease.node is not None
                    self.prefix_cache.keep_twins(node, lease.node, lease, lease.replaced)
                    lease.has_twins, lease.replaced = True, []
                lease.node = node
            self.prefix_cache.touch(node, self._hits_behind(lease, node, is_chunk=is_chunk))
            if self.host is not None:
                self.host.on_insert(node, is_whole=num_tokens == len(sequence))
            if num_prompt_tokens < num_tokens:
                self._split(node, num_prompt_tokens, self.prefix_cache)

    def close(self, lease: Lease, sequence: TokenSequence, num_tokens: int, num_prompt_tokens: int = 0) -> None:
        """Ends the lease. The whole pages of the first num_tokens (prompt and outputs) go to the prefix cache."""
        if self.prefix_cache is not None:
            assert lease.node is not None
            self.prefix_cache.see(lease.node, sequence)
            node = self._share(lease, sequence, num_tokens, self.prefix_cache)
            self.prefix_cache.touch(node, self._hits_behind(lease, node))
            if self.host is not None:
                self.host.on_insert(node)
            if num_prompt_tokens < num_tokens:
                self._split(node, num_prompt_tokens, self.prefix_cache)
        self.drop(lease)

    def _split(self, node: Node, num_prompt_tokens: int, cache: RadixCache) -> None:
        """Splits the path to a node at the end of the prompt."""
        if self._splits_at_prompt and num_prompt_tokens:
            cache.split_path(node, cache.num_cacheable(num_prompt_tokens))

    def _hits_behind(self, lease: Lease, node: Node, *, is_chunk: bool = False) -> int | None:
        """Number of tokens behind which an insert that ends in this node counts as a hit. None: nowhere."""
        if self._counts_every_insert:
            return None if is_chunk else 0
        counted, lease.num_counted_tokens = lease.num_counted_tokens, node.stop
        return counted

    def drop(self, lease: Lease) -> None:
        """Ends the lease, and frees the pages that the request owns."""
        self.pool.free(lease.table[lease.num_shared :] if lease.num_shared else lease.table)
        if lease.replaced:
            self.pool.free(lease.replaced)
            lease.replaced = []
        if self.prefix_cache is not None:
            assert lease.node is not None
            if lease.has_twins:
                self.prefix_cache.drop_twins(lease.node, lease)
                lease.has_twins = False
            self.prefix_cache.unlock(lease.node)
        lease.node, lease.table, lease.num_shared = None, [], 0

    def flush(self) -> None:
        """Drops all cached KV that no lease holds."""
        if self.prefix_cache is not None:
            leaving = None if self.host is None else self.host.release
            self.prefix_cache.evict(self.prefix_cache.num_evictable_pages, leaving)
        if self.host is not None:
            self.host.flush()
        for connected in (self.offload, self.chunks):
            if connected is not None:
                connected.flush()

    def take_connector_copies(self) -> list[HostCopy]:
        """Returns the copies that vLLM's connector decided since the last call, in order."""
        if self.chunks is not None:
            return self.chunks.take_copies()
        return [] if self.offload is None else self.offload.take_copies()

    def add_reader(self, lease: Lease) -> None:
        """Counts the request as a reader of its cached prefix in each decode step."""
        if self.prefix_cache is not None and lease.node is not None:
            lease.read_node = lease.node
            self.prefix_cache.add_reader(lease.node)

    def remove_reader(self, lease: Lease) -> None:
        if self.prefix_cache is not None and lease.read_node is not None:
            self.prefix_cache.remove_reader(lease.read_node)
            lease.read_node = None

    @property
    def num_read_tokens(self) -> int:
        """Number of distinct cached tokens that a decode step reads."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_read_pages * self.page_size

    def num_repeated_tokens(self, read_nodes: Iterable[Node | None]) -> int:
        """Number of cached tokens that decode steps read again for further requests among these readers. The first
        reading of a token does not count.
        """
        return 0 if self.prefix_cache is None else self.prefix_cache.num_repeated_tokens(read_nodes)

    def _share(self, lease: Lease, sequence: TokenSequence, num_tokens: int, cache: RadixCache) -> Node:
        """Gives whole pages to the prefix cache. Pages that the cache already has are replaced in the table."""
        assert lease.node is not None
        shared, whole = lease.num_shared, cache.num_cacheable(num_tokens) // self.page_size
        if whole <= shared:
            return lease.node
        node, found = cache.insert(sequence, whole * self.page_size, lease.table[shared:whole], lease.node)
        if found:
            replaced = slice(shared, shared + len(found))
            if self._keeps_replaced or self._keeps_twins:
                lease.replaced += lease.table[replaced]
            else:
                self.pool.free(lease.table[replaced])
            if not self._keeps_twins:
                lease.table[replaced] = found
        lease.num_shared = whole
        return node
