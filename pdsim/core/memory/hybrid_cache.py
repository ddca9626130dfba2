"""The KV memory of one SGLang instance whose model has layers of linear attention.

A layer of linear attention has one state for all tokens so far, in place of KV of each token. A request can continue a
cached prefix only where a state was kept. A node of the prefix cache may keep the state of its last token, so every
usable prefix ends at a node with a state. Law: tests/laws/test_hybrid_cache.py.
"""

from collections import OrderedDict
from collections.abc import Callable

from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache, path_to
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


@dataclass(frozen=True, kw_only=True)
class StateLimits:
    """Number of states that an instance has room for, and the tokens after which it keeps a state."""

    num_slots: int
    """Number of slots of the instance. A slot holds one state, for all layers of linear attention."""
    slots_per_request: int
    """Number of slots that a request holds while it has a lease: one for its own state and, with has_buffer, one or two
    into which steps write states that can be cached."""
    chunk_tokens: int
    """While a prompt's chunk is computed with has_buffer, a state can be kept after every chunk_tokens tokens, counted
    from the chunk's beginning."""
    interval_tokens: int
    """While a request decodes with has_buffer, a state can be kept after every interval_tokens tokens of the
    sequence."""
    has_buffer: bool = True
    """True: while a prompt is computed or a request decodes, additional slots can hold states after multiples of
    chunk_tokens or interval_tokens tokens; one of them is kept when a chunk or request ends (SGLang's strategy
    extra_buffer). False: a state is kept where a chunk or request ends, at any token (no_buffer).
    """
    computes_prompts: bool = True
    """True: the instance computes prompts, and their chunks leave states in the cache. False: it only decodes."""


class HybridLease(Lease):
    """A lease that also holds slots for linear-attention states; a slot holds one state."""

    def __init__(self, node: Node, pages: list[int], num_slots: int, branch_tokens: int) -> None:
        """node: last node of the locked prefix. pages: the prefix's pages. num_slots: number of slots for the request's
        states. branch_tokens: number of the prompt's first tokens with cached pages, rounded down to a multiple of
        StateLimits.chunk_tokens; a chunk should store a state after these tokens. 0: the cached state covers
        at least this number of tokens.
        """
        super().__init__(node, pages, len(pages))
        self.num_slots = num_slots
        self.branch_tokens = branch_tokens
        self.num_extended_tokens = node.stop
        """Number of tokens after which the request's next chunk begins."""


class KeptStates:
    """Slots for states. A slot belongs to a node of the prefix cache or to a request, or is free."""

    def __init__(self, tree: RadixCache, num_slots: int) -> None:
        self.num_slots = self.num_free = num_slots
        """num_slots: number of all slots. num_free: number of free slots; negative if requests and the states from
        which they continue take more slots than there are."""
        self.kept: OrderedDict[Node, int] = OrderedDict()
        """Nodes with a state, least recently used first, each with the number of leases that continue from it."""
        self._tree = tree

    def deepest(self, node: Node) -> Node:
        """Last node with a state on the path to the given node. The root: no node on the path has a state."""
        while node.parent is not None and node not in self.kept:
            node = node.parent
        return node

    def use(self, node: Node) -> None:
        if node in self.kept:
            self.kept.move_to_end(node)

    def lock(self, node: Node) -> None:
        if node in self.kept:
            self.kept[node] += 1

    def unlock(self, node: Node) -> None:
        if node in self.kept:
            self.kept[node] -= 1

    def keep(self, node: Node) -> bool:
        """Caches the linear-attention state after a node's tokens, in a slot that the caller has taken. Returns False,
        and leaves the slot to the caller, if the node already has a state or is the root.
        """
        is_new = node.parent is not None and node not in self.kept
        if is_new:
            self.kept[node] = 0
        self.use(node)
        return is_new

    def make_free(self, num_slots: int) -> bool:
        """Evicts states, least recently used first, until num_slots slots are free. States from which a lease continues
        stay. If the evicted state's node is a leaf that no request uses, the leaf is evicted, too. Returns False if
        fewer than num_slots slots are free afterwards.
        """
        while self.num_free < num_slots and (node := self._least_recent()) is not None:
            self.forget(node)
            if not node.locks and not node.children:
                self._tree.remove(node)
        return self.num_free >= num_slots

    def take(self, num_slots: int) -> None:
        """Takes num_slots slots. Evicts states if too few slots are free. num_free becomes negative if that does not
        suffice.
        """
        self.make_free(num_slots)
        self.num_free -= num_slots

    def give_back(self, num_slots: int) -> None:
        self.num_free += num_slots

    def forget(self, node: Node) -> None:
        """Frees the slot of a node's state. No effect if the node has no state."""
        if self.kept.pop(node, None) is not None:
            self.num_free += 1

    def _least_recent(self) -> Node | None:
        for node, num_leases in self.kept.items():
            if not num_leases:
                return node
        return None


class HybridKvCache(KvCache):
    """A KV cache that also keeps linear-attention states, from which leases continue, as in SGLang's unified radix
    cache with its Mamba component. keeps_replaced, counts_every_insert: as in KvCache.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_cache: RadixCache,
        limits: StateLimits,
        *,
        keeps_replaced: bool = False,
        counts_every_insert: bool = False,
    ) -> None:
        super().__init__(
            pool, page_size, prefix_cache, keeps_replaced=keeps_replaced, counts_every_insert=counts_every_insert
        )
        self.states = KeptStates(prefix_cache, limits.num_slots)
        self.on_state: Callable[[Lease, int, Node | None], None] | None = None
        """Function that is called with (lease, number of tokens, node) when the state after the lease's first tokens of
        this number is kept at the node. Node None: the state is not kept, because the cache has it already. Drivers
        that compute states set this function. None: nothing is called."""
        self._tree = prefix_cache
        self.limits = limits

    def num_cached_tokens(self, sequence: TokenSequence) -> int:
        nodes = self._tree.whole_nodes(sequence)
        return self.states.deepest(nodes[-1]).stop if nodes else 0

    def use(self, sequence: TokenSequence) -> int:
        node = self.states.deepest(self._tree.split_at_match(sequence, len(sequence)))
        self._touch(node)
        return node.stop

    def makes_room_for_states(self) -> bool:
        return self.states.make_free(self.limits.slots_per_request)

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        """Opens a lease on the longest cached prefix that has a state and at most max_tokens tokens. Locks the prefix,
        and takes slots for the request's states.
        """
        limits, end = self.limits, self._tree.split_at_match(sequence, max_tokens)
        node = self.states.deepest(end)
        self._tree.lock(node)
        self._touch(node)
        self.states.lock(node)
        self.states.take(limits.slots_per_request)
        pages = [page for step in path_to(node) for page in step.pages]
        branch = end.stop - end.stop % limits.chunk_tokens
        return HybridLease(node, pages, limits.slots_per_request, branch if branch > node.stop else 0)

    def tracked_tokens(self, lease: Lease, start: int, num_tokens: int) -> int:
        """Returns the number of the prompt's first tokens whose linear-attention state is kept when a chunk is
        computed. 0: the chunk keeps no state. start: number of the prompt's tokens before the chunk. num_tokens: number
        of the prompt's tokens up to the chunk's end.

        This number is lease.branch_tokens, where another prompt continues differently, if branch_tokens lies in the
        chunk, at a multiple of chunk_tokens after `start`. Otherwise, this number is the last of these multiples.
        Without has_buffer, this number is num_tokens.
        """
        assert isinstance(lease, HybridLease)
        limits = self.limits
        if not limits.has_buffer:
            return num_tokens
        size = limits.chunk_tokens
        if not limits.computes_prompts or num_tokens - start < size:
            return 0
        last, branch = num_tokens - (num_tokens - start) % size, lease.branch_tokens
        return branch if start < branch <= last and not (branch - start) % size else last

    @property
    def interval_tokens(self) -> int:
        """While a request decodes, the cache may keep a linear-attention state of the request after each multiple of
        this number of tokens.
        """
        return self.limits.interval_tokens

    def checkpoint(
        self,
        lease: Lease,
        sequence: TokenSequence,
        num_tokens: int,
        num_prompt_tokens: int = 0,
        *,
        is_chunk: bool = False,
    ) -> None:
        """Caches the linear-attention state that `tracked_tokens` chooses for a computed chunk, and the request's pages
        up to this state. Caches nothing if the chunk keeps no state. num_tokens: number of the sequence's tokens that
        are computed. is_chunk: True: further chunks of the prompt follow. num_prompt_tokens has no effect in this
        class.
        """
        assert isinstance(lease, HybridLease)
        assert lease.node is not None
        tracked = self.tracked_tokens(lease, lease.num_extended_tokens, num_tokens)
        lease.num_extended_tokens = num_tokens
        if not tracked:
            return
        self.states.take(1)
        node = self._share(lease, sequence, tracked, self._tree)
        if not self._keep(lease, tracked, node):
            self.states.give_back(1)
        if node is not lease.node:
            self._tree.lock(node, below=lease.node)
            self.states.unlock(lease.node)
            self.states.lock(node)
            lease.node = node
        self._tree.touch(node, self._hits_behind(lease, node, is_chunk=is_chunk))

    def close(self, lease: Lease, sequence: TokenSequence, num_tokens: int, num_prompt_tokens: int = 0) -> None:
        """Ends the lease. Caches the request's last state and the pages of the tokens before this state, and frees the
        request's other pages. With has_buffer, the last state is that after the last multiple of interval_tokens; if no
        such multiple lies behind the computed chunks, nothing more is cached. Without has_buffer, the last state is
        that after num_tokens. num_tokens: number of the sequence's tokens with KV. num_prompt_tokens is unused.
        """
        assert isinstance(lease, HybridLease)
        tracked = num_tokens
        if self.limits.has_buffer:
            tracked -= num_tokens % self.limits.interval_tokens
            if tracked <= lease.num_extended_tokens:
                tracked = 0
        if tracked:
            node = self._share(lease, sequence, tracked, self._tree)
            lease.num_slots -= self._keep(lease, tracked, node)
            self._tree.touch(node, self._hits_behind(lease, node))
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        assert isinstance(lease, HybridLease)
        assert lease.node is not None
        self.states.unlock(lease.node)
        super().drop(lease)
        self.states.give_back(lease.num_slots)

    def flush(self) -> None:
        self._evict(self._tree, self._tree.num_evictable_pages)

    def _evict(self, prefix_cache: RadixCache, num_pages: int) -> None:
        prefix_cache.evict(num_pages, self.states.forget)

    def _keep(self, lease: Lease, num_tokens: int, node: Node) -> bool:
        is_new = self.states.keep(node)
        if self.on_state is not None:
            self.on_state(lease, num_tokens, node if is_new else None)
        return is_new

    def _touch(self, node: Node) -> None:
        self._tree.touch(node)
        self.states.use(node)
