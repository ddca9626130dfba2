"""Finds whether the first requests of a measured run met cold servers, which stall at their first steps: compares the
run with a simulation of the same requests.
"""

from collections.abc import Mapping
from statistics import median

from pdsim.dataclass import dataclass
from pdsim.metrics.records import Records, RequestRecord

LEAST_NS = 20_000_000
"""Smallest delay in ns of the first requests, relative to later requests, that counts as cold. Cold servers in
experiments/sglang-h200 stalled for 41 ms and more.
"""
_FEWEST_LATER = 8
"""Minimum number of requests after the first ones. With fewer requests, the usual delay of warm servers is unknown."""
_USUAL = 0.9
"""A quantile. The first requests count as cold only if their median delay is greater than this quantile of the delays
of the later requests.
"""


@dataclass(frozen=True)
class ColdWave:
    """The requests that were sent before any request had ended, and their delay. Delays are relative to a simulation of
    the same requests.
    """

    num_requests: int
    """Number of requests that were sent before any request had ended. Counts only requests that finished with the same
    numbers of tokens in the simulation.
    """
    late_ns: int
    """Median delay in ns of the requests that were sent before any had ended, minus the median delay of all later
    requests. Delay: measured minus simulated time from sending a request to its end. A stalled decode server delays
    the first token of some requests and later tokens of others, so TTFT and TPOT are not told apart.
    """


def cold_wave(measured: Records, predicted: Records) -> ColdWave | None:
    """Finds the first requests of a measured run, and by how much cold servers delayed them, compared with the
    prediction. None: the first requests were not clearly later (LEAST_NS, _USUAL) than the following ones, there are
    too few following requests, or the two runs have different requests.
    """
    theirs = {one.request_id: one for one in predicted.requests if one.outcome == "finished"}
    pairs = [(one, theirs[one.request_id]) for one in measured.requests if _is_alike(one, theirs)]
    if not pairs:
        return None
    first_end_ns = min(one.end_ns or 0 for one, _ in pairs)
    first = [_late_ns(*pair) for pair in pairs if pair[0].arrival_ns < first_end_ns]
    later = sorted(_late_ns(*pair) for pair in pairs if pair[0].arrival_ns >= first_end_ns)
    if not first or len(later) < _FEWEST_LATER:
        return None
    late_ns = median(first) - median(later)
    is_usual = median(first) <= later[int(_USUAL * (len(later) - 1))]
    return None if late_ns < LEAST_NS or is_usual else ColdWave(len(first), round(late_ns))


def _is_alike(one: RequestRecord, others: Mapping[int, RequestRecord]) -> bool:
    other = others.get(one.request_id)
    if other is None or one.outcome != "finished":
        return False
    return (one.num_prompt_tokens, one.num_output_tokens) == (other.num_prompt_tokens, other.num_output_tokens)


def _late_ns(one: RequestRecord, other: RequestRecord) -> int:
    return (one.end_ns or 0) - one.arrival_ns - ((other.end_ns or 0) - other.arrival_ns)
