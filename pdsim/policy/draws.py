"""Random numbers for policies, equal in every replay."""

from collections.abc import Sequence
from typing import TypeVar

from pdsim.dataclass import dataclass

_MASK = (1 << 64) - 1

ItemT = TypeVar("ItemT")


@dataclass
class Draws:
    """Random numbers that are equal in every replay: splitmix64 (Steele, Lea and Flood 2014) over a counter."""

    count: int = 0
    """Number of random numbers that were drawn so far."""

    def below(self, n: int, seed: int) -> int:
        """Returns the next random integer in [0, n). seed: the policy's seed, equal in all calls."""
        self.count += 1
        z = (seed * 0xD1342543DE82EF95 + self.count * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) * n) >> 64

    def one_of(self, items: Sequence[ItemT], seed: int) -> ItemT:
        """Returns one of the items, each with equal probability. If there is only one item, uses no random number."""
        return items[self.below(len(items), seed)] if len(items) > 1 else items[0]
