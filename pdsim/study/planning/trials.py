"""Runs of clusters, each with the same requests, and what to measure where they leave a question open."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdsim.scenario.cost import GROUPS, Group
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.sim.simulation import simulate
from pdsim.study.engine import Work
from pdsim.study.planning.outcome import LoneRequest, Outcome, lone_request, outcome_of
from pdsim.study.planning.slo import Slo, Term
from pdsim.study.questions.base import Base
from pdsim.study.result import PointResult
from pdsim.study.sweep_file import SloSettings
from pdsim.study.tasks import Planner, Point, key_of
from pdsim.system.catalog import load_model


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Typical sizes of what a cluster computes."""

    prompt_tokens: float
    batch: float
    """Requests of a decode step."""
    context_tokens: float
    """Tokens of each of them."""


def sizes_of(scenario: Scenario, row: Mapping[str, Any]) -> Sizes:
    """Sizes of a run by its summary."""
    _, decoding = scenario.servers
    prompt_tokens, output_tokens = (
        row[f"total_{what}_tokens"] / max(1, row["completed"]) for what in ("input", "output")
    )
    batch = row["mean_running_requests"] / (decoding.instances * decoding.dp)
    return Sizes(prompt_tokens=prompt_tokens, batch=batch, context_tokens=prompt_tokens + output_tokens / 2)


def rounded(tokens: float) -> int:
    """The next size with two digits: what is measured must reach it."""
    step = 10 ** max(0, len(str(round(tokens))) - 2)
    return int(-(-tokens // step) * step)


def measurement(groups: Iterable[Group], scenario: Scenario, sizes: Sizes) -> str:
    """Sentences that name what decides, its size, and the command that measures it; empty without groups."""
    deciding = [group for group in GROUPS if group in set(groups)]
    if not deciding:
        return ""
    prompt, batch = rounded(sizes.prompt_tokens), max(1, round(sizes.batch))
    what: Mapping[Group, str] = {
        "prefill": f"prefill of {prompt:,} tokens",
        "decode": f"decode of {batch:,} requests with {rounded(sizes.context_tokens):,} tokens each",
        "outside": "TTFT of one short prompt",
    }
    flags = {"prefill": f" --longest-prompt {prompt}", "decode": f" --concurrency {batch}", "outside": ""}
    parts = " and ".join(what[group] for group in deciding)
    command = f"pdsim observe URL{''.join(flags[group] for group in deciding)}"
    of_gpu = [group for group in deciding if group != "outside"]
    if of_gpu and load_model(scenario.model).llama is not None:
        command += f", or pdreal measure --model {scenario.model} --only {','.join(of_gpu)}"
    return f"Measure {parts}, {'it decides' if len(deciding) == 1 else 'they decide'}: {command}."


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

    def whole_runs(self, changes: Sequence[Changes]) -> list[list[dict[str, Any]]]:
        """The rows of each, by seed."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [self._work.rows(point) for point in points]

    def sizes(self, changes: Changes) -> Sizes:
        """Typical sizes of a cluster's steps, by its first run."""
        ((row, *_),) = self.whole_runs([changes])
        return sizes_of(self.base.changed(changes), row)

    def results(self, changes: Sequence[Changes]) -> list[PointResult]:
        """Numbers of whole runs, and what they attained."""
        points = self._planner.plan(changes)
        self._work.compute(points)
        return [self._work.result(point) for point in points]

    def keep_as_sweep(self, name: str, slos: Mapping[str, SloSettings]) -> None:
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

    def _outcomes(self, points: Sequence[Point]) -> list[Outcome]:
        self._work.compute(points)
        return [outcome_of(self._work.rows(point), self.slo, is_record=self.base.is_sample) for point in points]
