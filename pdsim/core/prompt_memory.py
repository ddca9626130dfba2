"""What a router remembers of the prompts that it sent to one instance: about what that instance has cached."""

from collections.abc import Sequence

from pdsim.core.radix_cache import RadixCache
from pdsim.policy.eviction import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

_PAGE_SIZE = 64
"""Tokens: how finely prompts are remembered."""


class _CountedPages:
    """Pages that hold nothing: they are counted, and not told apart."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages

    def allocate(self, num_pages: int) -> Sequence[int]:
        self.num_free -= num_pages
        return range(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        self.num_free += len(pages)


class PromptMemory:
    """The least recently sent is forgotten first. A prompt that is larger than the memory is not remembered."""

    def __init__(self, num_tokens: int) -> None:
        self._pool = _CountedPages(num_tokens // _PAGE_SIZE)
        self._prefixes = RadixCache(self._pool, _PAGE_SIZE, LeastRecentlyUsed())

    def num_tokens(self, prompt: TokenSequence) -> int:
        """How much of it was sent before."""
        return self._prefixes.peek(prompt)

    def add(self, prompt: TokenSequence) -> None:
        num_pages = len(prompt) // _PAGE_SIZE
        if num_pages > self._pool.num_pages:
            return
        known, pages = self._prefixes.match(prompt, len(prompt))
        num_new = num_pages - len(pages)
        if num_new > self._pool.num_free:
            self._prefixes.evict(num_new - self._pool.num_free)
        end, _ = self._prefixes.insert(prompt, num_pages * _PAGE_SIZE, self._pool.allocate(num_new), known)
        self._prefixes.touch(end, num_hits=1)
        self._prefixes.unlock(known)
