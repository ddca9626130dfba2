"""What a router remembers of the prompts that it sent to one instance: about what that instance has cached."""

from collections.abc import Sequence

from pdsim.core.radix_cache import RadixCache
from pdsim.policy.eviction import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

_PAGE_SIZE = 64
"""Tokens: how finely prompts are remembered."""


class PromptMemory:
    """The least recently sent is forgotten first. A prompt that is larger than the memory is not remembered.

    Its pages hold nothing: they are counted, and not told apart.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_pages = self._num_free = num_tokens // _PAGE_SIZE
        self._prefixes = RadixCache(self, _PAGE_SIZE, LeastRecentlyUsed())

    def num_tokens(self, prompt: TokenSequence) -> int:
        """How much of it was sent before."""
        return self._prefixes.peek(prompt)

    def add(self, prompt: TokenSequence) -> None:
        num_pages = len(prompt) // _PAGE_SIZE
        if num_pages > self._num_pages:
            return
        prefixes = self._prefixes
        end, known = prefixes.insert(prompt, num_pages * _PAGE_SIZE, range(num_pages), prefixes.root)
        prefixes.touch(end)
        self._num_free -= num_pages - len(known)
        if self._num_free < 0:
            prefixes.evict(-self._num_free)

    def free(self, pages: Sequence[int]) -> None:
        """Of a prefix that is forgotten."""
        self._num_free += len(pages)
