"""Runs of clusters, each with the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyarrow import parquet

from pdsim.scenario.build import requests_of
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.study.design import Changes
from pdsim.study.identity import key_of
from pdsim.study.plan import Planner, Point
from pdsim.study.planning.outcome import Outcome, read_outcome
from pdsim.study.planning.slo import Slo, Term
from pdsim.study.questions.base import Base
from pdsim.study.running import Work
from pdsim.study.store import Store
from pdsim.study.undecided import SIZE_FIELDS, Sizes, sizes_of
from pdsim.workload.request_spec import classes_of


class Trials:
    """A cluster is what changes the base scenario."""

    def __init__(self, base: Base, slo: Slo, num_seeds: int, store: Store, work: Work) -> None:
        self.base = base
        self.slo = slo
        self._store = store
        self._work = work
        seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(base.path, base.path, changes=base.changes, seeds=seeds)

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
        return sizes_of(self.base.changed(changes), parquet.read_table(path, columns=list(SIZE_FIELDS)).to_pylist()[0])

    def limit(self, changes: Changes, term: Term) -> Limit:
        """The resource that limits a cluster in a term of the SLO."""
        scenario = self.base.changed(changes)
        classes = classes_of(requests_of(scenario)) if term.request_class else {}

        def measure(result: RunResult) -> Mapping[str, float]:
            requests = result.records.requests
            return {str(term): term.strain([r for r in requests if term.covers(classes.get(r.request_id, ""))])}

        (found,) = limits(sensitivities(scenario, measure=measure))
        return found

    def grown(self, factor: float) -> Changes | None:
        """The same requests in less time, or more at once; None: the load cannot be scaled."""
        scenario = self.base.scenario
        if (concurrency := getattr(scenario.client, "concurrency", None)) is not None:
            return {"client.concurrency": round(concurrency * factor)}
        arrivals = getattr(scenario.client, "arrivals", None)
        if (rate := getattr(arrivals, "rate_per_s", None)) is not None:
            return {"client.arrivals.rate": f"{rate * factor:g} /s"}
        speedup = getattr(scenario.workload, "speedup", None)
        return None if speedup is None or arrivals is not None else {"workload.speedup": speedup * factor}

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
