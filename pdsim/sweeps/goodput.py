"""How many of a run's requests meet an SLO."""

from typing import Any, NamedTuple

import numpy as np

from pdsim.sweeps.sweep_file import SloSettings


class Attained(NamedTuple):
    attainment: float
    """Of all requests that were sent; those that failed do not meet it."""
    goodput_per_gpu: float
    """Requests that meet it, per second and GPU."""


def attained(slo: SloSettings, row: Any, ttft_ns: Any, e2e_ns: Any, output_tokens: Any) -> Attained:
    """Of a row and its arrays over finished requests. A request of one token has no time per token to meet."""
    meets = np.ones(len(ttft_ns), dtype=bool)
    if slo.ttft is not None:
        meets &= ttft_ns <= slo.ttft
    if slo.e2e is not None:
        meets &= e2e_ns <= slo.e2e
    if slo.tpot is not None:
        meets &= e2e_ns - ttft_ns <= slo.tpot * (output_tokens - 1)
    number = int(meets.sum())
    sent = row["completed"] + row["failed"] + row["unfinished"]
    seconds = row["duration"] * row["gpus"]
    return Attained(number / sent if sent else 0.0, number / seconds if seconds else 0.0)
