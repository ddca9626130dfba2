"""Built-in eviction policies: which unused leaf of the prefix cache goes first."""

from dataclasses import dataclass

from pdsim.policy.views import CachedLeaf


@dataclass
class LeastRecentlyUsed:
    """The least recently used."""

    def key(self, leaf: CachedLeaf) -> int:
        return leaf.last_access


@dataclass
class LeastFrequentlyUsed:
    """The one that fewest ended requests used; of these the least recently used."""

    def key(self, leaf: CachedLeaf) -> tuple[int, int]:
        return (leaf.num_hits, leaf.last_access)


@dataclass
class FirstInFirstOut:
    """The one that was inserted first."""

    def key(self, leaf: CachedLeaf) -> int:
        return leaf.born
