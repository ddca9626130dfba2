"""Shared by notebooks: where measurements are, whether to be quick, and the figure of a fit's errors."""

import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pdsim.calibration.fit.regression import FittedForm

EXPERIMENTS = Path("../experiments")
REAL = EXPERIMENTS / "validation-h200"
"""Runs and measured rows of two H200s."""
FAST = os.environ.get("PDSIM_FAST") == "1"
"""Small loads, as a test runs them: conclusions are the same, numbers are not."""


def residuals(name: str, fitted: FittedForm) -> Figure:
    """Relative errors in percent, by measured time and by each column of the shape."""
    columns = ("time_ns", *fitted.form.shape)
    figure = Figure(figsize=(4 * len(columns), 3.4), layout="constrained")
    for axes, column in zip(figure.subplots(1, len(columns), sharey=True), columns, strict=True):
        axes.scatter(fitted.rows.columns[column], 100 * fitted.held_out, s=8, alpha=0.5, linewidths=0)
        axes.axhline(0, color="black", linewidth=0.8)
        has_zero = np.any(fitted.rows.columns[column] == 0)
        axes.set_xscale(**{"value": "symlog", "linthresh": 1} if has_zero else {"value": "log"})
        axes.set_xlabel(column)
    figure.axes[0].set_ylabel("held-out error, %")
    figure.suptitle(
        f"{name}: {fitted.form.name}, {len(fitted.rows)} rows, {fitted.num_shapes} shapes, mean {fitted.error:.1%}"
    )
    return figure
