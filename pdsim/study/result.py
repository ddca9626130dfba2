"""A sweep's result: each point's estimates over its replications, and goodput."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.metrics.run_folder import load_pandas
from pdsim.metrics.summary_rows import Ranges, ranges
from pdsim.scenario.loading import Changes
from pdsim.study.estimate import Estimate, estimate
from pdsim.study.sweep_file import SloSettings
from pdsim.study.tasks import described, metrics

_ARRAYS = ("ttft_ns", "e2e_ns", "output_tokens")
"""Columns that have a number for each request that finished."""


class Attained(NamedTuple):
    attainment: float
    """Share of all requests that were sent; those that failed do not meet it."""
    goodput_per_gpu: float
    """Requests that meet it, per second and GPU."""
    ttft_ms: float
    """TTFT of finished requests at the percentile that is to meet the SLO; so is TPOT."""
    tpot_ms: float


def attained(slo: SloSettings, row: Any, ttft_ns: Any, e2e_ns: Any, output_tokens: Any) -> Attained:
    """Result of a row and its arrays over finished requests. A request of one token has no time per token to meet."""
    import numpy as np  # noqa: PLC0415

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


class ClassAttainment(NamedTuple):
    """Share of an SLO that the requests of one class attained."""

    sent: int
    attainment: float


@dataclass(frozen=True)
class Replication:
    """A run: its row, and what it attained of each SLO."""

    row: Mapping[str, Any]
    slos: Mapping[str, Attained]
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """Resolved, without its workload; empty: the run has no result."""
    classes: Mapping[str, Mapping[str, ClassAttainment]] = field(default_factory=dict)
    """Results by SLO and class, where requests have classes."""


@dataclass(frozen=True)
class PointResult:
    number: int
    changes: Changes
    replications: Sequence[Replication]
    ends: "Sequence[PointResult]" = ()
    """The point at its fastest and its slowest times, where no server was measured and the sweep simulated both."""

    @property
    def error(self) -> str:
        """Reason why it has no result; empty if it has one."""
        return next((str(r.row["message"]) for r in self.replications if r.row["status"] != "ok"), "")

    @property
    def is_saturated(self) -> bool:
        """Its load is more than it can take: its latencies say nothing."""
        return any(r.row["saturated"] for r in self.replications)

    @property
    def warnings(self) -> list[str]:
        """Parts of all its runs that lie outside what was measured."""
        return list(dict.fromkeys(warning for r in self.replications for warning in r.row.get("warnings") or ()))

    @property
    def failures(self) -> str:
        """Requests that failed though the scenario asks for no failure, of one run, and why; empty: none did."""
        return next((r.row["failures"] for r in self.replications if r.row.get("failures")), "")

    @property
    def num_gpus(self) -> int:
        return int(self.replications[0].row["gpus"])

    def metric(self, name: str) -> Estimate:
        """A number of the summary, such as p99_ttft_ms; 0 of a time that no request had. The point has a result."""
        return estimate([r.row[name] or 0.0 for r in self.replications])

    def per_gpu(self, name: str) -> Estimate:
        return self.metric(name).divided(self.num_gpus)

    @property
    def ranges(self) -> Ranges:
        """Least and most of the means, over the point and its ends."""
        return ranges([point.means for point in (self, *self.ends)]) if self.ends else {}

    @property
    def means(self) -> dict[str, float]:
        """Means of the numbers that it has; none of one without a result."""
        return {} if self.error else {name: self.metric(name).mean for name in metrics() if self._has(name)}

    def attainment(self, slo: str) -> Estimate:
        return estimate([r.slos[slo].attainment for r in self.replications])

    def goodput_per_gpu(self, slo: str) -> Estimate:
        return estimate([r.slos[slo].goodput_per_gpu for r in self.replications])

    def meets(self, slo: str, wanted: SloSettings) -> bool:
        return not self.error and not self.is_saturated and self.attainment(slo).mean >= wanted.attainment

    def to_json(self) -> dict[str, Any]:
        head = {"point": self.number, "fields": self.changes}
        if self.error:
            return {**head, "error": self.error}
        slos = {
            name: {
                "attainment": self.attainment(name)._asdict(),
                "goodput_per_gpu": self.goodput_per_gpu(name)._asdict(),
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
    """Points in the order of the sweep file. The folder has points/*.json, plan.jsonl and log.jsonl."""

    name: str
    folder: Path
    points: Sequence[PointResult]
    slos: Mapping[str, SloSettings]
    num_computed: int = 0
    num_kept: int = 0
    """Runs that were in the folder before."""
    num_damaged: int = 0
    """Runs that were there and could not be read: a sweep computes them again, a reader leaves their points out."""

    @property
    def warnings(self) -> list[str]:
        return [*warnings_of(self.points), *failures_of_points(self.points)]

    @property
    def failures(self) -> Counter[str]:
        """Numbers of points without a result, by why they have none."""
        return Counter(point.error for point in self.points if point.error)

    def best(self, slo: str) -> list[PointResult]:
        """Points with a result: first those that meet the SLO, by goodput per GPU; saturated ones last."""
        wanted = self.slos[slo]

        def rank(point: PointResult) -> tuple[bool, bool, float, int]:
            goodput = point.goodput_per_gpu(slo).mean
            return (point.is_saturated, not point.meets(slo, wanted), -goodput, point.number)

        return sorted((point for point in self.points if not point.error), key=rank)

    def leading(self, count: int) -> list[PointResult]:
        """The best points of each SLO, up to a count; without SLOs, those with the most requests per GPU."""
        if self.slos:
            return list({p.number: p for slo in self.slos for p in self.best(slo)[:count]}.values())
        return sorted((point for point in self.points if not point.error), key=rate_per_gpu, reverse=True)[:count]

    @property
    def table(self) -> Any:
        """A pandas DataFrame with a row for each point and seed: the sweep's fields, and the columns of the shards.

        Points with a range have its ends beside their numbers: mean_ttft_ms_least and mean_ttft_ms_most.

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
    """A line for all points: how many lie outside what was measured, and the first of them."""
    warned = [point for point in points if point.warnings]
    if not warned:
        return []
    first = warned[0].warnings[0]
    if all(point.warnings == [first] for point in points if not point.error):
        return [first]
    return [f"{len(warned)} of {len(points)}, such as {described(warned[0].changes)}: {first}"]


def failures_of_points(points: Sequence[PointResult]) -> list[str]:
    """A line for all points in which requests failed: how many, and the first of them."""
    failed = [point for point in points if point.failures]
    if not failed:
        return []
    return [f"{len(failed)} of {len(points)}, such as {described(failed[0].changes)}: {failed[0].failures}"]


def replication(row: Mapping[str, Any], slos: Mapping[str, SloSettings]) -> Replication:
    """A run by its shard's row."""
    row = dict(row)
    scenario = json.loads(row.pop("identity"))["scenario"]
    arrays, classes = [row.pop(name) for name in _ARRAYS], row.pop("classes", None)
    if row["status"] != "ok":
        return Replication(row, {})
    if not slos:
        return Replication(row, {}, scenario)
    import numpy as np  # noqa: PLC0415  slow to import

    arrays = [np.asarray(values, np.int64) for values in arrays]
    found = {name: attained(slo, row, *arrays) for name, slo in slos.items()}
    by_class = {}
    if classes:
        classes = np.asarray(classes, str)
        by_class = {name: _by_class(slo, row, classes, arrays) for name, slo in slos.items()}
    return Replication(row, found, scenario, by_class)


def _by_class(slo: SloSettings, row: Any, classes: Any, arrays: Sequence[Any]) -> dict[str, ClassAttainment]:
    """classes: of all requests, those that finished first."""
    found = {}
    for name in dict.fromkeys(classes.tolist()):
        is_of = classes == name
        done, sent = is_of[: len(arrays[0])], int(is_of.sum())
        sent_row = {**row, "completed": sent, "failed": 0, "unfinished": 0}
        share = attained(slo, sent_row, *(array[done] for array in arrays)).attainment
        found[name] = ClassAttainment(sent, share)
    return found
