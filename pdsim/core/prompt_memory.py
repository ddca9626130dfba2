"""A router's memory of the prompts that it sent to one instance: an estimate of what that instance has cached."""

from pdsim.core.radix_cache import RadixCache
from pdsim.policy.eviction import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

_PAGE_SIZE = 64
"""Tokens: the grain in which prompts are remembered."""


class PromptMemory:
    """Forgets the least recently sent first. A prompt that is larger than the memory is not remembered."""

    def __init__(self, num_tokens: int) -> None:
        self._num_pages = num_tokens // _PAGE_SIZE
        self._prefixes = RadixCache(None, _PAGE_SIZE, LeastRecentlyUsed())
        self._prefixes.uses_whole_nodes = False

    def num_tokens(self, prompt: TokenSequence) -> int:
        """Prompt tokens that were sent before."""
        return self._prefixes.peek(prompt)

    def add(self, prompt: TokenSequence) -> None:
        num_pages = len(prompt) // _PAGE_SIZE
        if num_pages <= self._num_pages:
            prefixes = self._prefixes
            end, _ = prefixes.insert(prompt, num_pages * _PAGE_SIZE, range(num_pages), prefixes.root)
            prefixes.touch(end)
            if (num_excess := prefixes.num_evictable_pages - self._num_pages) > 0:
                prefixes.evict(num_excess)
