"""Storage for KV pages outside the instances (SGLang's HiCache, L3).

Storage names a page by a hash of all tokens up to its end, so instances share pages of equal prompts. Pages form a
tree, of which only leaves are evicted, least recently used first. So storage that has a page also has all pages before
it. Law: tests/laws/test_storage.py.
"""

from pdsim.core.memory.radix_cache import RadixCache
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence


class PageStore:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self._page_size = page_size
        self._tree = RadixCache(None, page_size, LeastRecentlyUsed())

    @property
    def num_used(self) -> int:
        return self._tree.num_evictable_pages

    def num_found(self, sequence: TokenSequence, start_tokens: int) -> int:
        """Number of consecutive pages that storage has after the first start_tokens of a sequence. The call counts as
        an access.
        """
        node, _ = self._tree.match(sequence, len(sequence))
        self._tree.unlock(node)
        return max(0, node.stop - start_tokens) // self._page_size

    def num_missing(self, sequence: TokenSequence, start_tokens: int, stop_tokens: int) -> int:
        """Number of pages of the tokens [start_tokens, stop_tokens) that storage lacks. Returns 0 if storage already
        lacks a page before start_tokens, because the range then cannot continue stored pages.
        """
        end = min(self._tree.peek(sequence), stop_tokens)
        return 0 if end < start_tokens else (stop_tokens - end) // self._page_size

    def write(self, sequence: TokenSequence, start_tokens: int, stop_tokens: int) -> int:
        """Stores those pages of the tokens [start_tokens, stop_tokens) that storage lacks, if there is room for all of
        them. Returns the number of pages that were stored.
        """
        num_pages = self.num_missing(sequence, start_tokens, stop_tokens)
        if not num_pages:
            return 0
        end, _ = self._tree.lock_path(sequence, stop_tokens - num_pages * self._page_size)
        num_free = self.num_pages - end.stop // self._page_size - self._tree.num_evictable_pages
        if num_pages > num_free:
            num_free += self._tree.evict(num_pages - num_free)
        if num_pages <= num_free:
            node, _ = self._tree.insert(sequence, stop_tokens, range(num_pages), end)
            self._tree.touch(node)
        self._tree.unlock(end)
        return num_pages if num_pages <= num_free else 0
