"""Whether simulated values order configurations as measured ones do."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

CLEARLY = 0.05
"""Measured values that are less than this share apart have no winner."""


@dataclass(frozen=True)
class Ranking:
    """Of one metric over all configurations."""

    num_pairs: int
    """That differ clearly, as measured."""
    num_right: int
    """Of these, where the simulation has the same order."""

    @property
    def share(self) -> float | None:
        return self.num_right / self.num_pairs if self.num_pairs else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def rank(measured: Mapping[str, float], simulated: Mapping[str, float]) -> Ranking:
    """Both by configuration."""
    pairs = [
        (measured[a] - measured[b], simulated[a] - simulated[b])
        for a, b in combinations(measured, 2)
        if abs(measured[a] - measured[b]) > CLEARLY * min(measured[a], measured[b])
    ]
    num_right = sum(ours * theirs > 0 for ours, theirs in pairs)
    return Ranking(len(pairs), num_right)
