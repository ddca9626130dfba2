"""Remembers which prompts a router sent to each instance of one role. Routing policies estimate cached tokens from this
memory.
"""

from collections.abc import Collection, Hashable, Iterable

from pdsim.core.memory.radix_cache import Node, RadixCache
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.views import TokenSequence

PAGE_SIZE = 64
"""Default page size in tokens of remembered prompts. With a policy that has `is_kv_aware = True`, the instances' page
size is used instead."""
_NOBODY: frozenset[str] = frozenset()


class PromptMemory:
    """The prompts that a router sent to one instance.

    The memory forgets the least recently sent prompts first. A prompt that has more whole pages than the memory, or
    none, is not remembered.
    """

    def __init__(self, num_tokens: int, page_size: int = PAGE_SIZE) -> None:
        self._page_size = page_size
        self._num_pages = num_tokens // page_size
        self._prefixes = RadixCache(None, page_size, LeastRecentlyUsed())
        self._prefixes.uses_whole_nodes = False

    def takes(self, prompt: TokenSequence) -> bool:
        """True if the prompt has at least one whole page, and this memory can hold all its whole pages."""
        return 0 < len(prompt) // self._page_size <= self._num_pages

    def num_tokens(self, prompt: TokenSequence) -> int:
        """Number of the prompt's first tokens that remembered prompts have, too, in whole pages."""
        return self._prefixes.peek(prompt)

    def add(self, prompt: TokenSequence) -> list[Hashable]:
        """Adds a prompt, and forgets others if room is needed. Returns the keys of the beginnings (the first page of a
        prompt) that no remembered prompt has any more.
        """
        forgotten: list[Hashable] = []
        if not self.takes(prompt):
            return forgotten
        num_pages, prefixes = len(prompt) // self._page_size, self._prefixes

        def leaving(node: Node) -> None:
            if node.parent is prefixes.root:
                forgotten.append(node.key)

        end, _ = prefixes.insert(prompt, num_pages * self._page_size, range(num_pages), prefixes.root)
        prefixes.touch(end)
        if (num_excess := prefixes.num_evictable_pages - self._num_pages) > 0:
            prefixes.evict(num_excess, leaving)
        return forgotten


class PromptMemories:
    """For each instance, the prompts that it has got (PromptMemory), and an index of the instances by the first page of
    these prompts.
    """

    def __init__(self, instance_ids: Iterable[str], num_tokens: int, page_size: int = PAGE_SIZE) -> None:
        """num_tokens: maximum number of tokens that are remembered for each instance. page_size: number of tokens of a
        page. Prompts are remembered and compared in whole pages.
        """
        self._num_tokens, self._page_size = num_tokens, page_size
        self._memories = {instance_id: PromptMemory(num_tokens, page_size) for instance_id in instance_ids}
        self._holders: dict[Hashable, set[str]] = {}
        """Instances by first page. The sets are never iterated, because their order differs between processes."""

    def num_tokens(self, prompt: TokenSequence, instance_id: str) -> int:
        return self._memories[instance_id].num_tokens(prompt)

    def holders(self, prompt: TokenSequence) -> Collection[str]:
        """Instances with a remembered prompt that has the same first page. Empty if the prompt has no whole page."""
        page = self._page_size
        return self._holders.get(prompt.page_key(0, page), _NOBODY) if len(prompt) >= page else _NOBODY

    def add(self, prompt: TokenSequence, instance_id: str) -> None:
        memory = self._memories[instance_id]
        if memory.takes(prompt):
            self._holders.setdefault(prompt.page_key(0, self._page_size), set()).add(instance_id)
        for first_page in memory.add(prompt):
            self._leave(first_page, instance_id)

    def forget(self, instance_id: str) -> None:
        """Forgets all prompts that were sent to an instance, because its cache is empty."""
        self._memories[instance_id] = PromptMemory(self._num_tokens, self._page_size)
        for first_page in [page for page, holders in self._holders.items() if instance_id in holders]:
            self._leave(first_page, instance_id)

    def _leave(self, first_page: Hashable, instance_id: str) -> None:
        holders = self._holders[first_page]
        holders.discard(instance_id)
        if not holders:
            del self._holders[first_page]
