"""How many of a run's requests meet an SLO."""

from typing import Any, NamedTuple

import numpy as np

from pdsim.study.sweep_file import SloSettings


class Attained(NamedTuple):
    attainment: float
    """Of all requests that were sent; those that failed do not meet it."""
    goodput_per_gpu: float
    """Requests that meet it, per second and GPU."""
    ttft_ms: float
    """At the percentile that is to meet the SLO, of finished requests; as is the next."""
    tpot_ms: float


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
    several = output_tokens > 1
    tpot_ns = (e2e_ns - ttft_ns)[several] / (output_tokens[several] - 1)
    tails = (float(np.percentile(ns, 100 * slo.attainment)) / 1e6 if len(ns) else 0.0 for ns in (ttft_ns, tpot_ns))
    return Attained(number / sent if sent else 0.0, number / seconds if seconds else 0.0, *tails)
