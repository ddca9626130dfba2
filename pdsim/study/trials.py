"""Simulates clusters with the same requests, and judges each cluster by an SLO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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

Rows = list[dict[str, Any]]


class Trials:
    """Simulates clusters for a plan or a question. Each cluster is given as changes of the base scenario."""

    def __init__(self, base: Base, slo: Slo, num_seeds: int, work: Work) -> None:
        """base: the scenario that the clusters change. slo: SLO by which the clusters are judged. num_seeds: number of
        runs of each cluster, with the seeds 1, 2, ...; a cluster runs once if a trace is sent at its recorded times.
        work: computes the runs.
        """
        self.base = base
        self.slo = slo
        self._work = work
        self.seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(
            base.where, base.path, changes=base.changes, seeds=self.seeds, own_itl=slo.needs_own_itl
        )

    def at(self, changes: Changes) -> "Trials":
        """Returns Trials with the same SLO, whose base scenario has further changes. The new Trials run each cluster
        once, with seed 1.
        """
        return Trials(self.base.with_changes(changes), self.slo, 1, self._work)

    @cached_property
    def repetitions(self) -> list["Trials"]:
        """For each message latency of JITTERS (up to 10 % shorter or longer): Trials of the same load with that
        latency. Empty: the load is no trace that is sent at its recorded times, so runs with other seeds show how
        much numbers change by chance.
        """
        return [self.at(changes) for changes in self.base.jittered] if self.base.is_sample else []

    def outcomes(self, changes: Sequence[Changes]) -> list[Outcome]:
        """Outcomes of clusters. A run ends as soon as it can no longer meet the SLO. The cluster's remaining seeds are
        then not run, nor are they after a run that failed or is saturated.
        """
        return self._seed_by_seed(changes, lambda rows: not _misses(rows[-1]))

    def first_outcomes(self, changes: Sequence[Changes]) -> list[Outcome]:
        """Outcomes of clusters, like `outcomes`. But a cluster that meets the SLO with its first seed is not run with
        the other seeds, so this outcome is provisional.
        """
        return self._seed_by_seed(
            changes, lambda rows: not _misses(rows[-1]) and not (len(rows) == 1 and outcome_of(rows, self.slo).meets)
        )

    def _seed_by_seed(self, changes: Sequence[Changes], goes_on: Callable[[Rows], bool]) -> list[Outcome]:
        """Outcomes of clusters, which are run one seed after another. goes_on: says, from a cluster's rows of results
        so far, whether its next seed is run.
        """
        points = [self._ending_early(point) for point in self._planner.plan(changes)]
        rows: list[Rows] = [[] for _ in points]
        left = list(range(len(points)))
        for seed in self.seeds:
            runs = {i: _with_seeds(points[i], [seed]) for i in left}
            self._work.compute(runs.values())
            for i, run in runs.items():
                rows[i] += self._work.rows(run)
            left = [i for i in left if goes_on(rows[i])]
        return [outcome_of(one, self.slo) for one in rows]

    def whole(self, changes: Sequence[Changes]) -> list[Outcome]:
        return self._outcomes([self._not_ending_early(point) for point in self._planner.plan(changes)])

    def first_ratios(self, changes: Sequence[Changes]) -> list[float]:
        """How near each cluster comes to the SLO's limits: of all terms of the SLO, the largest quotient of a value and
        its limit (Outcome.ratio). Infinite: the run failed, or too many requests failed. Runs each cluster once to the
        end, with the first seed.
        """
        points = [_with_seeds(self._not_ending_early(point), self.seeds[:1]) for point in self._planner.plan(changes)]
        return [outcome.ratio for outcome in self._outcomes(points)]

    def repeated(self, changes: Sequence[Changes]) -> list[list[Outcome]]:
        """For each cluster: its outcomes (over all seeds) with each message latency of JITTERS, slightly shorter or
        longer, which show how much outcomes change by chance. changes: for each cluster, the changes of the scenario
        that make it.
        """
        found = iter(self.whole([{**one, **jitter} for one in changes for jitter in self.base.jittered]))
        return [list(islice(found, len(JITTERS))) for _ in changes]

    def whole_runs(self, changes: Sequence[Changes]) -> list[list[dict[str, Any]]]:
        """For each cluster: the rows of results of its runs, one per seed. The runs do not end early."""
        points = [self._not_ending_early(point) for point in self._planner.plan(changes)]
        self._work.compute(points)
        return [self._work.rows(point) for point in points]

    def forget_beyond(self, num_points: int) -> None:
        """Forgets all clusters and their runs if there are more than `num_points` clusters."""
        if len(self._planner.points) > num_points:
            self._work.forget(self._planner.points)
            self._planner.forget()

    def sizes(self, changes: Changes) -> Sizes:
        """Mean sizes of a cluster's prefill forwards and decode steps, in the run with the first seed."""
        ((row, *_),) = self.whole_runs([changes])
        return sizes_of(self.base.changed(changes), row)

    def results(self, changes: Sequence[Changes]) -> list[PointResult]:
        """Results of clusters over all seeds. The runs do not end early."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [self._work.result(point) for point in points]

    def keep_as_sweep(self, name: str, slos: Mapping[str, Slo]) -> None:
        """Writes sweep.json and plan.jsonl into the folder of the runs, as a sweep does, so that `pdsim report` can
        read the folder. name: name of the sweep. slos: SLOs by name.
        """
        self._work.store.write_head(name, slos)
        self._work.store.write_plan(self._planner.points)

    def scenario(self, changes: Changes) -> Scenario:
        """The scenario of a cluster, with the first seed of the trials."""
        return self.base.changed({**changes, "seed": self.seeds[0]})

    def limit(self, changes: Changes, term: Term | None) -> Limit:
        """The resource that limits a cluster. With a term of the SLO: the resource that changes the term's value most.
        Without a term: the resource that changes the throughput most.
        """
        scenario = self.scenario(changes)

        def measure(result: RunResult) -> Mapping[str, float]:
            if term is None:
                return {"request_throughput": result.summary()["request_throughput"]}
            return {str(term): term.reading(Times.of_requests(result.judged.requests)).value}

        known = [] if term is None else [{str(term): term.reading(times).value} for times in self._made(changes)]
        (found,) = limits(sensitivities(scenario, measure=measure, own_itl=self.slo.needs_own_itl, known=known))
        return found

    def _made(self, changes: Changes) -> list[Times]:
        """Request times of a cluster's run with the first seed, and of its repetitions with other message latencies, as
        far as these runs were made before. Simulates nothing: the list ends where a run is missing.
        """
        found = []
        for variant in ({}, *self.base.jittered):
            if not self._planner.has({**changes, **variant}):
                break
            (point,) = self._planner.plan([{**changes, **variant}])
            run = _with_seeds(self._not_ending_early(point), self.seeds[:1])
            if not all(self._work.has_result(task.key) for task in run.tasks.values()):
                break
            found += [Times.of_row(row) for row in self._work.rows(run)]
        return found

    def _ending_early(self, point: Point) -> Point:
        tasks = {
            seed: replace(task, key=key_of(f"{task.identity} {self.slo}"), slo=self.slo)
            for seed, task in point.tasks.items()
        }
        return replace(point, tasks=tasks)

    def _not_ending_early(self, point: Point) -> Point:
        """A copy of the point whose runs go on to their end even if they can no longer meet the SLO. If a run that was
        allowed to end early has gone on to its end, the copy uses the result of this run.
        """
        early = self._ending_early(point).tasks
        known = {seed: task for seed, task in early.items() if self._work.has_result(task.key)}
        return replace(point, tasks={**point.tasks, **known})

    def _outcomes(self, points: Sequence[Point]) -> list[Outcome]:
        self._work.compute(points)
        return [outcome_of(self._work.rows(point), self.slo) for point in points]


def _misses(row: Mapping[str, Any]) -> bool:
    """True if a run shows that its cluster misses the SLO, whatever the cluster's other seeds give."""
    return row["status"] != "ok" or bool(row["saturated"])


def _with_seeds(point: Point, seeds: Sequence[int]) -> Point:
    return replace(point, tasks={seed: point.tasks[seed] for seed in seeds})
