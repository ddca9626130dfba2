"""Whether an open-loop load is more than the system can take."""

from collections.abc import Sequence
from math import sqrt

from pdsim.metrics.records import RequestRecord

_SHARE = 0.05
"""Of the arrivals: slower growth is not told from the end of a burst."""
_DEVIATIONS = 3
"""Of a Poisson count: less is chance."""


def is_saturated(requests: Sequence[RequestRecord]) -> bool:
    """Of an open-loop run: in the second half of its arrivals' time, clearly fewer requests ended than arrived.

    Its latencies then say how long it was run, not how long requests take. Where requests take about as long as
    arrivals go on, the run is too short to tell, and counts as saturated. False if all arrived at once.
    """
    first_ns = min((r.arrival_ns for r in requests), default=0)
    last_ns = max((r.arrival_ns for r in requests), default=0)
    middle_ns = (first_ns + last_ns) // 2
    num_arrived = sum(r.arrival_ns > middle_ns for r in requests)
    num_ended = sum(r.end_ns is not None and middle_ns < r.end_ns <= last_ns for r in requests)
    growth = num_arrived - num_ended
    return first_ns < last_ns and growth > max(_SHARE * num_arrived, _DEVIATIONS * sqrt(num_arrived))
