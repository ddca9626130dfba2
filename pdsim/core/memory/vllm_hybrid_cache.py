"""The memory of one vLLM instance whose model has layers of linear attention.

States and KV share one pool of blocks. A state takes one block for each group of layers. An instance that computes a
prompt keeps the state at the prompt's last block boundary. It also keeps a state where a cached prefix without a state
ends, because another prompt continues differently from there (mamba_cache_mode align, prefix_cache_retention_interval
0). On this instance, every usable cached prefix ends at a kept state. Unused states and KV are evicted in the order in
which they became unused.

Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py:1428 (MambaManager), v1/core/kv_cache_coordinator.py:805,
v1/core/sched/scheduler.py:546. Law: tests/laws/test_vllm_hybrid_cache.py.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache, path_to
from pdsim.policy.views import TokenSequence


class State:
    """The pages of a linear-attention state. node: node of the prefix cache at whose end the cache keeps the state.
    None: the cache does not keep the state.
    """

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.num_users = 1
        self.node: Node | None = None
        self.order = (0, 0)
        """Place in the order of eviction, as `_release` sets it: number of the tree's last access, plus or minus 1, and
        a serial number."""


class HybridBlocksLease(Lease):
    """A lease that also holds linear-attention states."""

    def __init__(self, node: Node | None, pages: list[int]) -> None:
        super().__init__(node, pages, len(pages))
        self.running: State | None = None
        """State after the request's last token that is cached, computed or scheduled. None: the lease has no such state
        yet."""
        self.passed: list[State] = []
        """States that a forward under way reads, or exports at a block boundary (`_exports`)."""
        self.parting_tokens = 0
        """Number of tokens of the longest cached prefix, if no state is cached at the end of this prefix. 0: a state is
        cached there, no prefix is cached, `open_for_load` opened the lease, or `keeps_states` is False."""
        self.has_begun = False
        self.kept: list[tuple[int, State]] = []
        """States that a forward under way leaves for other requests, as pairs: number of the request's first tokens
        that the state covers, and the state."""

    @property
    def states(self) -> list[State]:
        return self.passed if self.running is None else [*self.passed, self.running]


class VllmHybridCache(KvCache):
    """A KV cache that also holds linear-attention states, in pages of the same pool. A lease continues from a cached
    state.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: RadixCache | None,
        pages_per_state: int,
        *,
        computes: bool,
        offload: OffloadCache | None = None,
        chunks: ChunkCache | None = None,
    ) -> None:
        """pages_per_state: number of pages of one state. computes: True: the instance computes prompts. False: it
        decodes; a prompt's state arrives with its KV, no state is cached, and a cached prefix continues from any page
        (kv_cache_manager.py:330). The other arguments have the meaning that KvCache gives them.
        """
        super().__init__(pool, page_size, prefix_cache, offload=offload, chunks=chunks)
        self.pages_per_state = pages_per_state
        self.unused: set[State] = set()
        """Cached states that no request uses."""
        self._order: list[tuple[tuple[int, int], State]] = []
        """Heap of unused states. An entry is invalid if its state is in use or evicted, or has another order by now."""
        self._serial = 0
        self._kept: dict[Node, State] = {}
        self._fresh: set[Node] = set()
        """Nodes whose states the step being chosen will compute."""
        self.keeps_states = computes and prefix_cache is not None
        self.pages_per_growth = 1 + pages_per_state * self.keeps_states

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens of the longest possible request. Two linear-attention states take pages, too: the state that
        the request uses, and the state that its last forward stores.
        """
        return max(0, self.pool.num_pages - 2 * self.pages_per_state) * self.page_size

    @property
    def num_available_pages(self) -> int:
        found = self.pool.num_free + self.pages_per_state * len(self.unused) - self.num_left_pages
        return found if self.prefix_cache is None else found + self.prefix_cache.num_evictable_pages

    def makes_room_for_states(self) -> bool:
        return self.keeps_states or self.num_available_pages >= self.pages_per_state

    def num_cached_tokens(self, sequence: TokenSequence) -> int:
        if not self.keeps_states or self.prefix_cache is None:
            return super().num_cached_tokens(sequence)
        nodes = self.prefix_cache.whole_nodes(sequence)
        return self._last_kept(nodes[-1]).stop if nodes else 0

    def use(self, sequence: TokenSequence) -> int:
        return self.num_cached_tokens(sequence)

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix that has a state at its end and at most max_tokens tokens. Locks
        prefix and state. If `keeps_states` is False, the prefix needs no state and may end after any page, and the
        lease gets new pages for a state.
        """
        tree = self.prefix_cache
        if not self.keeps_states or tree is None:
            whole = super().open(sequence, max_tokens)
            lease = HybridBlocksLease(whole.node, whole.table)
            lease.running = self._take()
            return lease
        end, _ = tree.lock_path(sequence, tree.num_cacheable(min(max_tokens, len(sequence))))
        node = self._last_kept(end)
        tree.lock(node)
        tree.unlock(end)
        lease = HybridBlocksLease(node, [page for step in path_to(node) for page in step.pages])
        lease.parting_tokens = end.stop if end is not node else 0
        if (state := self._kept.get(node)) is not None:
            self._use(state)
            lease.running = state
        return lease

    def open_for_load(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix of at most max_tokens tokens, which a load from host memory may
        continue. The load also brings a state, so the prefix needs none (kv_cache_manager.py:330). If `keeps_states` is
        False, does the same as `open`.
        """
        if not self.keeps_states:
            return self.open(sequence, max_tokens)
        whole = super().open(sequence, max_tokens)
        return HybridBlocksLease(whole.node, whole.table)

    def take_state(self, lease: Lease) -> list[int]:
        assert isinstance(lease, HybridBlocksLease)
        if not self.keeps_states:
            return []
        lease.running, lease.has_begun = self._take(), True
        return lease.running.pages

    def kept_states(self, lease: Lease) -> list[tuple[int, list[int]]]:
        assert isinstance(lease, HybridBlocksLease)
        return [(num_tokens, state.pages) for num_tokens, state in lease.kept]

    # Forwards.

    def begin_step(self) -> None:
        """Called before an instance chooses a step. Prompts of this step may continue from all states that earlier
        steps compute and cache.
        """
        self._fresh.clear()
        self.num_left_pages = 0

    def waits(self, lease: Lease) -> bool:
        """True if a newly opened lease must wait, because it continues from a state that the step being filled has yet
        to compute.
        """
        return lease.node in self._fresh

    def chunk_tokens(self, lease: Lease, start: int, num_tokens: int, prefill_end: int, limit: int) -> int:
        """Number of tokens of the chunk that begins at token `start`, at most num_tokens. The chunk ends at a block
        boundary unless it reaches prefill_end, the number of the request's tokens that are computed as a prompt. 0: the
        step has too few tokens left to reach a block boundary. limit: maximum tokens that any step computes
        of one prompt; chunks may end inside a block that is longer. The chunk also ends where a cached prefix without a
        state ends and, unless the forward exports a state (`_exports`), at the prompt's last block boundary and at the
        end of a block in which the chunk begins.
        """
        if not self.keeps_states or start >= prefill_end:
            return num_tokens
        assert isinstance(lease, HybridBlocksLease)
        size, end = self.page_size, start + num_tokens
        last = (prefill_end - 1) // size * size
        exports = self._exports(start, end, prefill_end)
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= limit:
                end = aligned
        stops = [] if exports else [last]
        if start % size and not exports:
            stops.append((start // size + 1) * size)
        if start < lease.parting_tokens < end:
            stops.append(start + (lease.parting_tokens - start) // size * size)
        return max(0, min([stop for stop in stops if start < stop < end], default=end) - start)

    def num_state_pages(self, start: int, end: int, prefill_end: int) -> int:
        """Number of pages for states that a chunk of the tokens [start, end) needs. prefill_end: number of the
        request's tokens that are computed as a prompt.
        """
        if not self.keeps_states:
            return 0
        begins_block = -(-end // self.page_size) > -(-start // self.page_size)
        return self.pages_per_state * (begins_block + self._exports(start, end, prefill_end))

    def begin_chunk(self, lease: Lease, prompt: TokenSequence, start: int, end: int, prefill_end: int) -> None:
        """Prepares the states of a chunk with the tokens [start, end) before it is computed. The chunk's KV pages are
        already in the prefix cache at this time. Allocates pages for the states that the chunk writes, and caches those
        states from which another prompt may continue. prefill_end: number of the request's tokens that are computed as
        a prompt.
        """
        if not self.keeps_states:
            return
        assert isinstance(lease, HybridBlocksLease)
        lease.has_begun, size = True, self.page_size
        wanted = ((len(prompt) - 1) // size * size, lease.parting_tokens)
        if self._exports(start, end, prefill_end):
            exported, place = self._take(), (end - 1) // size * size
            lease.passed.append(exported)
            if place in wanted:
                self._keep(lease, exported, place)
        if -(-end // size) > -(-start // size):
            if lease.running is not None:
                lease.passed.append(lease.running)
            lease.running = self._take()
        if end % size == 0 and end in wanted and lease.running is not None:
            self._keep(lease, lease.running, end)

    def end_chunk(self, lease: Lease) -> None:
        """Releases the states that a computed chunk has read, and the state that it has exported (`_exports`)."""
        if isinstance(lease, HybridBlocksLease):
            for state in lease.passed:
                self._release(state, 1)
            lease.passed, lease.kept = [], []

    def grow_all(self, leases: list[Lease], num_pages: int) -> None:
        """Allocates num_pages pages in all, and gives them to the leases of running requests in turn, one at a time.

        If states are kept, a step that begins a new block of a request reads the old state, and writes the new state to
        other pages. The pages of the old states become free only after this step. Until then, as many other pages are
        kept free instead (num_left_pages).
        """
        self.num_left_pages = 0
        super().grow_all(leases, num_pages)
        if self.keeps_states:
            self.num_left_pages = self.pages_per_state * len(leases)
            self.make_free(self.num_left_pages)

    def allocate(self, num_pages: int) -> list[int]:
        self.make_free(num_pages + self.num_left_pages)
        return super().allocate(num_pages)

    def drop(self, lease: Lease) -> None:
        assert isinstance(lease, HybridBlocksLease)
        for state in lease.states:
            self._release(state, -1 if lease.has_begun else None)
        lease.running, lease.passed = None, []
        super().drop(lease)

    def flush(self) -> None:
        for state in list(self.unused):
            self._forget(state)
        super().flush()

    # States.

    def _exports(self, start: int, end: int, prefill_end: int) -> bool:
        """True if a forward of the tokens [start, end) writes two states: one after its last token, and one at the last
        block boundary before `end`, which kernels of FlashInfer and Mamba2 export (v1/kv_cache_interface.py:1189).
        prefill_end: number of the request's tokens that are computed as a prompt.
        """
        size = self.page_size
        return end >= prefill_end and start % size == 0 and (end - 1) // size > start // size

    def _last_kept(self, node: Node) -> Node:
        """Last node with a cached state on the path to the given node. The root: no node on the path has a state."""
        while node.parent is not None and node not in self._kept:
            node = node.parent
        return node

    def _keep(self, lease: Lease, state: State, num_tokens: int) -> None:
        """Adds a state to the states that the lease's forward leaves for other requests (`kept`), and caches the state
        unless the prefix cache has one there. num_tokens: number of the request's first tokens that the state covers.
        The caller has cached the KV of these tokens.
        """
        assert isinstance(lease, HybridBlocksLease)
        lease.kept.append((num_tokens, state))
        tree, node = self.prefix_cache, lease.node
        assert tree is not None
        assert node is not None
        tree.split_path(node, num_tokens)
        while node.stop > num_tokens and node.parent is not None:
            node = node.parent
        if node.stop == num_tokens and node.parent is not None and node not in self._kept:
            self._kept[node] = state
            state.node = node
            self._fresh.add(node)

    def _take(self) -> State:
        return State(self.allocate(self.pages_per_state))

    def _use(self, state: State) -> None:
        self.unused.discard(state)
        state.num_users += 1

    def _release(self, state: State, shift: int | None) -> None:
        """Ends one use of a state. A state without users is freed or, if the prefix cache keeps it, can be evicted;
        states and KV are evicted in the order in which they became unused. shift: the state's place in this order. 1:
        directly after KV that became unused at the tree's last access. -1: directly before this KV. None: the state
        keeps its place.
        """
        state.num_users -= 1
        if state.num_users:
            return
        if state.node is None or self.prefix_cache is None:
            self.pool.free(state.pages)
            return
        if shift is not None:
            self._serial += 1
            state.order = (self.prefix_cache.num_accesses + shift, self._serial)
        self.unused.add(state)
        heappush(self._order, (state.order, state))

    def _first_unused(self) -> State | None:
        while self._order:
            order, state = self._order[0]
            if state in self.unused and state.order == order:
                return state
            heappop(self._order)
        return None

    def _forget(self, state: State) -> None:
        """Evicts an unused state."""
        self.unused.discard(state)
        if state.node is not None:
            del self._kept[state.node]
        self.pool.free(state.pages)

    def _leave(self, node: Node) -> None:
        """Removes the state of a node that is about to be evicted from the cache. The state's pages become free at once
        or, if requests use the state, when the last of them releases it. No effect if the node has no state.
        """
        state = self._kept.get(node)
        if state is not None and state in self.unused:
            self._forget(state)
        elif state is not None:
            del self._kept[node]
            state.node = None

    def _evict(self, prefix_cache: RadixCache, num_pages: int) -> None:
        """Evicts unused states and KV, in the order in which they became unused, until num_pages more pages are free or
        nothing can be evicted.
        """
        enough = self.pool.num_free + num_pages
        while (lacking := enough - self.pool.num_free) > 0:
            last_access = prefix_cache.next_access()
            state = self._first_unused()
            if state is not None and (last_access is None or state.order[0] < last_access):
                self._forget(state)
            elif last_access is None:
                return
            else:
                prefix_cache.evict(1 if self.unused else lacking, self._leave)

    def held_states(self, leases: Sequence[Lease]) -> set[State]:
        """Returns the states that the given leases hold."""
        return {state for lease in leases if isinstance(lease, HybridBlocksLease) for state in lease.states}

    def state_pages(self, leases: Sequence[Lease]) -> list[int]:
        """Pages of all linear-attention states: those that leases hold, and those that no request uses but the cache
        keeps. Each page appears once.
        """
        return [page for state in [*self.held_states(leases), *self.unused] for page in state.pages]
