"""From a load and an SLO to the cheapest cluster that meets it, and what speaks for and against it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pdsim.metrics.run_folder import SCENARIO, require_out
from pdsim.scenario.yaml_file import ConfigError, write_yaml
from pdsim.sim.result import RunResult
from pdsim.sim.sensitivity import Limit, limits, sensitivities
from pdsim.study.design import Changes
from pdsim.study.engine import open_engine
from pdsim.study.identity import key_of
from pdsim.study.plan import Planner, Point
from pdsim.study.planning.outcome import Outcome, read_outcome
from pdsim.study.planning.plan import Plan, Row
from pdsim.study.planning.search import cheapest, search
from pdsim.study.planning.slo import Slo
from pdsim.study.planning.space import Candidate, Space
from pdsim.study.questions.base import NUM_SEEDS, AskOptions, Base, base_of
from pdsim.study.running import Progress, Work
from pdsim.study.store import Store

DEFAULT_SLO = "ttft p99 < 2 s, tpot p99 < 50 ms"
MAX_GPUS = 32
_NUM_BELOW = 3
"""Cheaper clusters that are told of."""
_GROWTH = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)


def plan(
    scenario: Path | str | None = None,
    /,
    *,
    trace: Path | str | None = None,
    slo: str = DEFAULT_SLO,
    prices: Mapping[str, float] | None = None,
    max_gpus: int = MAX_GPUS,
    tried: Mapping[str, Sequence[Any]] | None = None,
    changes: Sequence[str] = (),
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    engine: str = "pool",
    out: Path | str | None = None,
    progress: Progress | None = None,
    told: Callable[[str], None] = lambda _line: None,
) -> Plan:
    """Find the cheapest cluster that meets an SLO.

    Args:
        scenario: A scenario file, whose servers stand for all settings but GPU, TP and instances; None: a starter.
        trace: A trace that replaces the workload.
        slo: Percentiles of latencies and their limits: ttft, tpot, e2e.
        prices: Of one hour of each GPU that may be used, by name; None: the scenario's GPUs, at 1.
        max_gpus: The most GPUs of a cluster.
        tried: Values of further fields, by path; routers are tried unless they are given.
        changes: Changes of the scenario, as "dotted.path=value".
        seeds: Runs of each cluster; one of a trace with its own times.
        jobs: Processes; None: one for each CPU.
        engine: pool, here, ray or ray:ADDRESS.
        out: A folder for plan.json, plan.md, the plan's scenario.yaml and all runs, which are not computed again.
        progress: Called after each run.
        told: Called with a line each time that a cheaper cluster is found.

    Raises ConfigError for wrong arguments and fields, and if no cluster is possible.

    """
    if seeds < 1 or max_gpus < 1:
        raise ConfigError(f"--seeds {seeds}, --max-gpus {max_gpus}: at least 1")
    if scenario is not None and out is not None and Path(scenario).resolve() == (Path(out) / SCENARIO).resolve():
        raise ConfigError(f"--out {out}: the plan's {SCENARIO} would stand in the place of {scenario}: another folder")
    wanted = Slo.parse(slo)
    options = AskOptions(trace=None if trace is None else Path(trace))
    with _folder(out) as folder:
        base = base_of(None if scenario is None else Path(scenario), options, changes, folder=folder, starter={})
        servers = base.scenario.pair
        space = Space(prices or dict.fromkeys((server.gpu for server in servers), 1.0), max_gpus, tried or {})
        with closing(open_engine(engine, os.cpu_count() or 1 if jobs is None else jobs)) as opened:
            store = Store(folder)
            trials = Trials(base, wanted, seeds, store, Work(store, opened, progress), told)
            made = trials.plan(space)
        if out is not None:
            (folder / "plan.json").write_text(json.dumps(made.to_json(), indent=2), encoding="utf-8")
            (folder / "plan.md").write_text(made.to_markdown(), encoding="utf-8")
            if made.chosen is not None:
                chosen = base.changed(made.chosen.candidate.changes).model_dump()
                write_yaml({name: value for name, value in chosen.items() if value is not None}, folder / SCENARIO)
    return made


@contextmanager
def _folder(out: Path | str | None) -> Iterator[Path]:
    if out is None:
        with TemporaryDirectory(prefix="pdsim-plan-") as folder:
            yield Path(folder)
    else:
        require_out(Path(out))
        Path(out).mkdir(parents=True, exist_ok=True)
        yield Path(out)


class Trials:
    """Runs of clusters, each with the same requests."""

    def __init__(
        self, base: Base, slo: Slo, num_seeds: int, store: Store, work: Work, told: Callable[[str], None]
    ) -> None:
        self._base = base
        self._slo = slo
        self._store = store
        self._work = work
        self._told = told
        self._best_price = float("inf")
        seeds = [1] if base.is_sample else list(range(1, num_seeds + 1))
        self._planner = Planner(base.path, base.path, changes=base.changes, seeds=seeds)

    def plan(self, space: Space) -> Plan:
        candidates = space.candidates(self._base)
        self._told(f"{len(candidates):,} clusters of up to {space.max_gpus} GPUs; SLO: {self._slo}")
        tried = search(candidates, self._evaluate)
        equal = self._firmest(cheapest(tried))
        chosen = equal[0] if equal else None
        below = self._nearest(tried, chosen)
        rows = [
            Row(one, outcome) for one, outcome in zip(below, self.whole([one.changes for one in below]), strict=True)
        ]
        made = Plan(
            slo=self._slo,
            num_candidates=len(candidates),
            num_tried=len(tried),
            max_gpus=space.max_gpus,
            chosen=None if chosen is None else Row(chosen, tried[chosen]),
            others=tuple(Row(one, tried[one]) for one in equal[1:]),
            nearest=tuple(sorted(rows, key=lambda row: (row.outcome.strain, row.candidate.label))),
            limit=self._limit(rows) if rows else None,
        )
        if chosen is None:
            return made
        made = self._examined(made, chosen)
        if all(outcome.meets for outcome in made.ends.values()):
            return made
        dearer = [one for one in candidates if one.price_per_h >= chosen.price_per_h]
        return replace(made, certain=self._certain(dearer))

    def _firmest(self, equal: list[Candidate]) -> list[Candidate]:
        """By what they have to spare on the slowest server that this may be, where that is not known."""
        if "slowest" not in self._base.ends:
            return equal
        slow = [self._changed(one, self._base.ends["slowest"]) for one in equal]
        strains = [outcome.strain for outcome in self.whole(slow)]
        return [one for _, one in sorted(zip(strains, equal, strict=True), key=lambda pair: (pair[0], pair[1].label))]

    def _certain(self, candidates: Sequence[Candidate]) -> Row | None:
        """The cheapest that meets it on the slowest server, too."""
        slowest = self._base.ends["slowest"]
        tried = search(candidates, lambda batch: self.outcomes([self._changed(one, slowest) for one in batch]))
        found = cheapest(tried)
        return Row(found[0], tried[found[0]]) if found else None

    def _examined(self, made: Plan, chosen: Candidate) -> Plan:
        """Its load grows, an instance is lost, and the server is as fast or as slow as it may be."""
        growth = {factor: self._changed(chosen, self._grown(factor)) for factor in _GROWTH} if self._can_grow else {}
        lost = {
            role: {**chosen.changes, f"{role}.instances": count - 1}
            for role, count in zip(("prefill", "decode"), chosen.counts, strict=False)
            if count > 1 and not chosen.is_aggregated
        }
        ends = {name: self._changed(chosen, end) for name, end in self._base.ends.items()}
        grown = self.outcomes(list(growth.values()))
        whole = self.whole([*lost.values(), *ends.values()])
        holds = [factor for factor, outcome in zip(growth, grown, strict=True) if outcome.meets]
        fails = next(((f, o) for f, o in zip(growth, grown, strict=True) if not o.meets), None)
        within = [factor for factor in holds if fails is None or factor < fails[0]]
        return replace(
            made,
            load_factor=max(within, default=1.0) if growth else None,
            breaks="" if fails is None else f"at {fails[0]:g} times {fails[1].reason}",
            lost=dict(zip(lost, whole, strict=False)),
            ends=dict(zip(ends, whole[len(lost) :], strict=True)),
        )

    # Runs.

    def _evaluate(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        found = self.outcomes([one.changes for one in candidates])
        for one, outcome in zip(candidates, found, strict=True):
            if outcome.meets and one.price_per_h < self._best_price:
                self._best_price = one.price_per_h
                self._told(f"meets it: {one.label}, {one.num_gpus} GPUs, {one.price_per_h:g} an hour")
        return found

    def outcomes(self, changes: Sequence[Changes]) -> list[Outcome]:
        """Their runs end as soon as they miss the SLO."""
        points = [self._ending_early(point) for point in self._planner.plan(changes)]
        return self._read(self._computed(points))

    def whole(self, changes: Sequence[Changes]) -> list[Outcome]:
        return self._read(self.whole_runs(changes))

    def whole_runs(self, changes: Sequence[Changes]) -> list[list[Path]]:
        """The shards of each, by seed."""
        return self._computed(self._planner.plan(changes))

    def _ending_early(self, point: Point) -> Point:
        tasks = {
            seed: replace(task, key=key_of(f"{task.identity} {self._slo}"), slo=self._slo)
            for seed, task in point.tasks.items()
        }
        return replace(point, tasks=tasks)

    def _computed(self, points: Sequence[Point]) -> list[list[Path]]:
        self._work.compute(points)
        return [[self._store.path(task.key) for task in point.tasks.values()] for point in points]

    def _read(self, shards: Sequence[list[Path]]) -> list[Outcome]:
        return [read_outcome(paths, self._slo, is_record=self._base.is_sample) for paths in shards]

    # What is asked of the plan.

    @staticmethod
    def _nearest(tried: Mapping[Candidate, Outcome], chosen: Candidate | None) -> list[Candidate]:
        """Cheaper ones that got furthest, one of each family: an aggregated one among them, where one was tried."""
        missed = [
            one
            for one, outcome in tried.items()
            if not outcome.meets and (chosen is None or one.price_per_h <= chosen.price_per_h)
        ]
        missed.sort(key=lambda one: (-tried[one].num_ended, -one.price_per_h, one.label))
        of_families = list({one.family: one for one in reversed(missed)}.values())[::-1]
        kinds = [next((one for one in of_families if one.is_aggregated == kind), None) for kind in (True, False)]
        first = [one for one in kinds if one is not None]
        return [*first, *(one for one in of_families if one not in first)][:_NUM_BELOW]

    def _limit(self, rows: Sequence[Row]) -> Limit:
        """What limits the nearest in the term that it misses most."""
        nearest = min(rows, key=lambda row: row.outcome.strain)
        term = max(self._slo.terms, key=lambda term: nearest.outcome.tails_ms.get(str(term), 0.0) / term.limit_ms)

        def measure(result: RunResult) -> Mapping[str, float]:
            return {str(term): term.of(result.records.requests)}

        (found,) = limits(sensitivities(self._base.changed(nearest.candidate.changes), measure=measure))
        return found

    @property
    def _can_grow(self) -> bool:
        return self._grown(1.0) is not None

    def _grown(self, factor: float) -> Changes | None:
        """The same requests in less time, or more at once."""
        scenario = self._base.scenario
        if (concurrency := getattr(scenario.client, "concurrency", None)) is not None:
            return {"client.concurrency": round(concurrency * factor)}
        arrivals = getattr(scenario.client, "arrivals", None)
        if (rate := getattr(arrivals, "rate_per_s", None)) is not None:
            return {"client.arrivals.rate": f"{rate * factor:g} /s"}
        speedup = getattr(scenario.workload, "speedup", None)
        return None if speedup is None or arrivals is not None else {"workload.speedup": speedup * factor}

    @staticmethod
    def _changed(chosen: Candidate, changes: Changes | None) -> Changes:
        return {**chosen.changes, **(changes or {})}
