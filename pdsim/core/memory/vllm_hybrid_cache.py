"""The memory of one vLLM instance whose model has layers of linear attention.

States are blocks of the same pool as KV: a state takes one block of each group of layers. A computing instance keeps
the state of a prompt at its last block boundary, and where a cached prefix goes on behind its last state, because
prompts have parted there before (mamba_cache_mode align, prefix_cache_retention_interval 0). A cached prefix ends at
such a state. Unused states and KV are evicted in the order in which they became unused.

Source: vLLM 0.33.0, v1/core/single_type_kv_cache_manager.py:1428 (MambaManager), v1/core/kv_cache_coordinator.py:805,
v1/core/sched/scheduler.py:546. Law: tests/laws/test_vllm_hybrid_cache.py.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.page_pool import PagePool
from pdsim.core.memory.radix_cache import Node, RadixCache, path_to
from pdsim.policy.views import TokenSequence


class State:
    """The pages of a state, and the node of the prefix cache at whose end it is kept."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages
        self.num_users = 1
        self.node: Node | None = None
        self.order = (0, 0)
        """When the last user left: after how many accesses of the tree, and a serial number."""


class HybridBlocksLease(Lease):
    """A lease that also holds states."""

    def __init__(self, node: Node | None, pages: list[int]) -> None:
        super().__init__(node, pages, len(pages))
        self.running: State | None = None
        """State that the request's last forward leaves."""
        self.passed: list[State] = []
        """States that a forward under way reads, or keeps for others."""
        self.parting_tokens = 0
        """Number of cached tokens, if a state was kept only before the last of them. Else 0."""
        self.has_begun = False
        self.kept: list[tuple[int, State]] = []
        """States of a forward under way that others may continue from, by their number of tokens."""

    @property
    def states(self) -> list[State]:
        return self.passed if self.running is None else [*self.passed, self.running]


class VllmHybridCache(KvCache):
    """Leases whose states take pages of the pool, and that continue from kept states."""

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
        """computes: False on decode, where the state of a prompt comes with its KV and no states are kept: a cached
        prefix continues from any page (kv_cache_manager.py:330).
        """
        super().__init__(pool, page_size, prefix_cache, offload=offload, chunks=chunks)
        self.pages_per_state = pages_per_state
        self.unused: set[State] = set()
        """Kept states without users."""
        self._order: list[tuple[tuple[int, int], State]] = []
        """A heap of unused states. Entries of states that were used again are stale."""
        self._serial = 0
        self._kept: dict[Node, State] = {}
        self._fresh: set[Node] = set()
        """Nodes whose states the step that is being chosen will compute."""
        self.keeps_states = computes and prefix_cache is not None
        self.pages_per_growth = 1 + pages_per_state * self.keeps_states

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request: its state, and one that its last forward keeps, take pages, too."""
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
        """Opens a lease on the longest cached prefix of at most max_tokens that has a state, and locks both. Where no
        states are kept, on the longest cached prefix, with pages for the request's state.
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
        """Opens a lease behind whose KV a load continues, and brings the state (kv_cache_manager.py:330)."""
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
        """Begins the choice of a step. The steps before are computed when it runs."""
        self._fresh.clear()
        self.num_left_pages = 0

    def waits(self, lease: Lease) -> bool:
        """True if a lease that was just opened continues from a state of the step that is being chosen."""
        return lease.node in self._fresh

    def chunk_tokens(self, lease: Lease, start: int, num_tokens: int, prefill_end: int, limit: int) -> int:
        """Number of tokens of a chunk that may have num_tokens behind start: it ends at a block unless it reaches
        prefill_end, and where prompts have parted. limit: of one step, in tokens.
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
        return min([stop for stop in stops if start < stop < end], default=end) - start

    def num_state_pages(self, start: int, end: int, prefill_end: int) -> int:
        """Number of pages that a chunk of the tokens from start to end needs for states."""
        if not self.keeps_states:
            return 0
        begins_block = -(-end // self.page_size) > -(-start // self.page_size)
        return self.pages_per_state * (begins_block + self._exports(start, end, prefill_end))

    def begin_chunk(self, lease: Lease, prompt: TokenSequence, start: int, end: int, prefill_end: int) -> None:
        """Takes pages for the states of a chunk whose KV is cached, and keeps states of the prompt."""
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
        """Releases the states that a computed chunk has read, or has kept."""
        if isinstance(lease, HybridBlocksLease):
            for state in lease.passed:
                self._release(state, 1)
            lease.passed, lease.kept = [], []

    def grow_all(self, leases: Sequence[Lease], num_pages: int) -> None:
        """Gives running requests pages. Behind the end of a block a step reads a state and writes it to new pages:
        pages for both are taken from the others, until the next step.
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
        """True if a forward leaves a state at the last block boundary before its end (v1/kv_cache_interface.py:1189,
        as kernels of FlashInfer and Mamba2 do), besides its last.
        """
        size = self.page_size
        return end >= prefill_end and start % size == 0 and (end - 1) // size > start // size

    def _last_kept(self, node: Node) -> Node:
        """The last node with a state on the path to this one. The root, if there is none."""
        while node.parent is not None and node not in self._kept:
            node = node.parent
        return node

    def _keep(self, lease: Lease, state: State, num_tokens: int) -> None:
        """Keeps a state of the first num_tokens for others, unless one is kept there. Their KV is cached."""
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
        """Ends a use of a state. shift: 1 puts it behind KV that became unused with the last access of the tree, -1
        before; None: where it was, because the use was no use.
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
        """Handles the eviction of a node. Nobody can continue from its state."""
        state = self._kept.get(node)
        if state is not None and state in self.unused:
            self._forget(state)
        elif state is not None:
            del self._kept[node]
            state.node = None

    def _evict(self, prefix_cache: RadixCache, num_pages: int) -> None:
        """Frees pages of states and of KV, what became unused first."""
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
        """States in use."""
        return {state for lease in leases if isinstance(lease, HybridBlocksLease) for state in lease.states}

    def state_pages(self, leases: Sequence[Lease]) -> list[int]:
        """Pages of all states that leases hold or that are kept, each once."""
        return [page for state in [*self.held_states(leases), *self.unused] for page in state.pages]
