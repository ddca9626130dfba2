"""Runs of clusters, each with the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pdsim.scenario.schema import Scenario
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.sim.simulation import simulate
from pdsim.study.design import Changes
from pdsim.study.identity import key_of
from pdsim.study.plan import Planner, Point
from pdsim.study.planning.lone_request import LoneRequest, lone_request
from pdsim.study.planning.outcome import Outcome, read_outcome
from pdsim.study.planning.slo import Slo, Term
from pdsim.study.questions.base import Base
from pdsim.study.result import PointResult, read_point
from pdsim.study.running import Work
from pdsim.study.shard import read_shard
from pdsim.study.store import Store
from pdsim.study.sweep_file import SloSettings
from pdsim.study.undecided import Sizes, sizes_of


class Trials:
    """A cluster is what changes the base scenario."""

    def __init__(self, base: Base, slo: Slo, num_seeds: int, store: Store, work: Work) -> None:
        self.base = base
        self.slo = slo
        self._store = store
        self._work = work
        self.seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(base.path, base.path, changes=base.changes, seeds=self.seeds)

    def at(self, changes: Changes) -> "Trials":
        """Trials of a changed base, one run of each cluster."""
        return Trials(self.base.with_changes(changes), self.slo, 1, self._store, self._work)

    def outcomes(self, changes: Sequence[Changes]) -> list[Outcome]:
        """Their runs end as soon as they miss the SLO."""
        points = [self._ending_early(point) for point in self._planner.plan(changes)]
        return self._read(self._computed(points))

    def whole(self, changes: Sequence[Changes]) -> list[Outcome]:
        return self._read(self.whole_runs(changes))

    def whole_runs(self, changes: Sequence[Changes]) -> list[list[Path]]:
        """The shards of each, by seed."""
        return self._computed(self._planner.plan(changes))

    def sizes(self, changes: Changes) -> Sizes:
        """Typical sizes of a cluster's steps, by its first run."""
        ((path, *_),) = self.whole_runs([changes])
        return sizes_of(self.base.changed(changes), read_shard(path))

    def results(self, changes: Sequence[Changes], slos: Mapping[str, SloSettings]) -> list[PointResult]:
        """Numbers of whole runs, and what they attained."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [read_point(self._store, point, slos) for point in points]

    def keep_as_sweep(self, name: str, slos: Mapping[str, SloSettings]) -> None:
        """Makes the folder one that `pdsim report` reads."""
        self._store.write_head(name, slos)
        self._store.write_plan(self._planner.points)

    def scenario(self, changes: Changes) -> Scenario:
        """The cluster, with the first of the seeds."""
        return self.base.changed({**changes, "seed": self.seeds[0]})

    def limit(self, changes: Changes, term: Term | None) -> Limit:
        """The limiting resource of a cluster in a term of the SLO; None: in its throughput."""
        scenario = self.scenario(changes)

        def measure(result: RunResult) -> Mapping[str, float]:
            if term is None:
                return {"request_throughput": result.summary()["request_throughput"]}
            requests = result.records.requests
            return {str(term): term.strain([r for r in requests if term.covers(r.request_class)])}

        (found,) = limits(sensitivities(scenario, measure=measure))
        return found

    def lone_request(self, label: str, changes: Changes) -> LoneRequest | None:
        """The request that a run of such a cluster misses the SLO by."""
        return lone_request(label, self.slo, simulate(self.scenario(changes)).records.requests)

    def _ending_early(self, point: Point) -> Point:
        tasks = {
            seed: replace(task, key=key_of(f"{task.identity} {self.slo}"), slo=self.slo)
            for seed, task in point.tasks.items()
        }
        return replace(point, tasks=tasks)

    def _computed(self, points: Sequence[Point]) -> list[list[Path]]:
        self._work.compute(points)
        return [[self._store.path(task.key) for task in point.tasks.values()] for point in points]

    def _read(self, shards: Sequence[list[Path]]) -> list[Outcome]:
        return [read_outcome(paths, self.slo, is_record=self.base.is_sample) for paths in shards]
