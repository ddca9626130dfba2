"""Compares runs in real mode with their simulations: errors of all metrics, counts that must be equal, and rankings of
variants.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from pdsim.calibration.validate.case import MetricError
from pdsim.calibration.validate.suite import Tolerances
from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.explain import mean_stage_ms
from pdsim.metrics.explanation.failures import failure_text
from pdsim.metrics.records import RunRecords, judged_records


class Count(NamedTuple):
    """A total over a whole run, once measured and once simulated."""

    measured: int
    simulated: int


@dataclass(frozen=True)
class Counts:
    """Totals of a real run and of its simulation, over the whole runs with warm-up requests. The bytes that each
    request sends do not depend on time, so they must be equal.

    If a request found another cached prefix, because of other times, its bytes are not compared; other_prefix_cached
    has the ids of these requests. Descriptors also depend on which pages were free. They are shown and not compared.
    """

    num_requests: int
    """Number of requests that finished in the real run, with warm-up requests."""
    transfer_bytes: Count
    """Bytes that transfers of KV sent, summed over all requests of the run."""
    descriptors: Count
    prefill_cached_tokens: Count
    """Number of prompt tokens that prefill's cache had, summed over all requests of the run."""
    decode_cached_tokens: Count
    """Number of prompt tokens that decode's cache had, summed over all requests of the run."""
    other_prefix_cached: tuple[int, ...]
    """Ids of the requests that found another cached prefix in the simulation than in the real run."""
    unequal: tuple[int, ...]
    """Ids of the requests that sent different numbers of bytes although they found the same cached prefix, and of those
    that finished in only one of the two runs.
    """

    @property
    def are_equal(self) -> bool:
        """True if all counts that do not depend on time are equal."""
        return not self.unequal

    def to_json(self) -> dict[str, Any]:
        totals = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, Count)}
        return {**asdict(self), **totals, "equal": self.are_equal}


class _Sent(NamedTuple):
    """Cached tokens and sent bytes of one request."""

    cached_tokens: tuple[int, int]
    """Number of the request's tokens that prefill had cached, and number that decode had cached."""
    num_bytes: int
    """Number of bytes that the request's transfers sent."""


def compare_counts(measured: RunRecords, simulated: RunRecords) -> Counts:
    ours, theirs = _by_request(measured), _by_request(simulated)
    both = ours.keys() & theirs.keys()
    other_prefix = {i for i in both if ours[i].cached_tokens != theirs[i].cached_tokens}
    unequal = {i for i in both - other_prefix if ours[i] != theirs[i]}
    return Counts(
        len(ours),
        Count(*(sum(row.num_bytes for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(row.num_descriptors for row in records.transfers) for records in (measured, simulated))),
        Count(*(sum(r.num_prefill_cached_tokens for r in records.requests) for records in (measured, simulated))),
        Count(*(sum(r.num_decode_cached_tokens for r in records.requests) for records in (measured, simulated))),
        other_prefix_cached=tuple(sorted(other_prefix)),
        unequal=tuple(sorted((ours.keys() ^ theirs.keys()) | unequal)),
    )


def _by_request(records: RunRecords) -> dict[int, _Sent]:
    """Cached tokens and bytes sent of each finished request, by its id."""
    num_bytes = Counter[int]()
    for row in records.transfers:
        num_bytes[row.request_id] += row.num_bytes
    return {
        r.request_id: _Sent((r.num_prefill_cached_tokens, r.num_decode_cached_tokens), num_bytes[r.request_id])
        for r in records.requests
        if r.outcome == "finished"
    }


CLEARLY = 0.05
"""Two measured values differ clearly if they differ by more than this share of the smaller value."""


@dataclass(frozen=True)
class Ranking:
    """How often a simulation finds the better of two configurations, by one metric."""

    num_pairs: int
    """Number of pairs of configurations whose measured values differ clearly, as CLEARLY says. Only these pairs are
    ranked.
    """
    num_right: int
    """Number of pairs, among the num_pairs pairs, whose order is the same in the simulation as in the measurements."""

    @property
    def share(self) -> float | None:
        return self.num_right / self.num_pairs if self.num_pairs else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def rank(measured: Mapping[str, float], simulated: Mapping[str, float]) -> Ranking:
    """Compares the order of configurations. Both mappings have the configurations' names as keys, and values of one
    metric. Pairs of configurations whose measured values do not differ clearly (CLEARLY) do not count.
    """
    pairs = [
        (measured[a] - measured[b], simulated[a] - simulated[b])
        for a, b in combinations(measured, 2)
        if abs(measured[a] - measured[b]) > CLEARLY * min(measured[a], measured[b])
    ]
    num_right = sum(ours * theirs > 0 for ours, theirs in pairs)
    return Ranking(len(pairs), num_right)


TIMES = ("ttft", "tpot", "itl", "e2e_latency")
METRICS = (
    "request_throughput",
    *(f"{statistic}_{time}_ms" for time in TIMES for statistic in ("mean", "median", "p90", "p99")),
)
RANKED = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")


@dataclass(frozen=True)
class Side:
    """Summary and records of one run, which is either real or simulated."""

    summary: Mapping[str, Any]
    """The summary: numbers by field, as in summary.json."""
    records: RunRecords


@dataclass(frozen=True)
class Comparison:
    """Errors of the simulation of one variant."""

    name: str
    """Name of the variant."""
    num_requests: int
    """Number of requests that finished in the real run, without warm-up requests."""
    metrics: dict[str, MetricError]
    """Errors by metric. A metric that has a value in neither run is left out: TPOT, if all requests have one token. If
    one run alone lacks the value, the run counts with 0.
    """
    stages_ms: dict[str, MetricError]
    """Errors of the mean time in ms of each stage of the real run, by stage. Means are over the finished requests,
    without warm-up requests.
    """
    counts: Counts
    """Totals of bytes, descriptors and cached tokens in both runs, and ids of the requests that differ."""
    failures: str = ""
    """A sentence on requests that failed in the simulation although the scenario asks for no failures. Empty:
    none did.
    """

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.name,
            "num_requests": self.num_requests,
            "metrics": {name: one.to_json() for name, one in self.metrics.items()},
            "stages_ms": {name: one.to_json() for name, one in self.stages_ms.items()},
            "counts": self.counts.to_json(),
            "failures": self.failures,
        }


@dataclass(frozen=True)
class Spread:
    """How the errors of one metric are spread over all variants. Errors are relative: 0.1 is 10 %."""

    metric: str
    median: float
    """Median of the absolute values of the relative errors."""
    worst: float
    """The error of largest absolute value. Positive: the simulated value is too high."""
    where: str
    """Name of the variant whose error is `worst`."""
    num_missed: int
    """Number of variants whose error is larger in absolute value than the suite accepts for one variant."""
    is_met: bool
    """True: all errors, and the median of their absolute values, are within the limits that the suite sets."""


@dataclass(frozen=True)
class Validation:
    """Comparisons of the variants of a suite that have a real run."""

    name: str
    """Name of the suite."""
    tolerances: Tolerances
    """The largest errors, and the smallest share of rightly ranked pairs of variants, that the suite accepts."""
    comparisons: tuple[Comparison, ...]
    """Comparison of the real and the simulated run of each variant that has a real run, in the suite's order."""

    @property
    def unequal(self) -> list[str]:
        """Names of the variants whose real and simulated run differ in counts that do not depend on time: the bytes
        that a request sends with the same cached prefix, and whether a request finishes.
        """
        return [one.name for one in self.comparisons if not one.counts.are_equal]

    def spreads(self) -> list[Spread]:
        return [self._spread(metric, errors) for metric in METRICS if (errors := self._errors(metric))]

    def rankings(self) -> dict[str, Ranking]:
        return {
            metric: rank(
                {name: error.measured for name, error in self._errors(metric).items()},
                {name: error.simulated for name, error in self._errors(metric).items()},
            )
            for metric in RANKED
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "matrix": self.name,
            "equal": not self.unequal,
            "unequal": self.unequal,
            "metrics": {spread.metric: {**vars(spread)} for spread in self.spreads()},
            "ranking": {metric: ranking.to_json() for metric, ranking in self.rankings().items()},
            "variants": [one.to_json() for one in self.comparisons],
        }

    def _errors(self, metric: str) -> dict[str, MetricError]:
        """Errors of one metric by variant, without the variants for which the metric has no value."""
        return {one.name: one.metrics[metric] for one in self.comparisons if metric in one.metrics}

    def _spread(self, metric: str, errors: Mapping[str, MetricError]) -> Spread:
        middle = median(abs(error.error) for error in errors.values())
        where = max(errors, key=lambda name: abs(errors[name].error))
        num_missed = sum(not error.is_met for error in errors.values())
        is_met = not num_missed and (self.tolerances.median is None or middle <= self.tolerances.median)
        return Spread(metric, middle, errors[where].error, where, num_missed, is_met)


def compare_sides(name: str, tolerances: Tolerances, measured: Side, simulated: Side) -> Comparison:
    values = {metric: (measured.summary[metric], simulated.summary[metric]) for metric in METRICS}
    errors = {
        metric: MetricError(ours or 0.0, theirs or 0.0, tolerance_of(tolerances, metric))
        for metric, (ours, theirs) in values.items()
        if (ours, theirs) != (None, None)
    }
    stages_ms = _stages(measured, simulated)
    counts = compare_counts(measured.records, simulated.records)
    failures = failure_text(simulated.summary)
    return Comparison(name, measured.summary["completed"], errors, stages_ms, counts, failures)


def tolerance_of(tolerances: Tolerances, metric: str) -> float | None:
    """The largest error that the suite accepts for a metric in any one variant. None: every error is accepted."""
    if metric.startswith("p99"):
        return tolerances.p99
    return tolerances.mean if metric.startswith(("mean", "request")) else None


def _stages(measured: Side, simulated: Side) -> dict[str, MetricError]:
    ours, theirs = (mean_stage_ms(judged_records(side.records, side.summary)) for side in (measured, simulated))
    return {stage: MetricError(mean_ms, theirs.get(stage, 0.0), None) for stage, mean_ms in ours.items()}
