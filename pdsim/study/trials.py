"""Trials of clusters: runs with the same requests, and their outcomes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.sim.result import RunResult
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.sim.uncertainty.sensitivity import Limit, limits, sensitivities
from pdsim.study.base import Base
from pdsim.study.measurement import Sizes, sizes_of
from pdsim.study.points.engine import Work
from pdsim.study.points.result import PointResult
from pdsim.study.points.tasks import Planner, Point, key_of
from pdsim.study.verdict.outcome import Outcome, outcome_of
from pdsim.study.verdict.readings import Times
from pdsim.study.verdict.slo import Slo, Term


class Trials:
    """Runs clusters: each is a set of changes to the base scenario."""

    def __init__(self, base: Base, slo: Slo, num_seeds: int, work: Work) -> None:
        self.base = base
        self.slo = slo
        self._work = work
        self.seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(
            base.where, base.path, changes=base.changes, seeds=self.seeds, own_itl=slo.needs_own_itl
        )

    def at(self, changes: Changes) -> "Trials":
        """Trials of a changed base, one run of each cluster."""
        return Trials(self.base.with_changes(changes), self.slo, 1, self._work)

    def outcomes(self, changes: Sequence[Changes]) -> list[Outcome]:
        """Outcomes of clusters, whose runs end as soon as they miss the SLO."""
        return self._outcomes([self._ending_early(point) for point in self._planner.plan(changes)])

    def whole(self, changes: Sequence[Changes]) -> list[Outcome]:
        return self._outcomes(self._planner.plan(changes))

    def repeated(self, changes: Sequence[Changes]) -> list[list[Outcome]]:
        """Outcomes of each cluster with slightly faster and slower messages, which move its numbers by chance."""
        found = iter(self.whole([{**one, **jitter} for one in changes for jitter in self.base.jittered]))
        return [list(islice(found, len(JITTERS))) for _ in changes]

    def whole_runs(self, changes: Sequence[Changes]) -> list[list[dict[str, Any]]]:
        """The rows of each, by seed."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [self._work.rows(point) for point in points]

    def forget_beyond(self, num_points: int) -> None:
        """Forget all points and runs if there are more than a given number."""
        if len(self._planner.points) > num_points:
            self._work.forget(self._planner.points)
            self._planner.forget()

    def sizes(self, changes: Changes) -> Sizes:
        """Typical sizes of a cluster's steps, from its first run."""
        ((row, *_),) = self.whole_runs([changes])
        return sizes_of(self.base.changed(changes), row)

    def results(self, changes: Sequence[Changes]) -> list[PointResult]:
        """Numbers of whole runs, and what they attained."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [self._work.result(point) for point in points]

    def keep_as_sweep(self, name: str, slos: Mapping[str, Slo]) -> None:
        """Makes the folder one that `pdsim report` reads."""
        self._work.store.write_head(name, slos)
        self._work.store.write_plan(self._planner.points)

    def scenario(self, changes: Changes) -> Scenario:
        """The cluster, with the first of the seeds."""
        return self.base.changed({**changes, "seed": self.seeds[0]})

    def limit(self, changes: Changes, term: Term | None) -> Limit:
        """The limiting resource of a cluster in a term of the SLO; None: in its throughput."""
        scenario = self.scenario(changes)

        def measure(result: RunResult) -> Mapping[str, float]:
            if term is None:
                return {"request_throughput": result.summary()["request_throughput"]}
            return {str(term): term.reading(Times.of_requests(result.judged.requests)).value}

        (found,) = limits(sensitivities(scenario, measure=measure, own_itl=self.slo.needs_own_itl))
        return found

    def _ending_early(self, point: Point) -> Point:
        tasks = {
            seed: replace(task, key=key_of(f"{task.identity} {self.slo}"), slo=self.slo)
            for seed, task in point.tasks.items()
        }
        return replace(point, tasks=tasks)

    def _outcomes(self, points: Sequence[Point]) -> list[Outcome]:
        self._work.compute(points)
        return [outcome_of(self._work.rows(point), self.slo) for point in points]
