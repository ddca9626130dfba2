"""Host memory behind the prefix cache of one vLLM instance (OffloadingConnector).

A block of a prompt is stored when a step has computed it, unless host memory has it already. The least recently used
blocks make room for others. A prompt loads the blocks that continue those on the GPU. Both copies run beside steps:

  stored    from Offload to on_stored: a prompt that finds one of the blocks waits
  loaded    from LoadBack to on_loaded: another prompt that finds one of the blocks waits

Law: tests/laws/test_offloading.py.
"""

from dataclasses import dataclass

from pdsim.core import messages as m
from pdsim.core.memory.page_pool import PagePool
from pdsim.core.memory.radix_cache import Node, RadixCache
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

MUST_WAIT = -1
"""Number of loadable pages that says: the prompt must wait, because some of its blocks are being copied."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A running copy of a request's pages, from or to host memory."""

    request_id: int
    end: Node
    """Last node of the prefix tree's path to the copied pages. The copy locks it."""
    host_pages: tuple[int, ...]


class OffloadCache:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.tree = RadixCache(pool, page_size, LeastRecentlyUsed())
        self.tree.uses_whole_nodes = False
        self.tree.evicts_pages = True
        self.stores: dict[int, BlockCopy] = {}
        """Stores under way, by their numbers."""
        self.loads: dict[int, BlockCopy] = {}
        """Loads under way, by request."""
        self._page_size = page_size
        self._under_way: set[int] = set()
        """Host pages of copies under way."""
        self._num_stores = 0
        self._copies: list[m.HostCopy] = []

    def take_copies(self) -> list[m.HostCopy]:
        """Returns the copies that were decided since the last call, in order."""
        copies, self._copies = self._copies, []
        return copies

    def store(self, request_id: int, prompt: TokenSequence, num_tokens: int, table: list[int]) -> None:
        """Stores the whole pages of the first num_tokens, which are computed. Stores nothing if the missing pages have
        no room. The call counts as a use of the pages. table: the request's pages.
        """
        stop = num_tokens - num_tokens % self._page_size
        end, _ = self.tree.lock_path(prompt, stop)
        num_here, num_pages = end.stop // self._page_size, (stop - end.stop) // self._page_size
        num_lacking = num_pages - self.pool.num_free
        if num_pages == 0 or num_lacking > self.tree.num_evictable_pages:
            self.tree.touch(end)
            self.tree.unlock(end)
            return
        if num_lacking > 0:
            self.tree.evict(num_lacking)
        host_pages = self.pool.allocate(num_pages)
        leaf, _ = self.tree.insert(prompt, stop, host_pages, end)
        self.tree.lock(leaf, below=end)
        self.tree.touch(leaf)
        self._num_stores += 1
        self.stores[self._num_stores] = BlockCopy(request_id, leaf, tuple(host_pages))
        self._under_way.update(host_pages)
        pages = tuple(table[num_here : num_here + num_pages])
        self._copies.append(m.Offload(self._num_stores, pages, tuple(host_pages)))

    def on_stored(self, store: int) -> None:
        self._end(self.stores.pop(store))

    def num_loadable_pages(self, request_id: int, sequence: TokenSequence, num_shared: int, num_tokens: int) -> int:
        """Number of host-memory pages that continue the first num_shared pages of a sequence. MUST_WAIT: some are being
        copied, or pages of the request are still being stored.
        """
        end, pages = self.tree.lock_path(sequence, num_tokens - num_tokens % self._page_size)
        self.tree.unlock(end)
        found = pages[num_shared:]
        is_storing = any(store.request_id == request_id for store in self.stores.values())
        return MUST_WAIT if is_storing or not self._under_way.isdisjoint(found) else len(found)

    def load(self, request_id: int, sequence: TokenSequence, num_shared: int, pages: list[int]) -> None:
        """Loads the host-memory pages that continue the first num_shared pages of a sequence, into these GPU pages."""
        end, found = self.tree.lock_path(sequence, (num_shared + len(pages)) * self._page_size)
        self.tree.touch(end)
        host_pages = tuple(found[num_shared:])
        self.loads[request_id] = BlockCopy(request_id, end, host_pages)
        self._under_way.update(host_pages)
        self._copies.append(m.LoadBack(request_id, host_pages, tuple(pages)))

    def on_loaded(self, request_id: int) -> None:
        self._end(self.loads.pop(request_id))

    def flush(self) -> None:
        """Drops all blocks that no running copy reads or writes."""
        self.tree.evict(self.tree.num_evictable_pages)

    def _end(self, copy: BlockCopy) -> None:
        self._under_way.difference_update(copy.host_pages)
        self.tree.unlock(copy.end)
