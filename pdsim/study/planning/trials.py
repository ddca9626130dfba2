"""Trials of clusters: runs with the same requests, how they came out, and what to measure where that is not known."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from statistics import fmean
from typing import Any

import numpy as np

from pdsim.metrics.records import RequestRecord
from pdsim.scenario.cost import GROUPS, Group
from pdsim.scenario.loading import Changes
from pdsim.scenario.schema import Scenario
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.sim.simulation import simulate
from pdsim.study.engine import Work
from pdsim.study.planning.slo import Slo, Term
from pdsim.study.questions.base import Base
from pdsim.study.result import PointResult
from pdsim.study.sweep_file import SloSettings
from pdsim.study.tasks import Planner, Point, key_of
from pdsim.system.catalog import load_model

SATURATED = "cannot take the load"


@dataclass(frozen=True)
class Attainment:
    """Requests within all limits that cover them, of all seeds."""

    num_requests: int
    share: float
    goodput_per_s: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of all seeds together."""

    meets: bool
    reason: str
    """Reason why it does not; empty if it does."""
    num_ended: int
    """Requests that had ended when it was sure."""
    attained: Attainment | None = field(default=None, kw_only=True)
    """None: the run was not whole."""
    classes: Mapping[str, Attainment] = field(default_factory=dict, kw_only=True)
    """Attainment of each class that requests have."""
    strains: Mapping[Term, float]
    """Each term's percentile over its limit; empty if the run was not whole."""

    @property
    def strain(self) -> float:
        """The largest; infinite if they are not known."""
        return max(self.strains.values(), default=inf)

    @property
    def worst(self) -> Term | None:
        """The term that it is nearest to, or misses most."""
        return max(self.strains, key=self.strains.__getitem__, default=None)

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return f"it {SATURATED}" if self.reason == SATURATED else self.reason

    @property
    def lack(self) -> str:
        """Terms that it misses, and how far; the reason where that is not known."""
        lacks = [term.lack(strain) for term, strain in self.strains.items() if strain > 1]
        return self.why if self.reason == SATURATED or not lacks else " and ".join(lacks)

    def to_json(self) -> dict[str, Any]:
        strains = {term: strain if isfinite(strain) else None for term, strain in self.strains.items()}
        of_limits = {str(term): strain for term, strain in strains.items()}
        found = {"meets": self.meets, "reason": self.reason, "of_limits": of_limits}
        if self.attained is None:
            return {**found, "attained": None, "goodput_per_s": None}
        classes = {
            name: asdict(attained)
            | {"of_limits": {term.name_in_class: s for term, s in strains.items() if term.request_class == name}}
            for name, attained in self.classes.items()
        }
        joint = {"attained": self.attained.share, "goodput_per_s": self.attained.goodput_per_s}
        return {**found, **joint, **({"classes": classes} if classes else {})}


def outcome_of(rows: Sequence[Mapping[str, Any]], slo: Slo, *, is_record: bool) -> Outcome:
    """The outcome of a point by its rows, one for each seed. Generated arrivals must not leave a growing queue;
    a record, with its own times, is judged as it was.
    """
    num_ended = sum(row["completed"] or 0 for row in rows)
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return Outcome(meets=False, reason=bad[0]["message"], num_ended=num_ended, strains={})
    strains = {term: fmean(term.strain_of_row(row) for row in rows) for term in slo.terms}
    missed = [term.missed for term, strain in strains.items() if strain > 1]
    missed += [row["failures"] for row in rows if missed and row["failures"]][:1]
    reason = SATURATED if not is_record and any(row["saturated"] for row in rows) else " and ".join(missed)
    kept = [slo.kept(row) for row in rows]
    names = sorted({name for row in rows for name in row["classes"] or ()})
    return Outcome(
        meets=not reason,
        reason=reason,
        num_ended=num_ended,
        strains=strains,
        attained=_attainment(rows, kept),
        classes={name: _attainment(rows, kept, name) for name in names},
    )


def _attainment(rows: Sequence[Mapping[str, Any]], kept: Sequence[Any], name: str | None = None) -> Attainment:
    """Attainment of one class; None: of all requests."""
    num_sent, num_kept, rates = 0, 0, []
    for row, is_kept in zip(rows, kept, strict=True):
        num_ended = row["completed"] + row["failed"] + row["unfinished"]
        is_of_class = np.full(num_ended, fill_value=True) if name is None else np.asarray(row["classes"], str) == name
        count = int((is_kept & is_of_class[: len(is_kept)]).sum())
        num_sent += int(is_of_class.sum())
        num_kept += count
        rates.append(count / row["duration"] if row["duration"] else 0.0)
    return Attainment(num_sent, num_kept / max(1, num_sent), fmean(rates))


@dataclass(frozen=True)
class LoneRequest:
    """The request at the percentile that is missed most, where requests are sent one at a time."""

    cluster: str
    term: Term
    strain: float
    """The percentile over its limit; infinite: the request fails."""
    request: RequestRecord

    def __str__(self) -> str:
        request = self.request
        return (
            f"One at a time on {self.cluster}, {self.term.lack(self.strain)}: request {request.request_id}, with "
            f"{request.num_prompt_tokens:,} tokens in and {request.num_output_tokens:,} out. Requests alone miss "
            "the SLO on all other servers, too, so more instances do not help"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "term": str(self.term),
            "of_limit": self.strain if isfinite(self.strain) else None,
            "request": self.request.request_id,
            "input_tokens": self.request.num_prompt_tokens,
            "output_tokens": self.request.num_output_tokens,
        }


def lone_request(cluster: str, slo: Slo, requests: Sequence[RequestRecord]) -> LoneRequest | None:
    """requests: of a run in which none waits for another. None: it meets the SLO."""
    found = [(*_at_percentile(term, requests), term) for term in slo.terms]
    strain, request, term = max(found, key=lambda one: one[0])
    if request is None or strain <= 1:
        return None
    return LoneRequest(cluster, term, strain, request)


def _at_percentile(term: Term, requests: Sequence[RequestRecord]) -> tuple[float, RequestRecord | None]:
    """The percentile over its limit, and the request that has it; None: the term is about no request."""
    strains = sorted(
        (term.strain([request]) if request.outcome == "finished" else inf, place)
        for place, request in enumerate(requests)
        if term.covers(request.request_class) and term.is_about(request.num_output_tokens)
    )
    if not strains:
        return 0.0, None
    strain, place = strains[len(strains) - 1 - term.num_allowed(len(strains))]
    return strain, requests[place]


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
