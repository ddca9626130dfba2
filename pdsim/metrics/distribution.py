"""Means and percentiles, of plain samples and of the durations of many decode steps.

Percentiles interpolate linearly between order statistics, as numpy's do by default.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import floor, sqrt
from operator import add


class Samples:
    """Single values."""

    def __init__(self, values: Iterable[float]) -> None:
        self._sorted = sorted(values)

    @property
    def count(self) -> int:
        return len(self._sorted)

    def mean(self) -> float:
        return sum(self._sorted) / len(self._sorted) if self._sorted else 0.0

    def std(self) -> float:
        """Of the population, as numpy's."""
        mean = self.mean()
        return sqrt(sum((v - mean) ** 2 for v in self._sorted) / len(self._sorted)) if self._sorted else 0.0

    def percentile(self, percent: float) -> float:
        return _interpolate(percent, len(self._sorted), self._sorted.__getitem__) if self._sorted else 0.0


Run = tuple[float, float, int, int]
"""(first, growth, length, weight): weight copies each of the values first, first + growth, ... : length of them."""


class RunSamples:
    """Values given as arithmetic progressions that do not fall: exact, without writing them all out."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = sorted(runs)
        counts = [length * weight for _, _, length, weight in self._runs]
        spans = [growth * (length - 1) for _, growth, length, _ in self._runs]
        self._firsts = [first for first, _, _, _ in self._runs]
        self._up_to_first = list(accumulate(counts))
        ends = sorted(zip(map(add, self._firsts, spans), counts, strict=True))
        self._lasts = [last for last, _ in ends]
        self._up_to_last = list(accumulate(count for _, count in ends))
        self._longest = max(spans, default=0.0)
        self.count = sum(counts)
        self._total = sum(n * (first + span / 2) for n, first, span in zip(counts, self._firsts, spans, strict=True))

    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def std(self) -> float:
        """Of the population."""
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
        return _interpolate(percent, self.count, self._value_at) if self.count else 0.0

    def max(self) -> float:
        return self._lasts[-1] if self._lasts else 0.0

    def _value_at(self, rank: int) -> float:
        """The value of this rank lies between the firsts and the lasts of that rank: write out only what lies there."""
        low = self._firsts[bisect_right(self._up_to_first, rank)]
        high = self._lasts[bisect_right(self._up_to_last, rank)]
        num_below = bisect_left(self._lasts, low)
        below = self._up_to_last[num_below - 1] if num_below else 0
        reach = slice(bisect_left(self._firsts, low - self._longest), bisect_right(self._firsts, high))
        near = sorted(
            (first + growth * i, weight)
            for first, growth, length, weight in self._runs[reach]
            if first + growth * (length - 1) >= low
            for i in range(length)
        )
        for value, weight in near:
            below += weight
            if below > rank:
                return value
        raise AssertionError(f"rank {rank} of {self.count}")


def _interpolate(percent: float, count: int, value_at: Callable[[int], float]) -> float:
    position = (count - 1) * percent / 100
    rank = floor(position)
    low = value_at(rank)
    if rank == position:
        return float(low)
    return float(low + (value_at(rank + 1) - low) * (position - rank))
