"""Real runs of a matrix beside its simulations, number by number. Needs scipy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pdsim.calibration.compare import MetricError
from pdsim.calibration.counts import Counts, compare_counts
from pdsim.calibration.first_decisions import Prefix, equal_prefixes
from pdsim.calibration.matrix import Asked
from pdsim.calibration.ranking import Ranking, ks_distance, rank
from pdsim.core.journal import Entry
from pdsim.metrics.explain import stage_times
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import e2e_ms, tpot_ms, ttft_ms

TIMES = ("ttft", "tpot", "itl", "e2e_latency")
METRICS = (
    "request_throughput",
    *(f"{statistic}_{time}_ms" for time in TIMES for statistic in ("mean", "median", "p90", "p99")),
)
RANKED = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")


@dataclass(frozen=True)
class Side:
    """What one run leaves, real or simulated."""

    summary: Mapping[str, Any]
    records: RunRecords
    journal: Sequence[Entry]


@dataclass(frozen=True)
class Comparison:
    """One variant."""

    name: str
    num_requests: int
    metrics: dict[str, MetricError]
    stages_ms: dict[str, MetricError]
    """Means."""
    distances: dict[str, float]
    """Kolmogorov-Smirnov, of `ttft`, `tpot` and `e2e_latency`."""
    counts: Counts
    decisions: dict[str, Prefix]

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.name,
            "num_requests": self.num_requests,
            "metrics": _errors_json(self.metrics),
            "stages_ms": _errors_json(self.stages_ms),
            "ks": self.distances,
            "counts": self.counts.to_json(),
            "decisions": {name: prefix._asdict() for name, prefix in self.decisions.items()},
        }


@dataclass(frozen=True)
class Spread:
    """Of a metric's errors over all variants."""

    metric: str
    median: float
    """Of the absolute errors."""
    worst: float
    where: str
    num_missed: int
    """Variants beyond what is asked for."""
    is_met: bool


@dataclass(frozen=True)
class Validation:
    """A whole matrix."""

    name: str
    asked: Asked
    comparisons: tuple[Comparison, ...]

    @property
    def unequal(self) -> list[str]:
        """Variants where something differs that does not depend on time."""
        return [one.name for one in self.comparisons if not one.counts.are_equal]

    def spreads(self) -> list[Spread]:
        return [self._spread(metric) for metric in METRICS]

    def rankings(self) -> dict[str, Ranking]:
        return {
            metric: rank(
                {one.name: one.metrics[metric].measured for one in self.comparisons},
                {one.name: one.metrics[metric].simulated for one in self.comparisons},
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

    def _spread(self, metric: str) -> Spread:
        errors = {one.name: one.metrics[metric] for one in self.comparisons}
        middle = median(abs(error.error) for error in errors.values())
        where = max(errors, key=lambda name: abs(errors[name].error))
        num_missed = sum(not error.is_met for error in errors.values())
        is_met = not num_missed and (self.asked.median is None or middle <= self.asked.median)
        return Spread(metric, middle, errors[where].error, where, num_missed, is_met)


def compare_sides(name: str, asked: Asked, measured: Side, simulated: Sequence[Side]) -> Comparison:
    """Of several simulations metrics and stages are means, distributions are of all together, and what does not depend
    on time is of the first.
    """
    first = simulated[0]
    return Comparison(
        name,
        measured.summary["completed"],
        {
            metric: MetricError(
                measured.summary[metric], fmean(side.summary[metric] for side in simulated), asked_of(asked, metric)
            )
            for metric in METRICS
        },
        _stages(measured.records, [side.records for side in simulated]),
        {
            time: ks_distance(
                _samples(measured.records, time), [x for side in simulated for x in _samples(side.records, time)]
            )
            for time in ("ttft", "tpot", "e2e_latency")
        },
        compare_counts(measured.records, measured.journal, first.records, first.journal),
        equal_prefixes(measured.journal, first.journal),
    )


def asked_of(asked: Asked, metric: str) -> float | None:
    """In each variant."""
    if metric.startswith("p99"):
        return asked.p99
    return asked.mean if metric.startswith(("mean", "request")) else None


def _stages(measured: RunRecords, simulated: Sequence[RunRecords]) -> dict[str, MetricError]:
    ours, *theirs = (
        {stage.stage: stage.mean_ms for stage in stage_times(records.requests)} for records in (measured, *simulated)
    )
    return {
        stage: MetricError(mean_ms, fmean(of.get(stage, 0.0) for of in theirs), None) for stage, mean_ms in ours.items()
    }


def _samples(records: RunRecords, time: str) -> Sequence[float]:
    done = [r for r in records.requests if r.outcome == "finished"]
    if time == "tpot":
        return [tpot_ms(r) for r in done if r.num_output_tokens > 1]
    return [ttft_ms(r) if time == "ttft" else e2e_ms(r) for r in done]


def _errors_json(errors: Mapping[str, MetricError]) -> dict[str, Any]:
    return {
        name: {"measured": one.measured, "simulated": one.simulated, "error": one.error} for name, one in errors.items()
    }
