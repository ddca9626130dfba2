"""Finds the cheapest cluster that meets an SLO under a load, and what speaks for and against it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from pdsim.files import write_whole
from pdsim.metrics.run_folder import SCENARIO
from pdsim.metrics.summary_rows import counted
from pdsim.scenario.build import requests_of
from pdsim.scenario.loading import Changes, write_entries_of
from pdsim.scenario.yaml_file import ConfigError, write_yaml
from pdsim.sim.sensitivity import Limit
from pdsim.sim.simulation import simulate
from pdsim.study.engine import Progress, Work, open_engine
from pdsim.study.outcome import Outcome
from pdsim.study.planning.busiest import busiest
from pdsim.study.planning.measurement import Measurement, measurement
from pdsim.study.planning.plan import Plan, Row
from pdsim.study.planning.screen import Screen, money, priced
from pdsim.study.planning.space import CandidateCluster, Server, Space, with_other_settings
from pdsim.study.planning.trials import LoneRequest, Trials
from pdsim.study.planning.watch import Watch
from pdsim.study.questions.base import MAX_GPUS, NUM_SEEDS, AskOptions, base_of
from pdsim.study.slo import DEFAULT_SLO, Slo
from pdsim.study.store import Store, opened_folder

_BATCH = 8
"""Clusters that are tried at once: not the number of workers, on which results must not depend."""
_NUM_TOLD = 3
"""Cheaper clusters that are reported, and dearer ones."""
_NUM_NEAR = 6
"""Cheaper clusters that run the whole load to see how near they come."""
_DEARER = 1.5
"""Times the plan's price, of those that are reported."""
CURRENCY = "$"
_GROWTH = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)

Evaluate = Callable[[Sequence[CandidateCluster]], Sequence[Outcome]]


def search(
    candidates: Sequence[CandidateCluster], evaluate: Evaluate, seen: Callable[[float], None] = lambda _price: None
) -> dict[CandidateCluster, Outcome]:
    """Outcomes of what was tried, the cheapest that meet the SLO all among it. candidates: by price.

    A run ends as soon as too many requests miss the SLO, so that what fails costs little. Each batch is of the middle
    of the prices that are left: what is dearer than one that meets the SLO is dropped, and what is part of one that
    misses it, for it misses it with fewer instances, too. seen: called with the least price that is not decided yet.
    """
    tried: dict[CandidateCluster, Outcome] = {}
    while left := _left(candidates, tried):
        seen(left[0].price_per_h)
        batch = _middle(left)
        tried |= zip(batch, evaluate(batch), strict=True)
    return tried


def cheapest(tried: Mapping[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Candidates of the lowest price that meet the SLO, the one with the most to spare first; empty: none does."""
    meeting = [one for one, outcome in tried.items() if outcome.meets]
    least = min((one.price_per_h for one in meeting), default=0.0)
    equal = [one for one in meeting if one.price_per_h == least]
    return sorted(equal, key=lambda one: (tried[one].ratio, one.label))


def _left(candidates: Iterable[CandidateCluster], tried: dict[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Candidates that might be the cheapest, or as cheap as it."""
    best = cheapest(tried)
    missing = [one for one, outcome in tried.items() if not outcome.meets]
    return [
        one
        for one in candidates
        if one not in tried
        and (not best or one.price_per_h <= best[0].price_per_h)
        and not any(one.is_part_of(other) for other in missing)
    ]


def _middle(left: Sequence[CandidateCluster]) -> list[CandidateCluster]:
    """Candidates of the middle price and below, one of each family in turn, the dearest of each first."""
    middle = left[len(left) // 2].price_per_h
    below = sorted(
        (one for one in left if one.price_per_h <= middle),
        key=lambda one: (one.family, -one.price_per_h, max(one.counts) - min(one.counts)),
    )
    families = [list(family) for _, family in groupby(below, key=lambda one: one.family)]
    turns = [(turn, -one.price_per_h, one.label, one) for family in families for turn, one in enumerate(family)]
    return [one for *_, one in sorted(turns, key=lambda turn: turn[:3])[:_BATCH]]


def headroom(grown: Mapping[float, Outcome]) -> tuple[float, str]:
    """The load that is kept, as a multiple of the scenario's, and which misses the SLO; empty: none.

    grown: outcomes by multiple, from the smallest on. What lies beyond the first that misses the SLO does not count.
    """
    kept = 1.0
    for factor, outcome in grown.items():
        if not outcome.meets:
            return kept, f"misses at {factor:g} x"
        kept = factor
    return kept, ""


def plan(
    scenario: Path | str | None = None,
    /,
    *,
    trace: Path | str | None = None,
    check: Path | str | None = None,
    slo: str = DEFAULT_SLO,
    prices: Mapping[str, float] | None = None,
    currency: str = CURRENCY,
    max_gpus: int = MAX_GPUS,
    tried: Mapping[str, Sequence[Any]] | None = None,
    speedup: str = AskOptions.speedup,
    changes: Sequence[str] = (),
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    engine: str = "pool",
    out: Path | str | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Plan:
    """Find the cheapest cluster that meets an SLO.

    Args:
        scenario: A scenario file, whose servers stand for all settings but GPU, TP and instances; None: a starter.
        trace: A trace that replaces the workload.
        check: Another trace, on which the plan is judged: the second half of a day, say.
        slo: Percentiles of ttft, tpot and e2e and their limits, or the share of requests that keeps several of them.
        prices: Of one hour of each GPU that may be used, by name; None: the scenario's GPUs, and the fewest are the
            cheapest.
        currency: Symbol or code of the prices, as "$" or "EUR".
        max_gpus: The most GPUs of a cluster.
        tried: Values of further fields, by path; routers are tried unless they are given.
        speedup: Times its load for which the cheapest cluster is found, too, as "0.5,2,4".
        changes: Changes of the scenario, as "dotted.path=value".
        seeds: Runs of each cluster; one of a trace with its own times.
        jobs: Processes; None: one for each CPU.
        engine: pool, here, ray or ray:ADDRESS.
        out: A folder for plan.json, plan.md, the plan's scenario.yaml and all runs, which are not computed again.
        progress: Called after each run.
        report: Called with a line each time that a cheaper cluster is found.

    Raises ConfigError for wrong arguments and fields, and if no cluster is possible.

    """
    if seeds < 1 or max_gpus < 1:
        raise ConfigError(f"--seeds {seeds}, --max-gpus {max_gpus}: at least 1")
    if scenario is not None and out is not None and Path(scenario).resolve() == (Path(out) / SCENARIO).resolve():
        raise ConfigError(f"--out {out}: the plan's {SCENARIO} would stand in the place of {scenario}: another folder")
    wanted = Slo.parse(slo)
    given = None if scenario is None else Path(scenario)
    options = AskOptions(trace=None if trace is None else Path(trace), speedup=speedup)
    with opened_folder(out) as folder:
        base = base_of(given, options, changes, folder=folder, starter={})
        if options.speedups and base.load is None:
            raise ConfigError(f"--speedup {speedup}: this load has neither times of its own nor a rate")
        wanted.require_classes(requests_of(base.scenario))
        servers = base.scenario.pair
        space = Space(prices or dict.fromkeys((server.gpu for server in servers), 1.0), max_gpus, tried or {})
        other = None
        if check is not None:
            (folder / "check").mkdir(exist_ok=True)
            judged = AskOptions(trace=Path(check))
            other = base_of(given, judged, changes, folder=folder / "check", starter={})
            wanted.require_classes(requests_of(other.scenario))
        with closing(open_engine(engine, jobs)) as opened:
            store = Store(folder)
            if num_kept := store.num_kept:
                report(f"{counted(num_kept, 'run')} kept from before")
            watch = Watch(report)
            work = Work(store, opened, watch.over(progress))
            trials = Trials(base, wanted, seeds, work)
            finder = Finder(trials, space, watch, currency if prices else "")
            with watch.provisional():
                made = finder.find(options.speedups)
            own = space.own(base)
            if given is not None and made.chosen is not None and own is not None:
                made = replace(made, own=Row(own, trials.whole([own.changes])[0]))
            if other is not None and made.chosen is not None:
                (outcome,) = Trials(other, wanted, seeds, work).whole([made.chosen.candidate.changes])
                made = replace(made, checked=outcome)
            if out is not None and made.chosen is not None:
                run = simulate(trials.scenario(made.chosen.candidate.changes))
                made = replace(made, busiest=busiest(run.records.requests))
        if out is not None:
            write_whole(folder / "plan.json", json.dumps(Screen(made).to_json(), indent=2))
            write_whole(folder / "plan.md", Screen(made).to_markdown())
            if made.chosen is not None:
                chosen = base.changed(made.chosen.candidate.changes)
                fields = {name: value for name, value in chosen.model_dump().items() if value is not None}
                if base.of_starter is not None:
                    fields["name"] = "plan"
                write_yaml(fields, folder / SCENARIO)
                write_entries_of(chosen, folder)
    return made


class Finder:
    """Finds the plan, and examines it."""

    def __init__(self, trials: Trials, space: Space, watch: Watch, currency: str) -> None:
        """currency: of the prices; empty: there are none."""
        self._trials = trials
        self._space = space
        self._watch = watch
        self._currency = currency
        self._candidates = space.candidates(trials.base)
        self._best_price = inf

    def find(self, speedups: Sequence[float] = ()) -> Plan:
        num, gpus = len(self._candidates), self._space.max_gpus
        self._watch.report(f"{num:,} clusters of up to {gpus} GPUs; SLO: {self._trials.slo}")
        tried = search(self._candidates, self._evaluate, self._seen)
        num_tried = len(tried)
        self._watch.report(f"{num_tried:,} of {num:,} clusters simulated; what follows examines the best")
        tried |= self._tuned(tried)
        equal = self._firmest(cheapest(tried))
        chosen = equal[0] if equal else None
        made = Plan(
            model=self._trials.base.scenario.model,
            load=self._load,
            currency=self._currency,
            foreign_setup=tuple(self._trials.base.scenario.foreign_setup),
            slo=self._trials.slo,
            num_candidates=len(self._candidates),
            num_tried=num_tried,
            max_gpus=self._space.max_gpus,
            chosen=None if chosen is None else Row(chosen, tried[chosen]),
            others=tuple(Row(one, tried[one]) for one in equal[1:]),
            nearest=self._missed_by(self._nearest(tried, chosen)),
        )
        if chosen is None:
            return replace(made, lone=self._lone())
        loads = {factor: self._at_load(factor, chosen) for factor in speedups}
        made = replace(self._examined(made, chosen), faster=self._faster(tried, chosen), loads=loads)
        if made.meets_at_both_ends:
            return made
        return replace(made, safe=self._safe(chosen), measure=self._measurement(chosen))

    def _evaluate(self, candidates: Sequence[CandidateCluster]) -> list[Outcome]:
        found = self._trials.outcomes([one.changes for one in candidates])
        for one, outcome in zip(candidates, found, strict=True):
            if outcome.meets and one.price_per_h < self._best_price:
                self._best_price = one.price_per_h
                self._watch.best = f"{one.label}: {priced(one, self._currency)}"
                self._watch.report(f"meets it: {self._watch.best}")
        return found

    def _seen(self, price: float) -> None:
        if price > self._candidates[0].price_per_h:
            self._watch.undecided = money(price, self._currency) if self._currency else counted(round(price), "GPU")

    def _tuned(self, tried: Mapping[CandidateCluster, Outcome]) -> dict[CandidateCluster, Outcome]:
        """Cheaper clusters that meet the SLO with another value of one setting."""
        best = next(iter(cheapest(tried)), None)
        cheaper = {one: tried[one] for one in tried if best is None or one.price_per_h < best.price_per_h}
        nearest = self._nearest(cheaper, None)
        changed = [other for one in nearest for other in with_other_settings(self._trials.base, one)]
        outcomes = zip(changed, self._evaluate(changed), strict=True)
        return {one: outcome for one, outcome in outcomes if outcome.meets}

    def _firmest(self, equal: list[CandidateCluster]) -> list[CandidateCluster]:
        """The candidates with most to spare on the slowest server that this may be, where that is not known."""
        if "slowest" not in self._trials.base.ends:
            return equal
        slow = [{**one.changes, **self._trials.base.ends["slowest"]} for one in equal]
        ratios = [outcome.ratio for outcome in self._trials.whole(slow)]
        return [one for _, one in sorted(zip(ratios, equal, strict=True), key=lambda pair: (pair[0], pair[1].label))]

    # What is asked of the plan.

    @staticmethod
    def _nearest(tried: Mapping[CandidateCluster, Outcome], chosen: CandidateCluster | None) -> list[CandidateCluster]:
        """Cheaper ones that got furthest before they missed it, each of other servers."""
        missed = [
            one
            for one, outcome in tried.items()
            if not outcome.meets and (chosen is None or one.price_per_h <= chosen.price_per_h)
        ]
        missed.sort(key=lambda one: (-tried[one].num_ended, -one.price_per_h, one.label))
        furthest: dict[tuple[Server, ...], CandidateCluster] = {}
        for one in missed:
            furthest.setdefault(one.servers, one)
        return _of_both_kinds(list(furthest.values()), _NUM_NEAR)

    def _missed_by(self, candidates: Sequence[CandidateCluster]) -> tuple[Row, ...]:
        """Candidates that miss the SLO least, by how much and because of what, the nearest first."""
        outcomes = dict(zip(candidates, self._trials.whole([one.changes for one in candidates]), strict=True))
        ranked = sorted(candidates, key=lambda one: (outcomes[one].ratio, one.label))
        told = [(one, outcomes[one]) for one in _of_both_kinds(ranked, _NUM_TOLD)]
        return tuple(Row(one, outcome, self._limit(one, outcome)) for one, outcome in told)

    def _limit(self, one: CandidateCluster, outcome: Outcome) -> Limit | None:
        """What limits the latency that is missed most; None: it is not known."""
        judged = outcome.judgement
        return None if judged is None else self._trials.limit(one.changes, judged.worst_percentile)

    def _faster(self, tried: Mapping[CandidateCluster, Outcome], chosen: CandidateCluster) -> tuple[Row, ...]:
        """Dearer ones, each with more to spare than all cheaper ones: those tried, or with an instance more."""
        most = chosen.price_per_h * _DEARER
        count = sum(chosen.counts) + 1
        new = [o for o in self._candidates if chosen.is_part_of(o) and sum(o.counts) == count and o not in tried]
        known = {**tried, **dict(zip(new, self._trials.outcomes([one.changes for one in new]), strict=True))}
        meeting = [one for one in known if known[one].meets and chosen.price_per_h < one.price_per_h <= most]
        found: list[Row] = []
        least = known[chosen].ratio
        for one in sorted(meeting, key=lambda one: (one.price_per_h, known[one].ratio, one.label)):
            if known[one].ratio < least:
                least = known[one].ratio
                found.append(Row(one, known[one]))
        return tuple(found[:_NUM_TOLD])

    def _examined(self, made: Plan, chosen: CandidateCluster) -> Plan:
        """Its load grows, an instance is lost, and the server is as fast or as slow as it may be."""
        base = self._trials.base
        growth = {} if base.load is None else {factor: {**chosen.changes, **base.scaled(factor)} for factor in _GROWTH}
        lost = {
            role: {**chosen.changes, f"{role}.instances": count - 1}
            for role, count in zip(chosen.roles, chosen.counts, strict=True)
            if count > 1
        }
        ends = {name: {**chosen.changes, **end} for name, end in base.ends.items()}
        grown = self._trials.outcomes(list(growth.values()))
        whole = self._trials.whole([*lost.values(), *ends.values()])
        load_factor, breaks = headroom(dict(zip(growth, grown, strict=True)))
        return replace(
            made,
            load_factor=load_factor if growth else None,
            breaks=breaks,
            lost=dict(zip(lost, whole, strict=False)),
            ends=dict(zip(ends, whole[len(lost) :], strict=True)),
        )

    def _lone(self) -> LoneRequest | None:
        """A request that misses the SLO alone; None: on some servers, all keep it so."""
        num_ended: dict[CandidateCluster, int] = {}
        for one in reversed(self._candidates):
            if max(one.counts) > 1:
                continue
            (outcome,) = self._trials.outcomes([self._trials.base.one_at_a_time(one.changes)])
            if outcome.meets:
                return None
            num_ended[one] = outcome.num_ended
        furthest = max(num_ended, key=num_ended.__getitem__, default=None)
        if furthest is None or not num_ended[furthest]:
            return None
        return self._trials.lone_request(furthest.label, self._trials.base.one_at_a_time(furthest.changes))

    def _measurement(self, chosen: CandidateCluster) -> Measurement | None:
        """Names the groups of times to measure: those of which one end alone misses the SLO, or else all."""
        base = self._trials.base
        ends = {group: [{**chosen.changes, **end} for end in both] for group, both in base.alone.items()}
        deciding = [group for group, both in ends.items() if not all(one.meets for one in self._trials.outcomes(both))]
        return measurement(deciding or base.scenario.uncertain, base.scenario, self._trials.sizes(chosen.changes))

    def _safe(self, chosen: CandidateCluster) -> Row | None:
        """The cheapest that meets it on the slowest server, with its outcome on the server as it is known."""
        dearer = [one for one in self._candidates if one.price_per_h >= chosen.price_per_h]
        found = self._cheapest(dearer, self._trials.base.ends["slowest"])
        return None if found is None else Row(found.candidate, self._trials.whole([found.candidate.changes])[0])

    def _at_load(self, factor: float, chosen: CandidateCluster) -> Row | None:
        """The cheapest at so many times the load: no cheaper than the plan for more of it, nor dearer for less."""
        sign = 1 if factor > 1 else -1
        possible = [one for one in self._candidates if sign * (one.price_per_h - chosen.price_per_h) >= 0]
        return self._cheapest(possible, self._trials.base.scaled(factor))

    def _cheapest(self, candidates: Sequence[CandidateCluster], changes: Changes) -> Row | None:
        """The cheapest of these, each with these changes."""
        tried = search(candidates, lambda batch: self._trials.outcomes([{**one.changes, **changes} for one in batch]))
        found = cheapest(tried)
        return Row(found[0], tried[found[0]]) if found else None

    @property
    def _load(self) -> str:
        """Words for the requests: how many, of which lengths, from where and when."""
        base = self._trials.base
        requests = requests_of(base.scenario)
        prompt, output = (fmean(len(getattr(spec, name)) for spec in requests) for name in ("prompt", "output"))
        path = getattr(base.scenario.workload, "path", None)
        source = f" of {path.name}" if path is not None else ""
        sizes = f"mean {prompt:,.0f} tokens in, {output:,.0f} out"
        return f"{counted(len(requests), 'request')}{source} ({sizes}), sent {base.pace}"


def _of_both_kinds(ranked: Sequence[CandidateCluster], count: int) -> list[CandidateCluster]:
    """The first ones, an aggregated and a disaggregated one among them, where there is one."""
    kinds = [next((one for one in ranked if one.is_aggregated == kind), None) for kind in (True, False)]
    first = [one for one in kinds if one is not None]
    chosen = [*first, *(one for one in ranked if one not in first)][:count]
    return [one for one in ranked if one in chosen]
