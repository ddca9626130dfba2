"""Whether simulated values order configurations as measured ones do, and how far distributions are apart.

Kendall's tau needs scipy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

CLEARLY = 0.05
"""Measured values that are less than this share apart have no winner."""


@dataclass(frozen=True)
class Ranking:
    """Of one metric over all configurations."""

    tau: float | None
    """Kendall's; None for fewer than two configurations, or where one side has all values equal."""
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
    return Ranking(_kendall_tau(list(measured.values()), [simulated[name] for name in measured]), len(pairs), num_right)


def ks_distance(measured: Sequence[float], simulated: Sequence[float]) -> float:
    """Kolmogorov-Smirnov: the largest distance between the two distribution functions; 1 if one side has no samples."""
    if not measured or not simulated:
        return float(bool(measured) != bool(simulated))
    values = np.concatenate([measured, simulated])
    ours, theirs = (np.searchsorted(np.sort(side), values, "right") / len(side) for side in (measured, simulated))
    return float(np.abs(ours - theirs).max())


def _kendall_tau(measured: Sequence[float], simulated: Sequence[float]) -> float | None:
    from scipy.stats import kendalltau  # noqa: PLC0415  an extra

    if len(set(measured)) < 2 or len(set(simulated)) < 2:  # noqa: PLR2004
        return None
    return float(kendalltau(measured, simulated).statistic)
