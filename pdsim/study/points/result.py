"""Results of a sweep: for each point, estimates over its runs, and a judgement by each SLO."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.run_folder import load_pandas
from pdsim.metrics.summary_rows import Ranges, ranges
from pdsim.scenario.loading import Changes
from pdsim.study.points.estimate import Estimate, band, estimate
from pdsim.study.points.tasks import described, metrics
from pdsim.study.verdict.readings import Attainment, Times
from pdsim.study.verdict.slo import Judgement, Slo, mean_judgement

_OF_REQUESTS = ("ttft_ns", "e2e_ns", "output_tokens", "own_itl_ms", "classes", "identity")
"""Columns of a run's row of results that hold a list over requests, or a text, instead of a number of the whole run."""


@dataclass(frozen=True)
class Replication:
    """One run of a point: its row of results, and the judgement of the run by each SLO."""

    row: Mapping[str, Any]
    """The row of results by column, without the columns in _OF_REQUESTS."""
    slos: Mapping[str, Judgement]
    """For each SLO, by its name: the values of the numbers that it limits. Empty: the run has no result, or there are
    no SLOs.
    """
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """The run's scenario with all defaults filled in, without its name, description, checkpoint and workload. Empty:
    the run has no result.
    """
    classes: Mapping[str, Mapping[str, Attainment]] = field(default_factory=dict)
    """By the SLO's name, then by class: how many of the class's requests are within the limits. Empty: requests have no
    classes, the run has no result, or there are no SLOs.
    """


@dataclass(frozen=True)
class PointResult:
    number: int
    """Number of the point in the order of the study, from 1."""
    changes: Changes
    """Changes of the base scenario that make the point."""
    replications: Sequence[Replication]
    """Results of the runs of the point, one per seed."""
    repeats: Sequence[Replication] = ()
    """Results of repeated runs of a point with one seed, with slightly faster and slower messages. Empty: the point has
    several seeds, or its run was not repeated.
    """
    ends: "Sequence[PointResult]" = ()
    """Results of the same point with the fastest and the slowest step times that measured kernels allow. Empty: the
    step times were measured on a server, or the sweep did not simulate the range.
    """

    @property
    def error(self) -> str:
        """Says why the point has no result: the reason of its first failed run. Empty: all its runs have a result."""
        return next((str(r.row["message"]) for r in self.replications if r.row["status"] != "ok"), "")

    @property
    def is_saturated(self) -> bool:
        """True if the cluster could not keep up with the load in at least one of the point's runs. Latencies then
        depend on the length of the run, and mean nothing.
        """
        return any(r.row["saturated"] for r in self.replications)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the point's runs, each text once: about costs that were not measured or are used outside their
        measured sizes, about images and audio, and about crashes of real servers that the run does not model.
        """
        return list(dict.fromkeys(warning for r in self.replications for warning in r.row.get("warnings") or ()))

    @property
    def failures(self) -> str:
        """Text about the first run of the point in which requests failed although no setting of the scenario makes
        requests fail: how many failed, and why. Empty: no run has such failures.
        """
        return next((r.row["failures"] for r in self.replications if r.row.get("failures")), "")

    @property
    def num_gpus(self) -> int:
        return int(self.replications[0].row["gpus"])

    def metric(self, name: str) -> Estimate:
        """Estimate of a number of the runs' rows of results, such as p99_ttft_ms. A run that lacks the number, such as
        a time that no request has, counts as 0. The point must have a result.
        """
        return self.estimated(lambda run: run.row[name] or 0.0)

    def estimated(self, read: Callable[[Replication], float]) -> Estimate:
        """Estimate of the number that `read` takes from each run. With one run per seed: the mean over the seeds, and
        half of its 95 % interval. If a single run was repeated: the number of the run, and the largest change of the
        number in the repetitions.
        """
        found = [read(run) for run in self.replications]
        return band(found[0], [read(run) for run in self.repeats]) if self.repeats else estimate(found)

    def repeated(self, points: "Sequence[PointResult]") -> "PointResult":
        """A copy of this point, with the first run of each of `points` as its repetitions. If this point or one of
        `points` failed: this point itself.
        """
        if self.error or any(point.error for point in points):
            return self
        return replace(self, repeats=[point.replications[0] for point in points])

    def per_gpu(self, name: str) -> Estimate:
        return self.metric(name).divided(self.num_gpus)

    @property
    def ranges(self) -> Ranges:
        """Smallest and largest mean of each throughput and latency (RANGED_FIELDS), over the point and its results with
        the fastest and slowest step times. Empty: `ends` is empty, or one of these results is missing.
        """
        return ranges([point.means for point in (self, *self.ends)]) if self.ends else {}

    @property
    def means(self) -> dict[str, float]:
        """The point's numbers by name, each as the mean over its runs. A number that a run lacks is left out. Empty:
        the point has no result.
        """
        return {} if self.error else {name: self.metric(name).mean for name in metrics() if self._has(name)}

    def attainment(self, slo: str) -> Estimate:
        return self.estimated(lambda run: run.slos[slo].attained.share)

    def goodput_per_gpu(self, slo: str) -> Estimate:
        return self.estimated(lambda run: run.slos[slo].attained.goodput_per_s).divided(self.num_gpus)

    def judgement(self, slo: str) -> Judgement:
        """Judgement of the point's runs by the SLO of this name. The point must have a result."""
        return mean_judgement([r.slos[slo] for r in self.replications])

    def meets(self, slo: str) -> bool:
        return not self.error and not self.is_saturated and self.judgement(slo).meets

    def to_json(self) -> dict[str, Any]:
        head = {"point": self.number, "fields": self.changes}
        if self.error:
            return {**head, "error": self.error}
        slos = {
            name: {
                "attainment": self.attainment(name)._asdict(),
                "goodput_per_gpu": self.goodput_per_gpu(name)._asdict(),
                "meets": self.meets(name),
                "terms": [one.to_json() for one in self.judgement(name).readings.values()],
            }
            for name in self.replications[0].slos
        }
        numbers = {name: self.metric(name)._asdict() for name in metrics() if self._has(name)}
        state = {"saturated": self.is_saturated, "gpus": self.num_gpus, "warnings": self.warnings}
        ranged = {"ranges": self.ranges} if self.ends else {}
        return {**head, **state, "slos": slos, "metrics": numbers, **ranged}

    def _has(self, name: str) -> bool:
        return all(r.row[name] is not None for r in self.replications)


@dataclass(frozen=True)
class SweepResult:
    """Results of the points of a sweep, in the order in which they were planned. The sweep's folder has points/*.json,
    plan.jsonl, sweep.json and log.jsonl.
    """

    name: str
    folder: Path
    points: Sequence[PointResult]
    slos: Mapping[str, Slo]
    """SLOs that judge the points, by name."""
    num_computed: int = 0
    """Number of runs that this command has computed, in contrast to runs whose results were stored before."""
    num_kept: int = 0
    """Number of runs whose results an earlier command had stored. Runs that a sweep computes again do not count."""
    num_damaged: int = 0
    """Number of runs whose files are damaged. A sweep computes these runs again; `read_sweep` leaves out their
    points.
    """

    @property
    def warnings(self) -> list[str]:
        return [*warnings_of(self.points), *failures_of_points(self.points)]

    @property
    def failures(self) -> Counter[str]:
        """Number of points without a result, by the reason."""
        return Counter(point.error for point in self.points if point.error)

    def best(self, slo: str) -> list[PointResult]:
        """Points with a result, sorted for the SLO of this name. Points that meet the SLO come first, the highest
        goodput per GPU first. Then come points that miss the SLO; saturated points come last.
        """

        def rank(point: PointResult) -> tuple[bool, bool, float, int]:
            goodput = point.goodput_per_gpu(slo).mean
            return (point.is_saturated, not point.meets(slo), -goodput, point.number)

        return sorted((point for point in self.points if not point.error), key=rank)

    def as_good(self, slo: str) -> list[PointResult]:
        """Other points that meet the SLO of this name, and whose goodput has an interval (Estimate.half_width) that
        overlaps the best point's. Empty: there are none, runs give no interval, or the best point misses the SLO.
        """
        meeting = [point for point in self.best(slo) if point.meets(slo)]
        goodput = [point.goodput_per_gpu(slo) for point in meeting]
        return [point for point, one in zip(meeting[1:], goodput[1:], strict=True) if one.overlaps(goodput[0])]

    def leading(self, count: int) -> list[PointResult]:
        """The first `count` points in the order of `best` for each SLO, each point once. Without SLOs: the `count`
        points with the most requests per second and GPU.
        """
        if self.slos:
            return list({p.number: p for slo in self.slos for p in self.best(slo)[:count]}.values())
        return sorted((point for point in self.points if not point.error), key=rate_per_gpu, reverse=True)[:count]

    @property
    def table(self) -> Any:
        """A pandas DataFrame with a row for each point and seed. Its columns are the point's number, the sweep's
        fields, and the columns of the run's row of results (Replication.row).

        If a point was also simulated with the fastest and slowest step times, further columns have the range, such as
        mean_ttft_ms_least and mean_ttft_ms_most.

        Raises PandasMissingError without pandas.
        """
        rows = [
            {"point": point.number, **point.changes, **run.row, **_columns(point.ranges)}
            for point in self.points
            for run in point.replications
        ]
        return load_pandas().DataFrame(rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": self.name,
            "folder": str(self.folder),
            "computed": self.num_computed,
            "kept": self.num_kept,
            "damaged": self.num_damaged,
            "warnings": self.warnings,
            "best": {slo: [point.number for point in self.best(slo)] for slo in self.slos},
            "points": [point.to_json() for point in self.points],
        }


def _columns(found: Ranges) -> dict[str, float]:
    return {
        f"{name}_{end}": value
        for name, ends in found.items()
        for end, value in zip(("least", "most"), ends, strict=True)
    }


def rate_per_gpu(point: PointResult) -> float:
    return point.per_gpu("request_throughput").mean


def warnings_of(points: Sequence[PointResult]) -> list[str]:
    """A sentence on the points that have warnings (PointResult.warnings): how many, and the first warning of the first
    of them. If all points with a result have only this same warning: the warning alone. Empty: there are none.
    """
    warned = [point for point in points if point.warnings]
    if not warned:
        return []
    first = warned[0].warnings[0]
    if all(point.warnings == [first] for point in points if not point.error):
        return [first]
    return [f"{len(warned)} of {len(points)}, such as {described(warned[0].changes)}: {first}"]


def failures_of_points(points: Sequence[PointResult]) -> list[str]:
    """A sentence on the points in which requests failed (PointResult.failures): how many, and the first of them. Empty:
    there are none.
    """
    failed = [point for point in points if point.failures]
    if not failed:
        return []
    return [f"{len(failed)} of {len(points)}, such as {described(failed[0].changes)}: {failed[0].failures}"]


def replication(row: Mapping[str, Any], slos: Mapping[str, Slo]) -> Replication:
    """Reads one run of a point from its row of results, and judges the run by each SLO."""
    fields = {name: value for name, value in row.items() if name not in _OF_REQUESTS}
    if row["status"] != "ok":
        return Replication(fields, {})
    scenario = json.loads(row["identity"])["scenario"]
    if not slos:
        return Replication(fields, {}, scenario)
    times = Times.of_row(row)
    names = dict.fromkeys(row["classes"] or ())
    by_class = {slo: {name: one.attained(times, name) for name in names} for slo, one in slos.items()} if names else {}
    return Replication(fields, {name: slo.judge([times]) for name, slo in slos.items()}, scenario, by_class)
