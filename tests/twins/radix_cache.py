"""A prefix cache that scans a list of cached sequences. tests/laws/test_radix_cache.py compares pdsim with this
module.
"""

from dataclasses import dataclass, replace

from pdsim.policy.protocols import EvictionPolicy


@dataclass
class Prefix:
    """A cached sequence from its first token on, in whole pages, with the ids of these pages."""

    tokens: list[int]
    pages: list[int]
    last_access: int
    born: int
    num_hits: int = 0

    @property
    def num_pages(self) -> int:
        return len(self.pages)


def begins(short: list[int], long: list[int]) -> bool:
    return long[: len(short)] == short


class NaivePrefixCache:
    """The cache. To evict a sequence frees its pages behind the longest other cached sequence with which it begins. In
    a tree, the node would begin there.
    """

    def __init__(
        self, page_size: int, eviction: EvictionPolicy, *, uses_whole_nodes: bool = True, evicts_pages: bool = False
    ) -> None:
        """uses_whole_nodes: True: a match that ends within a cached sequence counts as an access of the whole sequence.

        evicts_pages: True: eviction frees only the last page of a sequence.
        """
        self.uses_whole_nodes = uses_whole_nodes
        self.evicts_pages = evicts_pages
        self.page_size = page_size
        self.eviction = eviction
        self.prefixes: list[Prefix] = []
        self.num_accesses = 0

    def find(self, tokens: list[int]) -> list[int]:
        """Returns the pages of the longest cached prefix of the tokens."""
        for length in reversed(range(0, len(tokens) + 1, self.page_size)):
            for prefix in self.prefixes:
                if prefix.tokens[:length] == tokens[:length]:
                    return prefix.pages[: length // self.page_size]
        return []

    def match(self, tokens: list[int]) -> list[int]:
        """Returns the pages of the longest cached prefix, which is a cached sequence of its own from now on."""
        pages = self.find(tokens)
        nearest = self.split(tokens[: len(pages) * self.page_size])
        if nearest is not None and self.uses_whole_nodes:
            nearest.last_access = self.num_accesses + 1
        return pages

    def split(self, tokens: list[int]) -> Prefix | None:
        """Makes cached tokens a cached sequence of their own. Returns the shortest sequence that begins with them.
        None: the tokens were a sequence of their own before.
        """
        longer = [prefix for prefix in self.prefixes if begins(tokens, prefix.tokens)]
        if not tokens or any(prefix.tokens == tokens for prefix in longer):
            return None
        nearest = min(longer, key=lambda prefix: len(prefix.tokens))
        self.prefixes.append(replace(nearest, tokens=tokens, pages=nearest.pages[: len(tokens) // self.page_size]))
        return nearest

    def insert(self, tokens: list[int], pages: list[int]) -> list[int]:
        """Caches tokens in whole pages. Returns the pages that hold the tokens now: first pages that were cached
        before, then the caller's.
        """
        known = self.match(tokens)
        pages = known + pages[len(known) :]
        if len(pages) > len(known):
            self.prefixes.append(Prefix(tokens, pages, self.num_accesses + 1, self.num_accesses + 1))
        return pages

    def touch(self, tokens: list[int], hits_behind: int | None = None) -> None:
        """Notes an access of all cached sequences with which the tokens begin. hits_behind: sequences of more tokens
        than this also count a hit; None: none do.
        """
        self.num_accesses += 2
        for prefix in self.prefixes:
            if begins(prefix.tokens, tokens):
                prefix.last_access = self.num_accesses
                prefix.num_hits += hits_behind is not None and len(prefix.tokens) > hits_behind

    def evict(self, locked: list[list[int]]) -> list[int]:
        """Evicts the first sequence in the policy's order, among those with which no other sequence and no locked
        sequence begins. Returns the freed pages.
        """
        others = [*locked, *(prefix.tokens for prefix in self.prefixes)]
        leaves = [prefix for prefix in self.prefixes if sum(begins(prefix.tokens, other) for other in others) == 1]
        leaf = min(leaves, key=self.eviction.key)
        self.prefixes.remove(leaf)
        num_others = max((p.num_pages for p in self.prefixes if begins(p.tokens, leaf.tokens)), default=0)
        if self.evicts_pages and leaf.num_pages > num_others + 1:
            shorter = leaf.tokens[: -self.page_size]
            self.prefixes.append(replace(leaf, tokens=shorter, pages=leaf.pages[:-1]))
            return leaf.pages[-1:]
        return leaf.pages[num_others:]
