"""Robust least squares over relative errors, with whole shapes held out and intervals by bootstrap. Needs scipy."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdsim.calibration.fit.forms import Form
from pdsim.calibration.fit.rows import Columns, Floats, Rows

SOFT = 0.03
"""Relative error from which on a residual counts by its size, no longer by its square."""
ABOVE_LEAST = (1.3, 3.0)
"""Times by so much above the least of all are taken for work at first, and the others for the least that it takes."""
NUM_FOLDS = 5
NUM_SAMPLES = 100
ROWS_OF_SHAPE = 12
"""In a sample of the bootstrap."""
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap."""
SHAPES_PER_DOUBLING = 2
"""Sizes nearer to each other than that are one shape: steps that follow each other know each other's times."""


@dataclass(frozen=True)
class Fitted:
    """A form with its coefficients, and how well it predicts shapes that it was not fitted to."""

    form: Form
    rows: Rows
    values: dict[str, float]
    """In ns."""
    num_shapes: int
    held_out: Floats
    """Relative error of each row, by a fit to other shapes: positive where the fit is too high."""

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Of the coefficients. Whole shapes are drawn, not rows: repeats of one are off together."""
        rng = np.random.default_rng(0)
        shapes, num_shapes = _shapes(self.form, self.rows.columns)
        of_shape = [_spread(np.flatnonzero(shapes == shape)) for shape in range(num_shapes)]
        near = np.array(list(self.values.values()))
        samples = []
        for _ in range(NUM_SAMPLES):
            drawn = np.concatenate([of_shape[shape] for shape in rng.integers(num_shapes, size=num_shapes)])
            samples.append(_robust(self.form, self.rows.where(drawn).columns, near))
        low, high = np.percentile(samples, INTERVAL, axis=0)
        return {name: (float(low[i]), float(high[i])) for i, name in enumerate(self.values)}

    def times_ns(self, columns: Columns) -> Floats:
        """As the fit to all rows has it."""
        return self.form.times_ns(np.array(list(self.values.values())), self.form.design(columns))

    @property
    def error(self) -> float:
        """Mean absolute, held out."""
        return float(np.abs(self.held_out).mean())

    @property
    def typical_error(self) -> float:
        """Median absolute, held out: rows of a machine that was slow for a while do not move it."""
        return float(np.median(np.abs(self.held_out)))

    @property
    def error_p90(self) -> float:
        return float(np.percentile(np.abs(self.held_out), 90))

    @property
    def bias(self) -> float:
        """Median."""
        return float(np.median(self.held_out))


def fit(form: Form, rows: Rows) -> Fitted:
    """Raises ValueError where the shapes that are left when some are held out are fewer than the form's parameters."""
    shapes, num_shapes = _shapes(form, rows.columns)
    if num_shapes - ceil(num_shapes / NUM_FOLDS) < len(form.parameters):
        raise ValueError(f"{num_shapes} shapes, some of them held out, cannot fix {len(form.parameters)} coefficients")
    values = _robust(form, rows.columns)
    return Fitted(
        form,
        rows,
        dict(zip(form.parameters, values.tolist(), strict=True)),
        num_shapes,
        _held_out(form, rows, shapes),
    )


def _robust(form: Form, columns: Columns, near: Floats | None = None) -> Floats:
    """Coefficients, found in units of what would make up a mean time alone, so that their steps are of one size.

    `near` is known to be close to them.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    design, times_ns = form.design(columns), columns["time_ns"]
    size = 1 / np.maximum((design / times_ns[:, None]).mean(axis=0), 1e-300)

    def errors(units: Floats) -> Floats:
        return np.asarray(form.times_ns(units * size, design) / times_ns - 1)

    def slopes(units: Floats) -> Floats:
        return np.asarray(form.slopes(units * size, design) * size / times_ns[:, None])

    starts = _starts(form, design, times_ns) if near is None else [near]
    robust = {"bounds": (0, np.inf), "loss": "soft_l1", "f_scale": SOFT, "ftol": 1e-6, "xtol": 1e-6, "max_nfev": 40}
    found = [least_squares(errors, np.maximum(start / size, 1e-4), slopes, **robust) for start in starts]
    return np.asarray(min(found, key=lambda one: one.cost).x * size)


def _starts(form: Form, design: Floats, times_ns: Floats) -> list[Floats]:
    """Plain least squares. A least time may hide nothing or all that is short: neither sees the other's slope."""
    if not form.least:
        return [_plain(design, times_ns)]
    work, least = design[:, : len(form.terms)], design[:, len(form.terms) :]
    nearly_nothing = np.append(times_ns.min() / 2, np.zeros(len(form.least) - 1))
    starts = [np.append(_plain(work, times_ns), nearly_nothing)]
    for bound in ABOVE_LEAST:
        above = times_ns > bound * times_ns.min()
        if above.any():
            starts.append(np.append(_plain(work[above], times_ns[above]), _plain(least[~above], times_ns[~above])))
    return starts


def _plain(design: Floats, times_ns: Floats) -> Floats:
    return plain_least_squares(design / times_ns[:, None], np.ones(len(times_ns)))


def plain_least_squares(design: Floats, wanted: Floats) -> Floats:
    """Coefficients that are not negative."""
    from scipy.optimize import nnls  # noqa: PLC0415  an extra

    size = np.maximum(design.mean(axis=0), 1e-300)
    return np.asarray(nnls(design / size, wanted)[0] / size)


def _errors(form: Form, values: Floats, columns: Columns) -> Floats:
    return np.asarray(form.times_ns(values, form.design(columns)) / columns["time_ns"] - 1)


def _shapes(form: Form, columns: Columns) -> tuple[NDArray[Any], int]:
    """The number of each row's shape, from the smallest on."""
    sizes = [np.round(np.log2(1 + columns[name]) * SHAPES_PER_DOUBLING) for name in form.shape]
    distinct, shapes = np.unique(np.column_stack(sizes), axis=0, return_inverse=True)
    return shapes.ravel(), len(distinct)


def _held_out(form: Form, rows: Rows, shapes: NDArray[Any]) -> Floats:
    """Every shape is held out once."""
    errors = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        out = shapes % NUM_FOLDS == fold
        if out.any():
            others = _robust(form, rows.where(~out).columns)
            errors[out] = _errors(form, others, rows.where(out).columns)
    return errors


def _spread(rows: NDArray[Any]) -> NDArray[Any]:
    chosen: NDArray[Any] = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS_OF_SHAPE).astype(int))]
    return chosen
