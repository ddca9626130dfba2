"""The prefix cache of a vLLM instance, which stores KV in blocks. Law: tests/laws/test_radix_cache.py."""

from collections.abc import Callable, Sequence

from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache, path_to
from pdsim.policy.protocols import EvictionPolicy


class BlockCache(RadixCache):
    """A prefix cache that evicts single pages: of a leaf, the last pages, and no more of them than are needed. A match
    does not count as an access. Requests may keep their own copies of pages that the cache also has.
    """

    def __init__(
        self, pool: PagePool | None, page_size: int, eviction: EvictionPolicy, *, has_drafts: bool = False
    ) -> None:
        super().__init__(pool, page_size, eviction, has_drafts=has_drafts)
        self.uses_whole_nodes = False
        self.evicts_pages = True

    def keep_twins(self, node: Node, below: Node, holder: object, pages: Sequence[int]) -> None:
        """Notes that the holder of a lock on the path to `node` has its own copies of pages. pages: the copies of the
        pages of the path's nodes after `below`, in order. The last of these nodes may have no copies.
        """
        path = path_to(node)
        start = 0
        for step in path[path.index(below) + 1 if below.parent is not None else 0 :]:
            if start == len(pages):
                break
            step.twins.append((holder, pages[start : start + len(step.pages)]))
            step.num_twins += 1
            start += len(step.pages)
            if step.locks == step.num_twins:
                self.num_evictable_pages += len(step.pages)
                self._offer(step)

    def drop_twins(self, node: Node, holder: object) -> None:
        """Frees the twins of a lock's holder (pages with the same tokens as cached pages) for all nodes on the path
        from the root to `node`.
        """
        step: Node | None = node
        while step is not None:
            for twin in step.twins:
                if twin[0] is holder:
                    if step.locks == step.num_twins:
                        self.num_evictable_pages -= len(step.pages)
                        step.heap_serial = 0
                    step.twins.remove(twin)
                    step.num_twins -= 1
                    if self._pool is not None:
                        self._pool.free(twin[1])
                    break
            step = step.parent

    def _evict_leaf(self, node: Node, num_lacking: int, leaving: Callable[[Node], None] | None) -> int:
        if len(node.pages) > num_lacking:
            self._cut(node, num_lacking)
        return self._replace(node) if node.twins else super()._evict_leaf(node, num_lacking, leaving)

    def _cut(self, node: Node, num_pages: int) -> None:
        """Splits a node so that it keeps only its last num_pages pages. A new parent gets the node's first pages, which
        can be evicted later.
        """
        self._offer(self.split(node, node.stop - num_pages * self.page_size))

    def _replace(self, node: Node) -> int:
        """Frees a node's pages, and gives the node the twin pages of the first lease in `node.twins` instead. Returns
        the number of freed pages.
        """
        if self._pool is not None:
            self._pool.free(node.pages)
        (_, node.pages), *node.twins = node.twins
        node.num_twins -= 1
        node.heap_serial = 0
        return len(node.pages)
