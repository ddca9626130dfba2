"""How much a GPU slows that prefills without pause: what clock rows say of pdsim/cost/affine.py."""

from dataclasses import dataclass, replace

import numpy as np

from pdsim.calibration.fit.rows import Floats, Measurements, Rows

_MEMORY_NS = 1e8
"""Where the search begins, and what is told of a GPU that does not slow."""
_MEMORY_BOUNDS_NS = (1e7, 1e9)
_MOST_SLOWDOWN = 1.0
_SOFT = 0.02
"""Relative error from which on a residual counts by its size."""
_ITERATIONS = 8
"""Each leaves the product of slowdown and utilisation of an error."""


@dataclass(frozen=True)
class Clock:
    slowdown: float
    """At full utilisation."""
    memory_ns: float
    """Time constant of the average utilisation."""

    def rested(self, rows: Rows) -> Rows:
        """Prefill forwards, each of a GPU that had rested before, without what they slow themselves."""
        times_ns = rows.columns["time_ns"]
        rested_ns = times_ns
        for _ in range(_ITERATIONS):
            rested_ns = times_ns / _stretch(rested_ns, np.zeros_like(times_ns), self.slowdown, self.memory_ns)
        return replace(rows, columns={**rows.columns, "time_ns": rested_ns})


def clock_of(measurements: Measurements) -> Clock | None:
    """None without clock rows."""
    return next(map(_fitted, measurements.of("clock")), None)


def _fitted(rows: Rows) -> Clock:
    """Forwards are known by their tokens: those of one size take the same time on a GPU that has rested."""
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    times_ns, busy_ns = rows.columns["time_ns"], 1e3 * rows.columns["busy_us"]
    sizes, of_size = np.unique(rows.columns["new_tokens"], return_inverse=True)
    shortest_ns = np.array([times_ns[of_size == size].min() for size in range(len(sizes))])

    def errors(units: Floats) -> Floats:
        rested_ns = (units[2:] * shortest_ns)[of_size]
        slowed_ns = rested_ns * _stretch(rested_ns, busy_ns, units[0], units[1] * _MEMORY_NS)
        return np.asarray(slowed_ns / times_ns - 1)

    ones = np.ones(len(sizes))
    low, high = (bound / _MEMORY_NS for bound in _MEMORY_BOUNDS_NS)
    bounds = ([0, low, *0.5 * ones], [_MOST_SLOWDOWN, high, *1.5 * ones])
    found = least_squares(errors, [0.1, 1, *ones], bounds=bounds, loss="soft_l1", f_scale=_SOFT)
    return Clock(float(found.x[0]), float(found.x[1]) * _MEMORY_NS)


def _stretch(rested_ns: Floats, busy_ns: Floats, slowdown: float, memory_ns: float) -> Floats:
    """As GpuClock has it, of forwards that begin when the GPU has been busy for so long after a pause."""
    idle_at_start = np.exp(-busy_ns / memory_ns)
    x = rested_ns / memory_ns
    return np.asarray(1 + slowdown * (1 - idle_at_start * -np.expm1(-x) / x))
