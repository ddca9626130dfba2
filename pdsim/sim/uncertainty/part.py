"""The first requests of a long load (its part), and how their numbers change between two runs of the same load."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary_rows import RANGED_FIELDS
from pdsim.sim.simulation import Simulation

LEAST_REQUESTS = 1_000
"""Minimum number of first requests from which the numbers of a whole load are estimated. Of 1,000 values, the p99 is
the tenth largest.
"""
_SHARE = 0.15
"""Share of a load's requests that count as its first requests. Simulating them at both ends of a range costs 0.3 of the
run's time."""
_BATCHES = 10
_LIKE = 0.1
"""Largest relative difference between a mean (_MEANS) over the first requests and the same mean over all requests. If a
mean differs more, the first requests do not stand for the whole run.
"""
_MEANS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")

Numbers = Mapping[str, float | None]
"""Values of the summary fields for which a range is given, by field. None: the run has no such value."""


class Part(NamedTuple):
    """Numbers of a run at the time at which n of its requests have ended. PartWatch sets n."""

    numbers: Numbers
    half_ns: int
    """Time in ns in which the later half of the n requests ended. The time in which the earlier half ended is left out,
    because it includes the start of the run.
    """
    batches: Sequence[tuple[float, float]]
    """Means (TTFT, latency) in ns for ten groups of equal size, which divide the run's first n requests in the order of
    arrival. A mean is over those requests of the group that have finished. Empty: a group has no finished request.
    """

    def is_like(self, whole: Numbers) -> bool:
        """True if each mean of _MEANS over the first requests differs from that of the whole run by at most _LIKE."""
        pairs = [(self.numbers[field], whole[field]) for field in _MEANS]
        return all(here == there or (here and there and abs(here / there - 1) <= _LIKE) for here, there in pairs)


class Change(NamedTuple):
    """Ratios between the numbers of two runs of the same load, over their first requests."""

    ratios: Mapping[str, float]
    """By summary field: value in the changed run divided by the value in the original run, both over the first
    requests. For throughputs: ratio of the rates at which the second half of the first requests ended. Fields that have
    no value, or 0, in both runs are left out.
    """
    error: float
    """Relative standard error of the ratio of mean TTFT or of mean latency, whichever is higher."""
    drift: float
    """Relative difference between the ratios over the first half and over the second half of the runs' first requests.
    The larger of two such differences: for mean TTFT, and for mean latency.
    """


def part_size(num_requests: int) -> int | None:
    """Number of requests that count as a load's first requests. None: the load is too short."""
    size = max(LEAST_REQUESTS, round(_SHARE * num_requests))
    return size if size < num_requests else None


def numbers_of(summary: Mapping[str, Any]) -> Numbers:
    return {field: summary[field] for field in RANGED_FIELDS}


class PartWatch:
    """Observer of a run. When a given number of requests have ended, whichever they are, notes the run's numbers in
    `part`, and calls `seen` with these numbers.
    """

    def __init__(self, num_requests: int | None, seen: Callable[[Part], None] | None = None) -> None:
        """num_requests: number of ended requests at which the numbers are noted; None: no numbers are noted, and `seen`
        is never called. seen: gets the numbers; None: nothing is called. An exception that `seen` raises ends the run.
        """
        self.part: Part | None = None
        self.simulation: Simulation | None = None
        """The observed simulation. The caller sets it before the simulation runs."""
        self._num_requests = num_requests
        self._seen = seen
        self._num_ended = 0
        self._middle_ns = 0

    def __call__(self, ended: RequestRecord) -> None:
        self._num_ended += 1
        if self._num_requests is None or ended.end_ns is None:
            return
        if self._num_ended == self._num_requests // 2:
            self._middle_ns = ended.end_ns
        elif self._num_ended == self._num_requests:
            assert self.simulation is not None
            result = self.simulation.result()
            batches = _batches(result.records.requests[: self._num_requests])
            self.part = Part(numbers_of(result.summary()), ended.end_ns - self._middle_ns, batches)
            if self._seen is not None:
                self._seen(self.part)


def _batches(requests: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    times: list[list[tuple[int, int]]] = [[] for _ in range(_BATCHES)]
    for i, request in enumerate(requests):
        if request.outcome == "finished" and request.first_token_ns is not None and request.end_ns is not None:
            ttft_ns, latency_ns = request.first_token_ns - request.arrival_ns, request.end_ns - request.arrival_ns
            times[i * _BATCHES // len(requests)].append((ttft_ns, latency_ns))
    if not all(times):
        return []
    return [(fmean(ttft for ttft, _ in batch), fmean(latency for _, latency in batch)) for batch in times]


def change_of(other: Part, run: Part) -> Change | None:
    """Returns how the numbers change from `run` to `other`. None: the change is not known, because one of the two parts
    has no `batches` or a `half_ns` of 0, or because a number is missing or 0 in only one of the two.
    """
    if not (other.batches and run.batches and other.half_ns and run.half_ns):
        return None
    ratios = {}
    for field, value in run.numbers.items():
        changed = other.numbers[field]
        if field.endswith("_throughput"):  # of the same requests, of which other ones are under way at the end
            ratios[field] = run.half_ns / other.half_ns
        elif value and changed:
            ratios[field] = changed / value
        elif value != changed:
            return None
    pairs = list(zip(other.batches, run.batches, strict=True))
    spreads = [_spread([changed[i] / value[i] for changed, value in pairs]) for i in (0, 1)]
    return Change(ratios, max(error for error, _ in spreads), max(drift for _, drift in spreads))


def _spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the relative standard error of the ratios' mean, and the relative difference between the means of their
    two halves.
    """
    mean, half = fmean(ratios), len(ratios) // 2
    drift = abs(fmean(ratios[half:]) - fmean(ratios[:half]))
    return stdev(ratios) / len(ratios) ** 0.5 / mean, drift / mean
