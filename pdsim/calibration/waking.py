"""What a pause before a forward costs where cores compute it: what rows of `waking` say of pdsim/cost/waking.py."""

from dataclasses import dataclass

import numpy as np

from pdsim.calibration.rows import Floats, Measurements, Rows

_SHAPE = ("prompts", "new_tokens", "context_tokens")
_MEMORY_NS = 1e7
"""Where the search begins."""
_MEMORY_BOUNDS_NS = (1e6, 1e8)
_MOST = 1.0
"""Of the shortest forward's time."""
_SOFT = 0.03
"""Relative error from which on a residual counts by its size."""


@dataclass(frozen=True)
class CoreWaking:
    most_ns: float = 0.0
    """Behind a long pause."""
    memory_ns: float = _MEMORY_NS
    """Time constant."""

    @classmethod
    def of(cls, measurements: Measurements) -> "CoreWaking":
        """Nothing without such rows."""
        return next(map(_fitted, measurements.of("waking")), cls())


def _fitted(rows: Rows) -> CoreWaking:
    """Each shape has a time of its own, and a pause adds the same to all."""
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    times_ns, idle_ns = rows.columns["time_ns"], 1e3 * rows.columns["idle_us"]
    shapes, of_shape = np.unique([rows.columns[name] for name in _SHAPE], axis=1, return_inverse=True)
    shortest_ns = np.array([times_ns[of_shape == shape].min() for shape in range(shapes.shape[1])])
    least_ns = float(shortest_ns.min())

    def errors(units: Floats) -> Floats:
        awake_ns = (units[2:] * shortest_ns)[of_shape]
        waking_ns = units[0] * least_ns * -np.expm1(-idle_ns / (units[1] * _MEMORY_NS))
        return np.asarray((awake_ns + waking_ns) / times_ns - 1)

    ones = np.ones(len(shortest_ns))
    low, high = (bound / _MEMORY_NS for bound in _MEMORY_BOUNDS_NS)
    bounds = ([0, low, *0.5 * ones], [_MOST, high, *2 * ones])
    found = least_squares(errors, [0.1, 1, *ones], bounds=bounds, loss="soft_l1", f_scale=_SOFT)
    return CoreWaking(float(found.x[0]) * least_ns, float(found.x[1]) * _MEMORY_NS)
