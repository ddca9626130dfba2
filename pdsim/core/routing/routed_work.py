"""Counts the load of each instance from its unfinished requests: uncached tokens of prompts that are not computed yet,
and distinct whole pages of all prompts.
"""

from collections.abc import Iterable

from pdsim.core.memory.radix_cache import Node, RadixCache
from pdsim.dataclass import dataclass
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence


class ActivePages:
    """Whole pages of all unfinished prompts of one instance. A page that several prompts share counts once."""

    def __init__(self, page_size: int) -> None:
        self.num_pages = 0
        self._prefixes = RadixCache(None, page_size, LeastRecentlyUsed())

    def num_shared(self, prompt: TokenSequence) -> int:
        """Number of a prompt's first pages that other unfinished prompts of the instance also have."""
        return self._prefixes.peek(prompt) // self._prefixes.page_size

    def add(self, prompt: TokenSequence) -> Node:
        """Counts the prompt's pages as active. Returns a handle, which the caller gives to `remove` when the request
        ends.
        """
        num_pages, prefixes = len(prompt) // self._prefixes.page_size, self._prefixes
        end, found = prefixes.insert(prompt, num_pages * prefixes.page_size, range(num_pages), prefixes.root)
        prefixes.lock(end)
        self.num_pages += num_pages - len(found)
        return end

    def remove(self, node: Node) -> None:
        self._prefixes.unlock(node)
        self.num_pages -= self._prefixes.evict(self._prefixes.num_evictable_pages)


@dataclass(slots=True)
class _Work:
    """An unfinished request, its instance and its uncached prompt tokens. end: node of ActivePages at which the prompt
    ends; the prompt is removed from there.
    """

    instance_id: str
    num_uncached_tokens: int
    """Number of prompt tokens to compute; 0 as soon as the prompt is computed."""
    end: Node


class RoutedWork:
    """The routed and unfinished requests of one role."""

    def __init__(self, instance_ids: Iterable[str], page_size: int) -> None:
        ids = list(instance_ids)
        self._pages = {instance_id: ActivePages(page_size) for instance_id in ids}
        self._num_uncached_tokens = dict.fromkeys(ids, 0)
        self._requests: dict[int, _Work] = {}

    def num_uncached_tokens(self, instance_id: str) -> int:
        """Number of uncached tokens of the instance's prompts that are not computed yet. The tokens of a prompt count
        until the whole prompt is computed.
        """
        return self._num_uncached_tokens[instance_id]

    def num_pages_with(self, prompt: TokenSequence, num_pages: int, instance_id: str) -> int:
        """Number of distinct whole pages that the instance's unfinished prompts have if this prompt joins them.
        num_pages: whole pages of this prompt.
        """
        active = self._pages[instance_id]
        return active.num_pages + num_pages - active.num_shared(prompt)

    def add(self, request_id: int, prompt: TokenSequence, instance_id: str, num_cached_tokens: int) -> None:
        num_uncached = len(prompt) - num_cached_tokens
        self._num_uncached_tokens[instance_id] += num_uncached
        self._requests[request_id] = _Work(instance_id, num_uncached, self._pages[instance_id].add(prompt))

    def on_computed(self, request_id: int) -> None:
        work = self._requests[request_id]
        self._num_uncached_tokens[work.instance_id] -= work.num_uncached_tokens
        work.num_uncached_tokens = 0

    def remove(self, request_id: int) -> None:
        self.on_computed(request_id)
        work = self._requests.pop(request_id)
        self._pages[work.instance_id].remove(work.end)
