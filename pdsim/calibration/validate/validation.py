"""Real runs of a matrix beside its simulations, number by number."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from pdsim.calibration.validate.compare import MetricError
from pdsim.calibration.validate.counts import Counts, compare_counts
from pdsim.calibration.validate.matrix import Asked
from pdsim.calibration.validate.ranking import Ranking, rank
from pdsim.metrics.explain import stage_times
from pdsim.metrics.records import RunRecords

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


@dataclass(frozen=True)
class Comparison:
    """One variant."""

    name: str
    num_requests: int
    metrics: dict[str, MetricError]
    stages_ms: dict[str, MetricError]
    """Means."""
    counts: Counts

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.name,
            "num_requests": self.num_requests,
            "metrics": _errors_json(self.metrics),
            "stages_ms": _errors_json(self.stages_ms),
            "counts": self.counts.to_json(),
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


def compare_sides(name: str, asked: Asked, measured: Side, simulated: Side) -> Comparison:
    errors = {
        metric: MetricError(measured.summary[metric], simulated.summary[metric], asked_of(asked, metric))
        for metric in METRICS
    }
    stages_ms = _stages(measured.records, simulated.records)
    counts = compare_counts(measured.records, simulated.records)
    return Comparison(name, measured.summary["completed"], errors, stages_ms, counts)


def asked_of(asked: Asked, metric: str) -> float | None:
    """In each variant."""
    if metric.startswith("p99"):
        return asked.p99
    return asked.mean if metric.startswith(("mean", "request")) else None


def _stages(measured: RunRecords, simulated: RunRecords) -> dict[str, MetricError]:
    ours, theirs = (
        {stage.stage: stage.mean_ms for stage in stage_times(records.requests)} for records in (measured, simulated)
    )
    return {stage: MetricError(mean_ms, theirs.get(stage, 0.0), None) for stage, mean_ms in ours.items()}


def _errors_json(errors: Mapping[str, MetricError]) -> dict[str, Any]:
    return {
        name: {"measured": one.measured, "simulated": one.simulated, "error": one.error} for name, one in errors.items()
    }
