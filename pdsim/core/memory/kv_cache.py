"""The KV memory of one instance: a page pool and, unless it is switched off, a prefix cache.

A request holds a `Lease` from its admission to its end. Owners of the pages in its page table:
  [0, num_shared)      the prefix cache, which locks them for the request
  [num_shared, end)    the request
When the lease begins, the last num_loaded of the shared pages are those that are loaded from SGLang's host memory.
"""

from collections.abc import Iterable
from dataclasses import field

from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.host_cache import HostCache, Prefetcher
from pdsim.core.memory.kvbm_cache import KvbmCache
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache
from pdsim.core.messages import HostCopy, LoadBack
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


@dataclass(slots=True, eq=False)
class Lease:
    """A request's page table, and the lock on its prefix in the cache.

    node: last node of the locked prefix; None: no prefix cache. table: page ids in the order of the request's tokens.
    num_shared: number of the table's first pages that the prefix cache owns; the request owns all other pages of the
    table.
    """

    node: Node | None = None
    table: list[int] = field(default_factory=list)
    num_shared: int = 0
    replaced: list[int] = field(default_factory=list)
    """Pages that this request computed and the cache did not take, because it has the same KV in other pages. They stay
    allocated until the lease ends, because transfers of the request's KV may still read them. With vLLM's prefix cache,
    they become twins in the cache's nodes (Node.twins)."""
    has_twins: bool = False
    """True: this request holds its own copies of pages that the prefix cache also has."""
    read_node: Node | None = None
    """Last node of the cached prefix that decode steps read for this request. None: decode steps read no cached prefix.
    """
    num_loaded: int = 0
    """Number of pages that SGLang's host memory loads when the lease begins (`KvCache.load`). 0 with vLLM."""
    num_counted_tokens: int = 0
    """Number of the request's first tokens for which the cache's nodes have counted that this request uses them."""


NO_LEASE = Lease()
"""The lease of all requests that have no pages yet. This shared object must not be changed."""


class KvCache:
    """Leases of one instance's requests. A lease is opened, grows, checkpoints computed KV, and is closed or
    dropped.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: RadixCache | None,
        *,
        host: HostCache | None = None,
        prefetcher: Prefetcher | None = None,
        offload: OffloadCache | KvbmCache | None = None,
        chunks: ChunkCache | None = None,
        keeps_replaced: bool = False,
        counts_every_insert: bool = False,
        splits_at_prompt: bool = False,
    ) -> None:
        """host: SGLang's host memory; None: no host memory. prefetcher: reads KV from storage into host memory.
        offload: host memory of vLLM's OffloadingConnector or Dynamo's KVBM. chunks: host memory of LMCacheConnectorV1.
        keeps_replaced: concerns pages that a request computed although the prefix cache has the same KV already. True,
        or with vLLM's prefix cache: these pages are freed when the request's lease ends. False: at once.
        counts_every_insert: True: each insert, except of a prompt's chunks before the last, counts a use of cached
        nodes; False: each request counts one use. splits_at_prompt: True: prompt and outputs are separate nodes of the
        prefix cache.
        """
        self.pool = pool
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.host = host
        self.prefetcher = prefetcher
        self.offload = offload
        self.chunks = chunks
        self._keeps_replaced = keeps_replaced
        self._blocks: BlockCache | None = None
        """The prefix cache if it is vLLM's: a request that has computed a page that is also cached keeps using its own
        copy. None: SGLang's prefix cache, or none."""
        self._counts_every_insert = counts_every_insert
        self._splits_at_prompt = splits_at_prompt
        self.num_left_pages = 0
        """Number of pages of linear-attention states that running requests read in the present step for the last time.
        0 in this class (see VllmHybridCache)."""
        self.pages_per_growth = 1
        """Number of pages that a running request needs when its KV needs one more page: 1, and the pages of a new
        linear-attention state if the cache is a VllmHybridCache that keeps states."""
        self.evicts_early = prefix_cache is not None
        """True: if a decode batch lacks pages, cached pages are evicted before a request is retracted, and afterwards
        until the batch can run for RETRACT_STEPS steps (running_batch.py), as in SGLang."""
        self.frees_ahead = self.evicts_early and page_size > 1
        """True: before pages are allocated, cached pages are evicted until one page per running request is free or, for
        a forward of prompts, the pages of its tokens and one more per chunk (SGLang's alloc_paged_token_slots_extend
        and _decode). Without enough evictable pages, fewer are free."""

    def evict_as_vllm(self) -> None:
        """Switches to vLLM's rules: evictions free only as many pages as are lacking, and a request keeps its own
        copies of pages that are also cached. The prefix cache, if there is one, must be a BlockCache.
        """
        self.evicts_early = self.frees_ahead = False
        assert self.prefix_cache is None or isinstance(self.prefix_cache, BlockCache)
        self._blocks = self.prefix_cache

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
        """Number of available pages that an instance can get without waiting for a copy to host memory."""
        assert self.host is not None
        return self.pool.num_free if self.host.writes_back else self.num_available_pages

    def levels(self) -> tuple[int, int, int]:
        """Returns three numbers of pages: used, evictable and free. Their sum is the size of the pool."""
        free, available = self.pool.num_free, self.num_available_pages
        return self.pool.num_pages - available, available - free, free

    def num_cached_tokens(self, sequence: TokenSequence) -> int:
        return 0 if self.prefix_cache is None else self.prefix_cache.peek(sequence)

    def tier_tokens(self, sequence: TokenSequence) -> tuple[int, int]:
        """Returns (number of the sequence's first tokens that the GPU has cached, number of further tokens behind these
        in host memory).
        """
        num_here, num_there = self.num_cached_tokens(sequence), 0
        if self.chunks is not None:
            num_there = self.chunks.num_chunks(sequence, len(sequence)) * self.chunks.chunk_tokens
        if self.host is not None:
            num_there = self.host.tree.peek(sequence)
        if self.offload is not None:
            num_there = self.offload.peek(sequence)
        return num_here, max(0, num_there - num_here)

    def use(self, sequence: TokenSequence) -> int:
        """Number of tokens of the longest cached prefix. Except with vLLM's prefix cache, the call is an access."""
        if self.prefix_cache is None:
            return 0
        node, _ = self.prefix_cache.match(sequence, len(sequence))
        self.prefix_cache.unlock(node)
        return node.stop

    def makes_room_for_states(self) -> bool:
        """Returns False if a new request gets no room for its linear-attention states, even after states are evicted.
        This class serves models without states, and returns True.
        """
        return True

    def begin_step(self) -> None:
        """Called before an instance chooses a step. Does nothing in this class."""

    def waits(self, lease: Lease) -> bool:
        """True if a newly opened lease continues from a state that the step being chosen will compute. Here: False."""
        return False

    def chunk_tokens(self, lease: Lease, start: int, num_tokens: int, prefill_end: int, limit: int) -> int:
        """Number of tokens of a prompt's next chunk. num_tokens: number of tokens that the prompt still lacks, as far
        as the step has room for them. This class returns num_tokens; subclasses for models with states may end chunks
        earlier. start: index of the chunk's first token. prefill_end: number of the request's tokens that are computed
        as a prompt. limit: maximum tokens that any step computes of one prompt.
        """
        return num_tokens

    def num_state_pages(self, start: int, end: int, prefill_end: int) -> int:
        """Number of pages for states that a chunk of the tokens [start, end) needs in addition to its KV. prefill_end:
        number of the request's tokens that are computed as a prompt.
        """
        return 0

    def begin_chunk(self, lease: Lease, prompt: TokenSequence, start: int, end: int, prefill_end: int) -> None:
        """Allocates pages for the linear-attention states that a chunk of the tokens [start, end) writes. Callers call
        this before the chunk is computed. This class serves models without such states, so the method does nothing.
        prefill_end: number of the request's tokens that are computed as a prompt.
        """

    def end_chunk(self, lease: Lease) -> None:
        """Frees pages for states that only a computed chunk needed. Does nothing in this class."""

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix of at most max_tokens, and locks the prefix."""
        if self.prefix_cache is None:
            return Lease()
        node, pages = self.prefix_cache.match(sequence, max_tokens)
        return Lease(node, pages, len(pages))

    def open_for_load(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix of at most max_tokens. Caches with linear-attention states may
        return a prefix without a state at its end, because KV loaded from host memory continues it.
        """
        return self.open(sequence, max_tokens)

    def take_state(self, lease: Lease) -> list[int]:
        """Allocates and returns pages for the linear-attention state that a load brings. Empty: loads bring none."""
        return []

    def kept_states(self, lease: Lease) -> list[tuple[int, list[int]]]:
        """Returns the linear-attention states that a computed chunk has left for other requests, as pairs: the number
        of prompt tokens that the state covers, and the state's pages. Empty if the model has no states.
        """
        return []

    def num_loadable_pages(self, lease: Lease, sequence: TokenSequence, max_tokens: int, request_id: int) -> int:
        """Number of pages that SGLang's host memory or LMCache can load after the cached prefix of a newly opened
        lease, up to the sequence's first max_tokens tokens (with LMCache, one token more). Without either: 0.
        """
        if self.chunks is not None:  # a whole prompt too: its last token is computed again
            num_tokens = min(max_tokens + 1, len(sequence))
            return self.chunks.num_loadable_pages(request_id, sequence, lease.num_shared, num_tokens)
        return 0 if self.host is None else self.host.num_loadable_pages(sequence, lease.num_shared, max_tokens)

    def load(self, lease: Lease, sequence: TokenSequence, num_pages: int, request_id: int) -> None:
        """Loads num_pages pages from host memory into a newly opened lease, and caches the pages on the GPU. With
        LMCache, the pages are cached only when the prompt's first forward ends. The caller has checked that the pages
        fit.
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
        """Begins to read a new prompt's KV from storage into host memory, except in the cases that `Prefetcher.begin`
        lists. No effect without storage.
        """
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
        """Adds num_pages pages to a lease. The caller must make sure that num_available_pages is at least num_pages."""
        if num_pages:
            lease.table += self.allocate(num_pages)

    def grow_all(self, leases: list[Lease], num_pages: int) -> None:
        """Allocates num_pages pages, and gives them to the leases in turn, one page at a time."""
        pages = self.allocate(num_pages)
        if num_pages == len(leases):
            for lease, page in zip(leases, pages):  # noqa: B905  mypyc compiles zip if it has no keyword
                lease.table.append(page)
        else:
            for i, lease in enumerate(leases):
                lease.table += pages[i :: len(leases)]

    def make_free(self, num_pages: int) -> None:
        """Evicts cached pages until num_pages pages are free, or no page is evictable."""
        if num_pages > self.pool.num_free and self.prefix_cache is not None:
            self._evict(self.prefix_cache, num_pages - self.pool.num_free)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocates pages, and evicts cached pages if needed. Raises RuntimeError if there are too few."""
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
        """Caches the whole pages of the first num_tokens, whose KV is complete, and keeps them locked.
        num_prompt_tokens: number of these tokens that belong to the prompt. is_chunk: True: further chunks of the
        prompt follow.
        """
        if self.prefix_cache is not None:
            node = self._share(lease, sequence, num_tokens, self.prefix_cache)
            if node is not lease.node:
                self.prefix_cache.lock(node, below=lease.node)
                if lease.replaced and self._blocks is not None:
                    assert lease.node is not None
                    self._blocks.keep_twins(node, lease.node, lease, lease.replaced)
                    lease.has_twins, lease.replaced = True, []
                lease.node = node
            self.prefix_cache.touch(node, self._hits_behind(lease, node, is_chunk=is_chunk))
            if self.host is not None:
                self.host.on_insert(node, is_whole=num_tokens == len(sequence))
            if num_prompt_tokens < num_tokens:
                self._split(node, num_prompt_tokens, self.prefix_cache)

    def close(self, lease: Lease, sequence: TokenSequence, num_tokens: int, num_prompt_tokens: int = 0) -> None:
        """Caches the whole pages of the first num_tokens of prompt and outputs, and ends the lease. num_prompt_tokens:
        number of these tokens that belong to the prompt.
        """
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
        """With splits_at_prompt, splits the path to a node at the last page boundary of the prompt, so that prompt and
        outputs are separate nodes. No effect otherwise.
        """
        if self._splits_at_prompt and num_prompt_tokens:
            cache.split_path(node, cache.num_cacheable(num_prompt_tokens))

    def _hits_behind(self, lease: Lease, node: Node, *, is_chunk: bool = False) -> int | None:
        """After an insert that ends at `node`: number of tokens behind which nodes count a use. Nodes on the path to
        `node` count a use if they end after this number of tokens. None: no node counts a use. is_chunk: True: the
        prompt has further chunks to insert.
        """
        if self._counts_every_insert:
            return None if is_chunk else 0
        counted, lease.num_counted_tokens = lease.num_counted_tokens, node.stop
        return counted

    def drop(self, lease: Lease) -> None:
        """Ends the lease of a request. Frees the pages that the request owns, its own copies of cached pages included,
        and unlocks its cached pages. Puts nothing into the prefix cache.
        """
        self.pool.free(lease.table[lease.num_shared :] if lease.num_shared else lease.table)
        if lease.replaced:
            self.pool.free(lease.replaced)
            lease.replaced = []
        if self.prefix_cache is not None:
            assert lease.node is not None
            if lease.has_twins:
                assert self._blocks is not None
                self._blocks.drop_twins(lease.node, lease)
                lease.has_twins = False
            self.prefix_cache.unlock(lease.node)
        lease.node, lease.table, lease.num_shared = None, [], 0

    def flush(self) -> None:
        """Drops all cached KV that no lease holds, on the GPU and in host memory. In host memory, KV that a prefetch, a
        lookup or a copy under way needs stays, too.
        """
        if self.prefix_cache is not None:
            leaving = None if self.host is None else self.host.release
            self.prefix_cache.evict(self.prefix_cache.num_evictable_pages, leaving)
        if self.host is not None:
            self.host.flush()
        for connected in (self.offload, self.chunks):
            if connected is not None:
                connected.flush()

    def take_connector_copies(self) -> list[HostCopy]:
        """Returns the copies that vLLM's connector decided since the last call, in order, and forgets them."""
        if self.chunks is not None:
            return self.chunks.take_copies()
        return [] if self.offload is None else self.offload.take_copies()

    def add_reader(self, lease: Lease) -> None:
        """Notes that each decode step reads this request's cached prefix."""
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
        """Number of cached tokens that a decode step reads again, because several requests share them. The first read
        of a token does not count. read_nodes: Lease.read_node of each request.
        """
        return 0 if self.prefix_cache is None else self.prefix_cache.num_repeated_tokens(read_nodes)

    def _share(self, lease: Lease, sequence: TokenSequence, num_tokens: int, cache: RadixCache) -> Node:
        """Gives the whole pages of the first num_tokens to the prefix cache. Where the cache already has the tokens,
        the page table gets the cached pages; with vLLM's prefix cache, it keeps the request's own pages. Returns the
        cache's node that ends at the last of the whole pages.
        """
        assert lease.node is not None
        shared, whole = lease.num_shared, cache.num_cacheable(num_tokens) // self.page_size
        if whole <= shared:
            return lease.node
        node, found = cache.insert(sequence, whole * self.page_size, lease.table[shared:whole], lease.node)
        if found:
            replaced = slice(shared, shared + len(found))
            if self._keeps_replaced or self._blocks is not None:
                lease.replaced += lease.table[replaced]
            else:
                self.pool.free(lease.table[replaced])
            if self._blocks is None:
                lease.table[replaced] = found
        lease.num_shared = whole
        return node
