"""A first wave of requests that met cold servers: a measured run beside a simulated one of the same requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from pdsim.metrics.records import Records, RequestRecord

LEAST_NS = 20_000_000
"""Shortest delay that counts: the stalls of cold servers in experiments/sglang-h200 took 41 ms and more."""
_FEWEST_LATER = 8
"""Fewest later requests from which the delay of a warm server is known."""
_USUAL = 0.9
"""Share of later requests that are less late than a cold first wave."""


@dataclass(frozen=True)
class ColdWave:
    """The requests that were sent before the first one ended, and how late they are beyond later requests."""

    num_requests: int
    late_ns: int
    """Median delay of their ends. A stall of a decode server delays first tokens of some requests and the rest of
    others, so the two are not told apart.
    """


def cold_wave(measured: Records, predicted: Records) -> ColdWave | None:
    """The first wave of a measured run. None: its requests are as late as later ones, compared with the prediction, or
    the runs do not have the same requests.
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
