"""Stores spans of time, and computes how much time of a period they cover."""

import numpy as np

from pdsim.metrics.columns import Array

_NONE = np.zeros(0, dtype=np.int64)


class TimeSpans:
    """Spans of time that do not overlap. Given spans that overlap are merged. Begins and ends are in ns."""

    def __init__(self, starts_ns: Array = _NONE, ends_ns: Array = _NONE) -> None:
        order = np.argsort(starts_ns, kind="stable")
        starts_ns, reached_ns = starts_ns[order], np.maximum.accumulate(ends_ns[order])
        is_first = np.ones(len(starts_ns), dtype=bool)
        is_first[1:] = starts_ns[1:] > reached_ns[:-1]
        self.starts_ns = starts_ns[is_first]
        self.ends_ns = reached_ns[np.roll(is_first, -1)]
        self._before_ns = np.concatenate(([0], np.cumsum(self.ends_ns - self.starts_ns)))

    def within(self, begin_ns: Array, end_ns: Array) -> Array:
        """For each period from begin_ns to end_ns: the time in ns that lies in the spans."""
        return self._until(end_ns) - self._until(begin_ns)

    def between(self, begin_ns: int, end_ns: int) -> int:
        """How much of the period from begin_ns to end_ns lies in the spans, in ns."""
        return int(self.within(np.array(begin_ns), np.array(end_ns)))

    def united(self, other: "TimeSpans") -> "TimeSpans":
        """The union of these spans and the other spans."""
        starts_ns, ends_ns = (self.starts_ns, other.starts_ns), (self.ends_ns, other.ends_ns)
        return TimeSpans(np.concatenate(starts_ns), np.concatenate(ends_ns))

    def _until(self, moments_ns: Array) -> Array:
        if not len(self.starts_ns):
            return np.zeros_like(moments_ns)
        last = np.searchsorted(self.starts_ns, moments_ns, side="right") - 1
        inside = np.minimum(moments_ns, self.ends_ns[last]) - self.starts_ns[last]
        return np.where(last < 0, 0, self._before_ns[last] + inside)
