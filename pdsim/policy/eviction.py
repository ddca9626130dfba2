"""Built-in eviction policies: which unused leaf of the prefix cache goes first."""

from dataclasses import dataclass

from pdsim.policy.views import CachedLeaf


@dataclass
class LeastRecentlyUsed:
    def key(self, leaf: CachedLeaf) -> int:
        return leaf.last_access


@dataclass
class LeastFrequentlyUsed:
    """Fewest hits; of these the least recently used."""

    def key(self, leaf: CachedLeaf) -> tuple[int, int]:
        return (leaf.num_hits, leaf.last_access)


@dataclass
class FirstInFirstOut:
    def key(self, leaf: CachedLeaf) -> int:
        return leaf.born
