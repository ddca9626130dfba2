"""Trials of clusters: runs with the same requests, how they came out, and what to measure where that is not known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pdsim.metrics.records import RequestRecord
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.sim.noise import JITTERS
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.study.base import Base
from pdsim.study.engine import Work
from pdsim.study.measurement import Sizes, sizes_of
from pdsim.study.outcome import Outcome, finite, outcome_of
from pdsim.study.readings import Reading, Times
from pdsim.study.result import PointResult
from pdsim.study.slo import Slo, Term
from pdsim.study.tasks import Planner, Point, key_of


@dataclass(frozen=True)
class LoneRequest:
    """The request at the percentile that is missed most, where requests are sent one at a time."""

    cluster: str
    term: Term
    reading: Reading
    ratio: float
    """What was found over the limit; infinite: the request fails."""
    request: RequestRecord

    def __str__(self) -> str:
        request, lack = self.request, self.term.lack(self.reading.value)
        return (
            f"One at a time on {self.cluster}, {lack}: request {request.request_id}, with "
            f"{request.num_prompt_tokens:,} tokens in and {request.num_output_tokens:,} out. Requests alone miss "
            "the SLO on all other servers, too, so more instances do not help"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "term": str(self.term),
            "of_limit": finite(self.ratio),
            "request": self.request.request_id,
            "input_tokens": self.request.num_prompt_tokens,
            "output_tokens": self.request.num_output_tokens,
        }


def lone_request(cluster: str, slo: Slo, requests: Sequence[RequestRecord]) -> LoneRequest | None:
    """requests: of a run in which none waits for another. None: it meets the SLO."""
    judged = slo.judge_requests(requests)
    if judged.meets:
        return None
    term = max(judged.missed, key=judged.ratios.__getitem__)
    ratios = [
        (term.ratio(Times.of_requests([replace(request, request_class=term.request_class)])), place)
        for place, request in enumerate(requests)
        if term.covers(request.request_class) and term.is_about(request.num_output_tokens)
    ]
    above = [(ratio, place) for ratio, place in ratios if ratio >= judged.ratios[term]]
    _, place = min(above, default=max(ratios))
    return LoneRequest(cluster, term, judged.readings[term], judged.ratios[term], requests[place])


class Trials:
    """Runs of clusters, each of which is what changes the base scenario."""

    def __init__(self, base: Base, slo: Slo, num_seeds: int, work: Work) -> None:
        self.base = base
        self.slo = slo
        self._work = work
        self.seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(base.where, base.path, changes=base.changes, seeds=self.seeds)

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
        """Forget all points and their runs, where there are more than so many."""
        if len(self._planner.points) > num_points:
            self._work.forget(self._planner.points)
            self._planner.forget()

    def sizes(self, changes: Changes) -> Sizes:
        """Typical sizes of a cluster's steps, by its first run."""
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

        (found,) = limits(sensitivities(scenario, measure=measure))
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
