"""Finds in a server's log which prefill forwards were bound by their launch, and how long a launch takes.

A forward that finds its GPU idle ends when the host has launched its last kernel, or later. If the host launches a
forward while the GPU runs an earlier one, the forward takes only the time of its kernels: with fp8 on an H200, 10 ms
for 301 to 600 tokens behind another forward, and 28 ms on an idle GPU (experiments/sglang-stamps-h200).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pdsim.calibration.fit.regression import LEAST_GAIN, FittedForm, misfit, prefill_form
from pdsim.calibration.fit.rows import FOUND_IDLE, Floats, Measurements, Rows, is_log

_LEAST_PAUSE_S = 0.3e-3
"""Shortest pause in s between two forwards after which the second counts as having found its GPU idle (_found_idle).
Between forwards that were launched in time, nine of ten pauses take less than 0.1 ms.
"""


def with_launches(measurements: Measurements) -> Measurements:
    """Adds the column FOUND_IDLE to prefill rows that are a server's log (is_log) and ran without CUDA graphs, if the
    column reduces the error of their fit by more than LEAST_GAIN. The host's launches then determine the time of some
    forwards.
    """
    return replace(measurements, rows=tuple(map(_marked, measurements.rows)))


def launch_ns(prefill: FittedForm) -> float | None:
    """Time in ns of launching a forward. None: the measured rows do not show it."""
    return prefill.values["least"] + prefill.values["launch"] if prefill.values.get("launch") else None


def missing_work(prefill: FittedForm, measurements: Measurements) -> Iterator[str]:
    """Yields a note if a log shows for how long launching a forward blocks the scheduler's loop, but there are no
    rows of kind `host`, which have the times of the loop's other work (start, result, send). prefill: the fitted
    forwards.
    """
    found_ns = launch_ns(prefill)
    if found_ns is not None and not measurements.of("host"):
        yield (
            f"a launch holds the loop for {found_ns / 1e6:.1f} ms. Without rows of host work (start, result, send), "
            "simulated TTFT near the limit is too short."
        )


def _marked(rows: Rows) -> Rows:
    if rows.kind != "prefill" or not is_log(rows) or rows.columns["graph"].any():
        return rows
    marked = replace(rows, columns={**rows.columns, FOUND_IDLE: _found_idle(rows)})
    errors = [misfit(prefill_form(one), one) for one in (rows, marked)]
    return marked if errors[1] < (1 - LEAST_GAIN) * errors[0] else rows


def _found_idle(rows: Rows) -> Floats:
    """For each forward: 1 if its GPU was idle when the forward began, else 0. The GPU counts as idle if the forward is
    the first of the log, or began at least _LEAST_PAUSE_S after the previous forward had ended.
    """
    ends_s = rows.columns["end_s"]
    order = np.argsort(ends_s, kind="stable")
    found = np.ones_like(ends_s)
    pauses_s = (ends_s - rows.columns["time_ns"] / 1e9)[order[1:]] - ends_s[order[:-1]]
    found[order[1:]] = pauses_s >= _LEAST_PAUSE_S
    return found
