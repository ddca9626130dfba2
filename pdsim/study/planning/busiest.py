"""Request rate and queue of a run during the five minutes around its longest queue."""

from collections.abc import Sequence
from typing import Any

from pdsim.metrics.records import RequestRecord

_WINDOW_S = 300.0
_NUM_STEPS = 150


def busiest(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Request rate and queue over time, as lists: times in s (times_s) and, for each time, the requests sent per second
    (sent_per_s), and the numbers of requests that wait for a first token (waiting) and that decode (decoding). The
    times cover the five minutes around the moment at which most requests wait, shifted so that they lie within the run.
    If the run is shorter, the times cover the whole run.
    """
    begin_s = min(r.arrival_ns for r in requests) / 1e9
    end_s = max(r.end_ns or r.arrival_ns for r in requests) / 1e9
    step_s = (end_s - begin_s) / _NUM_STEPS or 1.0
    longest = max((begin_s + i * step_s for i in range(_NUM_STEPS)), key=lambda time_s: _waiting(requests, time_s))
    first_s = max(begin_s, min(longest - _WINDOW_S / 2, end_s - _WINDOW_S))
    step_s = min(_WINDOW_S, end_s - begin_s) / _NUM_STEPS or 1.0
    times_s = [first_s + i * step_s for i in range(_NUM_STEPS + 1)]
    return {
        "times_s": times_s,
        "sent_per_s": [_num_sent(requests, time_s, step_s) / step_s for time_s in times_s],
        "waiting": [_waiting(requests, time_s) for time_s in times_s],
        "decoding": [_decoding(requests, time_s) for time_s in times_s],
    }


def _num_sent(requests: Sequence[RequestRecord], time_s: float, step_s: float) -> int:
    return sum(time_s <= r.arrival_ns / 1e9 < time_s + step_s for r in requests)


def _waiting(requests: Sequence[RequestRecord], time_s: float) -> int:
    """Number of requests that had been sent by `time_s`, and by then had neither a first token nor failed."""
    time_ns = time_s * 1e9
    return sum(r.arrival_ns <= time_ns < (r.first_token_ns or r.end_ns or time_ns + 1) for r in requests)


def _decoding(requests: Sequence[RequestRecord], time_s: float) -> int:
    time_ns = time_s * 1e9
    return sum(
        r.first_token_ns is not None and r.first_token_ns <= time_ns < (r.end_ns or time_ns + 1) for r in requests
    )
