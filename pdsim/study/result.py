"""What a sweep found: each point's estimates over its replications, read from the shards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import parquet

from pdsim.metrics.run_folder import load_pandas
from pdsim.study.design import Changes
from pdsim.study.goodput import Attained, attained
from pdsim.study.identity import scenario_of
from pdsim.study.interval import Estimate, estimate
from pdsim.study.plan import Point, described
from pdsim.study.shard import metrics
from pdsim.study.store import Store
from pdsim.study.sweep_file import SloSettings


@dataclass(frozen=True)
class Replication:
    """One run: its row, and what it attained of each SLO."""

    row: Mapping[str, Any]
    slos: Mapping[str, Attained]
    scenario: Mapping[str, Any] = field(default_factory=dict)
    """Resolved, without its workload; empty: the run has no result."""


@dataclass(frozen=True)
class PointResult:
    number: int
    changes: Changes
    replications: Sequence[Replication]

    @property
    def error(self) -> str:
        """Why it has no result; empty if it has one."""
        return next((str(r.row["message"]) for r in self.replications if r.row["status"] != "ok"), "")

    @property
    def is_saturated(self) -> bool:
        """Its load is more than it can take: its latencies say nothing."""
        return any(r.row["saturated"] for r in self.replications)

    @property
    def warnings(self) -> list[str]:
        """What of it lies outside what was measured, of all its runs."""
        return list(dict.fromkeys(warning for r in self.replications for warning in r.row.get("warnings") or ()))

    @property
    def num_gpus(self) -> int:
        return int(self.replications[0].row["gpus"])

    def metric(self, name: str) -> Estimate:
        """Of a number of the summary, such as p99_ttft_ms. The point has a result."""
        return estimate([r.row[name] for r in self.replications])

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
        told = {"saturated": self.is_saturated, "gpus": self.num_gpus, "warnings": self.warnings}
        return {**head, **told, "slos": slos, "metrics": numbers}

    def _has(self, name: str) -> bool:
        return all(r.row[name] is not None for r in self.replications)


@dataclass(frozen=True)
class SweepResult:
    """Points in the order of the sweep file. The folder has points/*.parquet, plan.parquet and log.jsonl."""

    name: str
    folder: Path
    points: Sequence[PointResult]
    slos: Mapping[str, SloSettings]
    num_computed: int
    num_kept: int
    """Runs that were in the folder before."""
    num_damaged: int
    """Runs that were there and could not be read: a sweep computes them again, a reader leaves their points out."""

    @property
    def warnings(self) -> list[str]:
        """One line for all points: how many lie outside what was measured, and the first of them."""
        warned = [point for point in self.points if point.warnings]
        if not warned:
            return []
        first = warned[0].warnings[0]
        if all(point.warnings == [first] for point in self.points if not point.error):
            return [first]
        return [f"{len(warned)} of {len(self.points)}, such as {described(warned[0].changes)}: {first}"]

    def best(self, slo: str) -> list[PointResult]:
        """Those with a result: first those that meet the SLO, by goodput per GPU; saturated ones last."""
        wanted = self.slos[slo]

        def rank(point: PointResult) -> tuple[bool, bool, float, int]:
            goodput = point.goodput_per_gpu(slo).mean
            return (point.is_saturated, not point.meets(slo, wanted), -goodput, point.number)

        return sorted((point for point in self.points if not point.error), key=rank)

    @property
    def table(self) -> Any:
        """A pandas DataFrame with a row for each point and seed: the sweep's fields, and the columns of the shards.

        Raises PandasMissingError without pandas.
        """
        rows = [
            {"point": point.number, **point.changes, **run.row} for point in self.points for run in point.replications
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


def read_point(store: Store, point: Point, slos: Mapping[str, SloSettings]) -> PointResult:
    """All its shards are there."""
    return PointResult(
        point.number, point.changes, replications(store, (task.key for task in point.tasks.values()), slos)
    )


def replications(store: Store, keys: Iterable[str], slos: Mapping[str, SloSettings]) -> list[Replication]:
    return [_replication(store.path(key), slos) for key in keys]


def _replication(path: Path, slos: Mapping[str, SloSettings]) -> Replication:
    table = parquet.read_table(path)
    (row,) = table.drop_columns(["ttft_ns", "e2e_ns", "output_tokens"]).to_pylist()
    scenario = scenario_of(row.pop("identity"))
    if row["status"] != "ok":
        return Replication(row, {})
    arrays = [table[name].combine_chunks().flatten().to_numpy() for name in ("ttft_ns", "e2e_ns", "output_tokens")]
    return Replication(row, {name: attained(slo, row, *arrays) for name, slo in slos.items()}, scenario)
