"""Means and percentiles of single values, and of the durations of many decode steps.

Percentiles are interpolated linearly between sorted values, as numpy does by default.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import floor, inf, sqrt
from operator import itemgetter


class Samples:
    """Count, mean, standard deviation and percentiles of values that are given one by one."""

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


Run = tuple[float, float, int, int]
"""A series of values in short form: (first, growth, length, weight). The series has `length` values, each larger than
the one before by `growth`. Each value counts `weight` times.
"""


class RunSamples:
    """Exact statistics of many values that are given as arithmetic progressions (Run), without listing all values.
    Progressions must not decrease.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = sorted(runs, key=itemgetter(0))
        self._firsts: list[float] = []
        self._up_to_first: list[int] = []
        self._longest = 0.0
        self.count = 0
        amounts: list[float] = []
        ends: dict[float, int] = {}
        for first, growth, length, weight in self._runs:
            span = growth * (length - 1)
            num = length * weight
            self._longest = max(self._longest, span)
            self.count += num
            self._firsts.append(first)
            self._up_to_first.append(self.count)
            amounts.append(num * (first + span * 0.5))
            last = first + span
            ends[last] = ends.get(last, 0) + num
        self._total = sum(amounts)
        self._lasts = sorted(ends)
        self._up_to_last = list(accumulate([ends[last] for last in self._lasts]))

    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def std(self) -> float:
        """Standard deviation of the values as a whole population."""
        if not self.count:
            return 0.0
        mean = self.mean()
        total = 0.0
        for first, growth, n, weight in self._runs:
            start = first - mean
            squares = n * start * start + start * growth * n * (n - 1) + growth * growth * n * (n - 1) * (2 * n - 1) / 6
            total += weight * squares
        return sqrt(max(0.0, total) / self.count)

    def percentile(self, percent: float) -> float:
        return interpolated(percent, self.count, self._value_at) if self.count else 0.0

    def max(self) -> float:
        return self._value_at(self.count - 1) if self.count else 0.0

    def _value_at(self, rank: int) -> float:
        """The value at position `rank`, from 0, in the sorted list of all values. Lists the values of only those
        progressions that can contain the position.
        """
        low = self._firsts[bisect_right(self._up_to_first, rank)]
        high = self._lasts[bisect_right(self._up_to_last, rank)]
        num_below = bisect_left(self._lasts, low)
        below = self._up_to_last[num_below - 1] if num_below else 0
        reach = slice(bisect_left(self._firsts, low - self._longest), bisect_right(self._firsts, high))
        near = [
            (first + growth * i, weight)
            for first, growth, length, weight in self._runs[reach]
            if first + growth * (length - 1) >= low
            for i in range(length)
        ]
        for value, weight in sorted(near):
            below += weight
            if below > rank:
                return value
        raise AssertionError(f"rank {rank} of {self.count}")


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
