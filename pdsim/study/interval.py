"""Means over replications, with 95 % confidence intervals by Student's t-distribution."""

from collections.abc import Sequence
from functools import cache
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

_CONFIDENCE = 0.95


class Estimate(NamedTuple):
    mean: float
    half_width: float | None
    """The true mean lies so far from it at most, with 95 % confidence; None: one replication says nothing of that."""


def estimate(values: Sequence[float]) -> Estimate:
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None)
    return Estimate(mean, quantile(len(values) - 1) * stdev(values) / sqrt(len(values)))


@cache
def quantile(degrees: int) -> float:
    """Within so many standard errors of 0 lies 95 % of a t-distribution."""
    low, high = 0.0, 100.0
    while high - low > 1e-9:  # noqa: PLR2004
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < _CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability of [-t, t]: the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = atan(t / sqrt(degrees))
    is_odd = degrees % 2
    term = cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (k - 1) / k
    return (angle + sin(angle) * total) * 2 / pi if is_odd else sin(angle) * total
