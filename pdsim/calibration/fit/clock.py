"""Fits how much a busy GPU slows down: to rows that measure this, or to the log of a server's forwards."""

from dataclasses import replace
from math import exp, expm1

import numpy as np

from pdsim.calibration.fit.regression import LEAST_GAIN, STRETCH, misfit, prefill_table
from pdsim.calibration.fit.rows import Floats, Measurements, Rows, is_log
from pdsim.dataclass import dataclass

_MEMORY_NS = 1e8
"""GpuSlowdown.memory_ns, in ns, of every slowdown fitted to a log. Fits to `clock` rows start with this value."""
_MEMORY_BOUNDS_NS = (1e7, 1e9)
_MOST_SLOWDOWN = 1.0
_SOFT = 0.02
"""Relative error up to which the fit counts a residual by its square. A greater residual counts in proportion to its
size, so outliers count less.
"""
_ITERATIONS = 8
"""Number of iterations of GpuSlowdown.stretching. Each iteration multiplies the error of the forwards' times by at most
slowdown x utilisation.
"""


@dataclass(frozen=True)
class GpuSlowdown:
    slowdown: float
    """Additional time of a forward on a GPU that is always busy, divided by the forward's time without slowdown."""
    memory_ns: float
    """Time constant in ns of the moving average of the GPU's utilisation."""

    def stretching(self, rows: Rows) -> Rows:
        """Adds the column STRETCH to prefill rows: the factor by which each forward took longer than without slowdown.
        If the rows are no log of a server (is_log), each forward is taken to begin on an idle GPU, and slows down only
        by its own work.
        """
        if is_log(rows):
            return _stretched(rows, 1 + self.slowdown * utilisations(rows, self.memory_ns))
        times_ns = rows.columns["time_ns"]
        stretch = np.ones_like(times_ns)
        for _ in range(_ITERATIONS):
            stretch = _stretch(times_ns / stretch, np.zeros_like(times_ns), self.slowdown, self.memory_ns)
        return _stretched(rows, stretch)


def gpu_slowdown(measurements: Measurements) -> GpuSlowdown | None:
    """How much a busy GPU slows down, fitted to rows of kind `clock` or, without them, to the log of prefill forwards.
    None: there are no such rows.
    """
    for rows in measurements.of("clock"):
        return _of_clock(rows)
    return next(map(_of_log, filter(is_log, measurements.of("prefill"))), None)


def _of_clock(rows: Rows) -> GpuSlowdown:
    """The slowdown that fits rows of kind `clock` best. Assumes that forwards of equal size would take equal time
    without slowdown.
    """
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
    return GpuSlowdown(float(found.x[0]), float(found.x[1]) * _MEMORY_NS)


def _stretch(rested_ns: Floats, busy_ns: Floats, slowdown: float, memory_ns: float) -> Floats:
    """Factor by which GpuClock makes a forward longer that begins when the GPU has been busy for busy_ns since its last
    long pause. rested_ns: time of the forward without slowdown. slowdown, memory_ns: see GpuSlowdown.
    """
    idle_at_start = np.exp(-busy_ns / memory_ns)
    x = rested_ns / memory_ns
    return np.asarray(1 + slowdown * (1 - idle_at_start * -np.expm1(-x) / x))


# Logs.


def _of_log(rows: Rows) -> GpuSlowdown:
    """Fits the slowdown of a busy GPU to the forwards in a server's log, which are taken to have run on one GPU. A
    table gives the time of a forward by its size; the chosen slowdown leaves the smallest mean error of this table. The
    slowdown is 0 if it does not reduce this error by more than LEAST_GAIN. Logs in which the GPU is always equally busy
    do not show a slowdown.
    """
    from scipy.optimize import minimize_scalar  # noqa: PLC0415  an extra

    utilisation = utilisations(rows, _MEMORY_NS)

    def error(slowdown: float) -> float:
        stretched = _stretched(rows, 1 + slowdown * utilisation)
        return misfit(prefill_table(stretched), stretched)

    found = minimize_scalar(error, bounds=(0, _MOST_SLOWDOWN), method="bounded", options={"xatol": 2e-3})
    is_shown = found.fun < (1 - LEAST_GAIN) * error(0)
    return GpuSlowdown(float(found.x) if is_shown else 0.0, _MEMORY_NS)


def utilisations(rows: Rows, memory_ns: float) -> Floats:
    """Mean utilisation of the GPU during each forward of a log, by the exponential average of GpuClock. memory_ns: time
    constant of the average in ns.

    The GPU is assumed to be idle for long before the first forward. If the log's times of two forwards overlap, the
    second is assumed to begin when the first ends.
    """
    ends_ns, times_ns = 1e9 * rows.columns["end_s"], rows.columns["time_ns"]
    means = np.empty_like(times_ns)
    busy_until_ns, at_end = float(ends_ns.min() - times_ns.max()), 0.0
    for i in np.argsort(ends_ns, kind="stable"):
        start_ns = max(busy_until_ns, float(ends_ns[i] - times_ns[i]))
        at_start = at_end * exp(-(start_ns - busy_until_ns) / memory_ns)
        x = float(times_ns[i]) / memory_ns
        means[i] = 1 + (at_start - 1) * -expm1(-x) / x
        at_end = 1 - (1 - at_start) * exp(-x)
        busy_until_ns = start_ns + float(times_ns[i])
    return means


def _stretched(rows: Rows, factors: Floats) -> Rows:
    return replace(rows, columns={**rows.columns, STRETCH: factors})
