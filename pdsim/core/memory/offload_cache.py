"""Host memory of one vLLM instance (OffloadingConnector): a second prefix cache of blocks.

A block of a prompt is stored when a step has computed it, unless host memory already has the block or has no room. The
least recently used blocks are evicted first. A prompt loads the blocks that continue its cached prefix. Stores and
loads run while steps run.

With linear attention, host memory also stores the states that the GPU keeps, and a load ends at a state
(offloading/scheduler.py:805). While a copy is under way, prompts may have to wait:

  stored    from Offload to on_stored: a prompt that finds one of the blocks waits, and so does the stored request
  loaded    from LoadBack to on_loaded: another prompt that finds one of the blocks waits, if the GPU keeps prefixes

Law: tests/laws/test_offloading.py.
"""

from collections.abc import Sequence

from pdsim.core import messages as m
from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.radix_cache import Node, PagePool, path_to
from pdsim.dataclass import dataclass
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

MUST_WAIT = -1
"""Returned in place of a number of loadable pages: the prompt must wait, because some of the blocks that it would load
are being copied, or because blocks of the same request are still being stored."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of a request's pages from or to host memory that is under way."""

    request_id: int
    end: Node
    """Last node on the path to the copied pages in the tree of host memory. The node is locked during the copy."""
    host_pages: tuple[int, ...]


class OffloadCache:
    def __init__(self, pool: PagePool, page_size: int, pages_per_state: int = 0, *, shares_loads: bool = True) -> None:
        """pages_per_state: number of pages of one linear-attention state. 0: the model has none. shares_loads: True: a
        prompt waits for blocks that another prompt loads, because the GPU's prefix cache will have them. False: the
        instance has no such cache, and each prompt loads its blocks (offloading/scheduler.py:641).
        """
        self.pool = pool
        self.states: dict[Node, list[int]] = {}
        """Host pages of the linear-attention states at the ends of nodes, by node."""
        self._pages_per_state = pages_per_state
        self._shares_loads = shares_loads
        self.tree = BlockCache(pool, page_size, LeastRecentlyUsed())
        self.stores: dict[int, BlockCopy] = {}
        """Stores under way, by their numbers (Offload.store)."""
        self.loads: dict[int, BlockCopy] = {}
        """Loads under way, by request id."""
        self._page_size = page_size
        self._under_way: set[int] = set()
        """Host pages that stores under way write and, with shares_loads, that loads under way read."""
        self._num_stores = 0
        self._copies: list[m.HostCopy] = []

    def take_copies(self) -> list[m.HostCopy]:
        """Returns the copies that were decided since the last call, in order, and forgets them."""
        copies, self._copies = self._copies, []
        return copies

    def store(
        self,
        request_id: int,
        prompt: TokenSequence,
        num_tokens: int,
        table: list[int],
        states: Sequence[tuple[int, list[int]]] = (),
    ) -> None:
        """Adds a command that copies computed pages to host memory: the whole pages of the prompt's first num_tokens,
        and the given states. Copies only what host memory lacks, and nothing if host memory has no room for all of
        that. The call counts as a use of the pages.

        table: the request's GPU pages. states: for each state, (number of the prompt's first tokens whose state it is,
        its GPU pages).
        """
        stop = num_tokens - num_tokens % self._page_size
        end, _ = self.tree.lock_path(prompt, stop)
        num_here, num_pages = end.stop // self._page_size, (stop - end.stop) // self._page_size
        here = {node.stop for node in path_to(end) if node in self.states}
        missing = [(tokens, pages) for tokens, pages in states if tokens not in here]
        num_host_pages = num_pages + len(missing) * self._pages_per_state
        if num_host_pages == 0 or num_host_pages - self.pool.num_free > self.tree.num_evictable_pages:
            self.tree.touch(end)
            self.tree.unlock(end)
            return
        if num_host_pages > self.pool.num_free:
            self.tree.evict(num_host_pages - self.pool.num_free, self._free_state)
        host_pages = self.pool.allocate(num_host_pages)
        leaf, _ = self.tree.insert(prompt, stop, host_pages[:num_pages], end)
        self.tree.lock(leaf, below=end)
        self.tree.touch(leaf)
        for i, (tokens, _) in enumerate(missing):
            start = num_pages + i * self._pages_per_state
            self.states[self._node_at(leaf, tokens)] = host_pages[start : start + self._pages_per_state]
        self._num_stores += 1
        self.stores[self._num_stores] = BlockCopy(request_id, leaf, tuple(host_pages))
        self._under_way.update(host_pages)
        pages = [*table[num_here : num_here + num_pages], *(page for _, state in missing for page in state)]
        self._copies.append(m.Offload(self._num_stores, tuple(pages), tuple(host_pages)))

    def _node_at(self, node: Node, num_tokens: int) -> Node:
        """Returns the node that ends after the first num_tokens, on the path to `node`. Splits a node if none ends
        there.
        """
        self.tree.split_path(node, num_tokens)
        while node.stop > num_tokens and node.parent is not None:
            node = node.parent
        return node

    def _free_state(self, node: Node) -> None:
        """Frees the host pages of the state that is kept at an evicted node, if there is one."""
        self.pool.free(self.states.pop(node, []))

    def on_stored(self, store: int) -> None:
        self._end(self.stores.pop(store))

    def num_loadable_pages(self, request_id: int, sequence: TokenSequence, num_shared: int, num_tokens: int) -> int:
        """Number of pages that host memory can load after the first num_shared pages of a sequence, up to its first
        num_tokens tokens. MUST_WAIT: some of these pages are being copied, or pages of the request are still being
        stored.
        """
        if self._pages_per_state:
            num_tokens -= 1
        end, pages = self.tree.lock_path(sequence, num_tokens - num_tokens % self._page_size)
        self.tree.unlock(end)
        if self._pages_per_state:
            end = self._last_with_state(end)
            pages = pages[: end.stop // self._page_size]
        found = pages[num_shared:]
        copied = {*found, *self.states.get(end, ())} if found else set()
        is_storing = any(store.request_id == request_id for store in self.stores.values())
        return MUST_WAIT if is_storing or not self._under_way.isdisjoint(copied) else len(found)

    def _last_with_state(self, node: Node) -> Node:
        while node.parent is not None and node not in self.states:
            node = node.parent
        return node

    def load(self, request_id: int, sequence: TokenSequence, num_shared: int, pages: list[int]) -> None:
        """Adds a command that copies host pages into these GPU pages. The host pages follow the first num_shared pages
        of `sequence`. If the model has states, the state after the last copied token is copied, too.
        """
        num_pages = len(pages) - self._pages_per_state
        end, found = self.tree.lock_path(sequence, (num_shared + num_pages) * self._page_size)
        self.tree.touch(end)
        host_pages = (*found[num_shared:], *self.states.get(end, ()))
        self.loads[request_id] = BlockCopy(request_id, end, host_pages)
        if self._shares_loads:
            self._under_way.update(host_pages)
        self._copies.append(m.LoadBack(request_id, host_pages, tuple(pages)))

    def on_loaded(self, request_id: int) -> None:
        self._end(self.loads.pop(request_id))

    def peek(self, sequence: TokenSequence) -> int:
        """Number of the sequence's first tokens that host memory has."""
        return self.tree.peek(sequence)

    def flush(self) -> None:
        """Drops all blocks, except those on the path to a node that a copy under way locks (BlockCopy.end)."""
        self.tree.evict(self.tree.num_evictable_pages, self._free_state)

    def _end(self, copy: BlockCopy) -> None:
        self._under_way.difference_update(copy.host_pages)
        self.tree.unlock(copy.end)
