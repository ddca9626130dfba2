"""Means and percentiles of single values, and of the durations of many decode steps.

Percentiles are interpolated linearly between sorted values, as numpy does by default.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, repeat
from math import floor, inf, sqrt
from operator import add, mul
from typing import TypeVar


class Samples:
    """Count, mean, standard deviation and percentiles of single values."""

    def __init__(self, values: Iterable[float]) -> None:
        self._sorted = array("d", sorted(values))

    @property
    def count(self) -> int:
        return len(self._sorted)

    def mean(self) -> float:
        return sum(self._sorted) / len(self._sorted) if self._sorted else 0.0

    def std(self) -> float:
        """Standard deviation of the values as a whole population, as numpy computes it."""
        mean = self.mean()
        return sqrt(sum((v - mean) ** 2 for v in self._sorted) / len(self._sorted)) if self._sorted else 0.0

    def percentile(self, percent: float) -> float:
        return interpolated(percent, len(self._sorted), self._sorted.__getitem__) if self._sorted else 0.0


Number = TypeVar("Number", int, float)

Run = tuple[float, float, int, int]
"""(first, growth, length, weight): the `length` values first, first + growth, first + 2 growth, ..., each of which
counts `weight` times.
"""


class RunSamples:
    """Exact statistics of many values that are given as arithmetic progressions (Run), without listing the values.
    Progressions must not decrease.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        firsts, growths, lengths, weights = array("d"), array("d"), array("q"), array("q")
        add_first, add_growth, add_length, add_weight = firsts.append, growths.append, lengths.append, weights.append
        for first, growth, length, weight in runs:
            add_first(first)
            add_growth(growth)
            add_length(length)
            add_weight(weight)
        order = _order(firsts)
        self._firsts, self._growths = _arranged(firsts, order), _arranged(growths, order)
        self._lengths, self._weights = _arranged(lengths, order), _arranged(weights, order)
        counts = array("q", map(mul, self._lengths, self._weights))
        spans = array("d", map(mul, self._growths, map(add, self._lengths, repeat(-1))))
        lasts = array("d", map(add, self._firsts, spans))
        self._up_to_first = array("q", accumulate(counts))
        self._longest = max(spans, default=0.0)
        self.count = self._up_to_first[-1] if counts else 0
        middles = map(add, self._firsts, map(mul, spans, repeat(0.5)))
        self._total = sum(map(mul, counts, middles))
        order = _order(lasts)
        self._lasts = _arranged(lasts, order)
        self._up_to_last = array("q", accumulate(_arranged(counts, order)))

    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def std(self) -> float:
        """Standard deviation of the values as a whole population."""
        if not self.count:
            return 0.0
        mean = self.mean()
        total = 0.0
        for first, growth, n, weight in self._runs(0, len(self._firsts)):
            start = first - mean
            squares = n * start * start + start * growth * n * (n - 1) + growth * growth * n * (n - 1) * (2 * n - 1) / 6
            total += weight * squares
        return sqrt(max(0.0, total) / self.count)

    def percentile(self, percent: float) -> float:
        return interpolated(percent, self.count, self._value_at) if self.count else 0.0

    def max(self) -> float:
        return self._value_at(self.count - 1) if self.count else 0.0

    def _value_at(self, rank: int) -> float:
        """The value at position `rank`, from 0, if the values of all progressions were sorted. Lists the values of
        those progressions only that can contain this position.
        """
        low = self._firsts[bisect_right(self._up_to_first, rank)]
        high = self._lasts[bisect_right(self._up_to_last, rank)]
        num_below = bisect_left(self._lasts, low)
        below = self._up_to_last[num_below - 1] if num_below else 0
        reach = self._runs(bisect_left(self._firsts, low - self._longest), bisect_right(self._firsts, high))
        near = [
            (first + growth * i, weight)
            for first, growth, length, weight in reach
            if first + growth * (length - 1) >= low
            for i in range(length)
        ]
        for value, weight in sorted(near):
            below += weight
            if below > rank:
                return value
        raise AssertionError(f"rank {rank} of {self.count}")

    def _runs(self, start: int, stop: int) -> Iterator[Run]:
        reach = slice(start, stop)
        return zip(self._firsts[reach], self._growths[reach], self._lengths[reach], self._weights[reach], strict=True)


def _order(values: "array[float]") -> list[int]:
    return sorted(range(len(values)), key=values.tolist().__getitem__)


def _arranged(values: "array[Number]", order: list[int]) -> "array[Number]":
    return array(values.typecode, list(map(values.tolist().__getitem__, order)))


def interpolated(percent: float, count: int, value_at: Callable[[int], float]) -> float:
    """The percentile of sorted values, by linear interpolation. Infinite if a value next to the percentile's position
    is infinite. percent: from 0 to 100. count: number of values.

    value_at: gives the value at a position from 0.
    """
    position = (count - 1) * percent / 100
    rank = floor(position)
    low = value_at(rank)
    if rank == position or low == inf:
        return float(low)
    return float(low + (value_at(rank + 1) - low) * (position - rank))
