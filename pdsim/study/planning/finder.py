"""Finds the cheapest cluster that meets the SLO, and examines how far that plan can be trusted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from statistics import fmean

from pdsim.metrics.summary_rows import counted
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.loading import Changes
from pdsim.scenario.yaml_file import named
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.base import warm_up_text
from pdsim.study.examination import LoneRequest, deciding_measurement, lone_request, requests_alone
from pdsim.study.measurement import Measurement
from pdsim.study.planning.plan import Plan, Row
from pdsim.study.planning.screen import money, priced
from pdsim.study.planning.search import Tries, cheapest, headroom, of_both_kinds, search
from pdsim.study.planning.watch import Watch
from pdsim.study.servers import Server
from pdsim.study.space import CandidateCluster, Space, by_price, with_other_settings, with_setting_of
from pdsim.study.trials import Trials
from pdsim.study.verdict.outcome import Outcome

_NUM_LISTED = 3
"""Maximum number of clusters that the report lists because they miss the SLO by little, and of clusters that it lists
because they cost more than the plan's cluster and have more headroom.
"""
_NUM_NEAR = 6
"""Maximum number of clusters that miss the SLO and are run to the end, so that the report can say by how much they miss
the SLO. Also the maximum number of clusters of which other settings are tried.
"""
_DEARER = 1.5
"""Highest price of a cluster in the report, as a multiple of the plan's price."""
_A_SEED_MISSES = "not all seeds meet the SLO"
_GROWN_AT_ONCE = 3
"""Number of multiples of the load that are simulated in one batch."""
_GROWTH = (1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Multiples of the load at which the chosen cluster is simulated."""


class Finder:
    """Simulates candidate clusters to find the plan, and examines the chosen cluster."""

    def __init__(self, trials: Trials, space: Space, watch: Watch, currency: str) -> None:
        """trials: runs clusters and judges them by the SLO. space: describes the clusters to choose from. watch: gets
        the progress of the search, and reports it. currency: symbol or code of the prices; empty: the user gave no
        prices.
        """
        self._trials = trials
        self._space = space
        self._watch = watch
        self._currency = currency
        with named(trials.base.where):
            self._candidates = space.candidates(trials.base)
        self._best = (inf, True)
        """Price of the best cluster so far, and whether only its first seed was run. Infinite price: no cluster meets
        the SLO yet, or the best clusters are being run with all seeds.
        """

    def find(self, speedups: Sequence[float] = ()) -> Plan:
        num, gpus = len(self._candidates), self._space.max_gpus
        self._watch.report(f"{counted(num, 'cluster')} of up to {counted(gpus, 'GPU')}; SLO: {self._trials.slo}")
        tried = search(self._candidates, Tries(self._tried_first, self._confirmed), self._seen)
        num_tried = len(tried)
        self._watch.report(f"{num_tried:,} of {num:,} clusters simulated; next: runs of the best")
        tried |= self._tuned(tried)
        equal = self._firmest(cheapest(tried))
        chosen = equal[0] if equal else None
        scenario = self._trials.base.changed({} if chosen is None else chosen.changes)
        made = Plan(
            model=self._models([chosen] if chosen else self._candidates),
            load=self._load,
            currency=self._currency,
            foreign_setup=tuple(scenario.foreign_setup),
            is_measured=scenario.cost.measured is not None,
            slo=self._trials.slo,
            num_candidates=len(self._candidates),
            num_tried=num_tried,
            max_gpus=self._space.max_gpus,
            chosen=None if chosen is None else self._repeated(Row(chosen, tried[chosen])),
            others=tuple(Row(one, tried[one]) for one in equal[1:]),
            nearest=self._missed_by(self._nearest(tried, chosen)),
        )
        if chosen is None:
            return replace(made, lone=self._lone())
        self._candidates = by_price([*self._candidates, *with_setting_of(chosen, self._candidates)])
        loads = {factor: self._at_load(factor, chosen, tried) for factor in speedups}
        made = replace(self._examined(made, chosen), faster=self._faster(tried, chosen), loads=loads)
        if made.meets_at_both_ends:
            return made
        return replace(made, safe=self._safe(chosen, tried), measure=self._measurement(chosen))

    def _models(self, candidates: Sequence[CandidateCluster]) -> str:
        """Names of the models that the candidates have, joined by "or": the scenario's model, or the models that --try
        gives.
        """
        own = self._trials.base.scenario.model
        return " or ".join(dict.fromkeys(str(one.changes.get("model", own)) for one in candidates))

    def _tried_first(self, candidates: Sequence[CandidateCluster]) -> list[Outcome]:
        num_seeds = len(self._trials.seeds)
        of_seeds = f" (first of {num_seeds} seeds)" if num_seeds > 1 else ""
        return self._told(candidates, self._trials.first_outcomes([one.changes for one in candidates]), of_seeds)

    def _confirmed(self, candidates: Sequence[CandidateCluster]) -> list[Outcome]:
        if len(self._trials.seeds) > 1:  # the other seeds may refute the best cluster so far
            self._best, self._watch.best = (inf, True), ""
        return self._evaluate(candidates)

    def _evaluate(self, candidates: Sequence[CandidateCluster]) -> list[Outcome]:
        return self._told(candidates, self._trials.outcomes([one.changes for one in candidates]))

    def _told(self, candidates: Sequence[CandidateCluster], found: list[Outcome], of_seeds: str = "") -> list[Outcome]:
        for one, outcome in zip(candidates, found, strict=True):
            if outcome.meets and (one.price_per_h, bool(of_seeds)) < self._best:
                self._best = (one.price_per_h, bool(of_seeds))
                self._watch.best = f"{one.label}: {priced(one, self._currency)}{of_seeds}"
                self._watch.report(f"meets it: {self._watch.best}")
        return found

    def _seen(self, price: float) -> None:
        if price > self._candidates[0].price_per_h:
            self._watch.undecided = money(price, self._currency) if self._currency else counted(round(price), "GPU")

    def _tuned(self, tried: Mapping[CandidateCluster, Outcome]) -> dict[CandidateCluster, Outcome]:
        """Simulates copies of clusters with one changed setting each, and returns the copies that meet the SLO, with
        their outcomes. The clusters are up to _NUM_NEAR of `tried` that miss the SLO and are cheaper than the cheapest
        cluster that meets it. If no cluster meets the SLO, none is too expensive.
        """
        best = next(iter(cheapest(tried)), None)
        cheaper = {one: tried[one] for one in tried if best is None or one.price_per_h < best.price_per_h}
        nearest = self._nearest(cheaper, None)
        changed = [other for one in nearest for other in with_other_settings(self._trials.base, one)]
        outcomes = zip(changed, self._evaluate(changed), strict=True)
        return {one: outcome for one, outcome in outcomes if outcome.meets}

    def _firmest(self, equal: list[CandidateCluster]) -> list[CandidateCluster]:
        """Sorts clusters of equal price by how far they stay below the SLO's limits with the slowest step times that
        measured kernels allow. The cluster furthest below comes first. Keeps the order if step times were measured on a
        server.
        """
        if "slowest" not in self._trials.base.ends:
            return equal
        slow = [{**one.changes, **self._trials.base.ends["slowest"]} for one in equal]
        ratios = [outcome.ratio for outcome in self._trials.whole(slow)]
        return [one for _, one in sorted(zip(ratios, equal, strict=True), key=lambda pair: (pair[0], pair[1].label))]

    # What is asked of the plan.

    @staticmethod
    def _nearest(tried: Mapping[CandidateCluster, Outcome], chosen: CandidateCluster | None) -> list[CandidateCluster]:
        """Up to _NUM_NEAR clusters that miss the SLO, those closest to the SLO first. A run stops when a miss is
        certain, so a cluster is closer if more of its requests had ended. Of clusters whose servers have the same
        GPUs and parallel sizes, only the closest is returned. The result has aggregated and disaggregated clusters, if
        both kinds miss the SLO. tried: clusters that were simulated, with their outcomes. chosen: the plan; more
        expensive clusters are left out. None: there is no plan, so no cluster is too expensive.
        """
        missed = [
            one
            for one, outcome in tried.items()
            if not outcome.meets and (chosen is None or one.price_per_h <= chosen.price_per_h)
        ]
        missed.sort(key=lambda one: (-tried[one].num_ended, -one.price_per_h, one.label))
        furthest: dict[tuple[Server, ...], CandidateCluster] = {}
        for one in missed:
            furthest.setdefault(one.servers, one)
        return of_both_kinds(list(furthest.values()), _NUM_NEAR)

    def _missed_by(self, candidates: Sequence[CandidateCluster]) -> tuple[Row, ...]:
        """Rows of up to _NUM_LISTED candidates that exceed the SLO's limits least, the nearest to the SLO first. Each
        row names the missed limits and, if known, the resource that causes the miss.
        """
        ratios = dict(zip(candidates, self._trials.first_ratios([one.changes for one in candidates]), strict=True))
        nearest = of_both_kinds(sorted(candidates, key=lambda one: (ratios[one], one.label)), _NUM_LISTED)
        whole = map(_missed, self._trials.whole([one.changes for one in nearest]))
        told = sorted(zip(nearest, whole, strict=True), key=lambda pair: (pair[1].ratio, pair[0].label))
        near = [one for one, outcome in told if outcome.is_near and outcome.reason != _A_SEED_MISSES]
        repeated = dict(zip(near, self._trials.repeated([one.changes for one in near]), strict=True))
        return tuple(Row(one, outcome, self._limit(one, outcome), repeated.get(one, ())) for one, outcome in told)

    def _repeated(self, row: Row) -> Row:
        (again,) = self._trials.repeated([row.candidate.changes])
        return row._replace(repeated=again)

    def _limit(self, one: CandidateCluster, outcome: Outcome) -> Limit | None:
        """The resource that causes the latency furthest above its limit in the cluster `one`, whose outcome is
        `outcome`. None: the run gave no numbers.
        """
        judged = outcome.judgement
        return None if judged is None else self._trials.limit(one.changes, judged.worst_percentile)

    def _faster(self, tried: Mapping[CandidateCluster, Outcome], chosen: CandidateCluster) -> tuple[Row, ...]:
        """Up to _NUM_LISTED clusters that cost more than the plan `chosen`, but at most _DEARER times as much, the
        cheapest first. Each lies further below the SLO's limits than the plan and the clusters before it. Candidates
        are clusters in `tried` that meet the SLO, and clusters with one instance more than the plan. This function
        simulates the candidates with all seeds.
        """
        most = chosen.price_per_h * _DEARER
        count = sum(chosen.numbers.values()) + 1
        larger = [one for one in self._candidates if chosen.is_part_of(one) and sum(one.numbers.values()) == count]
        new = [one for one in larger if one not in tried and one.price_per_h <= most]
        first = [one for one in tried if tried[one].meets and chosen.price_per_h < one.price_per_h <= most]
        found: list[Row] = []
        for _, group in groupby(by_price([*new, *first]), key=lambda one: one.price_per_h):
            same = list(group)
            outcomes = dict(zip(same, self._trials.outcomes([one.changes for one in same]), strict=True))
            best = min(same, key=lambda one: outcomes[one].ratio if outcomes[one].meets else inf)
            least = (found[-1] if found else Row(chosen, tried[chosen])).outcome.ratio
            if outcomes[best].meets and outcomes[best].ratio < least:
                found.append(Row(best, outcomes[best]))
            if len(found) == _NUM_LISTED:
                break
        return tuple(found)

    def _examined(self, made: Plan, chosen: CandidateCluster) -> Plan:
        """Adds the chosen cluster's headroom under more load, and its outcomes with one instance of a role less, and
        with the fastest and the slowest step times that measured kernels allow. made: the plan so far.
        """
        base = self._trials.base
        growth = {} if base.load is None else {factor: {**chosen.changes, **base.scaled(factor)} for factor in _GROWTH}
        lost = {
            role: {**chosen.changes, f"{role}.instances": count - 1}
            for role, count in chosen.numbers.items()
            if count > 1
        }
        ends = {name: {**chosen.changes, **end} for name, end in base.ends.items()}
        grown = self._grown(growth)
        whole = self._trials.whole([*lost.values(), *ends.values()])
        load_factor, breaks = headroom(grown)
        return replace(
            made,
            load_factor=load_factor if growth else None,
            breaks=breaks,
            lost=dict(zip(lost, whole, strict=False)),
            ends=dict(zip(ends, whole[len(lost) :], strict=True)),
        )

    def _grown(self, growth: Mapping[float, Changes]) -> dict[float, Outcome]:
        """Outcomes of the plan under more load, by multiple of the load, ascending. Multiples are simulated in groups
        of _GROWN_AT_ONCE. After a group with a miss, no further group is simulated. growth: changes that make each
        multiple of the load.
        """
        found: dict[float, Outcome] = {}
        for first in range(0, len(growth), _GROWN_AT_ONCE):
            some = list(growth)[first : first + _GROWN_AT_ONCE]
            found |= zip(some, self._trials.outcomes([growth[factor] for factor in some]), strict=True)
            if not all(found[factor].meets for factor in some):
                break
        return found

    def _lone(self) -> LoneRequest | None:
        """A request that misses the SLO although requests are sent one at a time, to clusters with one server per role.
        Of these clusters, the one is taken in whose run most requests ended before the miss was certain. None: one of
        these clusters meets the SLO, no request ends in the runs, or there is no such cluster.
        """
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
        return lone_request(furthest.label, self._trials.slo, requests_alone(self._trials, furthest.changes))

    def _measurement(self, chosen: CandidateCluster) -> Measurement | None:
        """Recommends a measurement: that of the step times whose uncertainty decides whether the plan meets the SLO.
        None: all step times were measured on a server. chosen: the plan's cluster.
        """

        def meets(ends: Sequence[Changes]) -> bool:
            return all(self._trials.outcomes([{**chosen.changes, **end}])[0].meets for end in reversed(ends))

        return deciding_measurement(self._trials, chosen.changes, meets)

    def _safe(self, chosen: CandidateCluster, tried: Mapping[CandidateCluster, Outcome]) -> Row | None:
        """The cheapest cluster that meets the SLO even with the slowest step times that measured kernels allow. None:
        no cluster does. Clusters that are cheaper than the plan `chosen`, or miss the SLO in `tried`, are skipped. The
        row has the cluster's outcome with usual step times, neither the fastest nor the slowest.
        """
        dearer = [one for one in self._candidates if one.price_per_h >= chosen.price_per_h]
        found = self._cheapest(dearer, self._trials.base.ends["slowest"], _missing(tried))
        return None if found is None else Row(found.candidate, self._trials.whole([found.candidate.changes])[0])

    def _at_load(
        self, factor: float, chosen: CandidateCluster, tried: Mapping[CandidateCluster, Outcome]
    ) -> Row | None:
        """The cheapest cluster that meets the SLO at `factor` times the load. None: no cluster does. For more load,
        skips clusters that are cheaper than the plan `chosen` or already miss the SLO in `tried`; for the same or less
        load, skips clusters that are more expensive than the plan.
        """
        sign = 1 if factor > 1 else -1
        possible = [one for one in self._candidates if sign * (one.price_per_h - chosen.price_per_h) >= 0]
        return self._cheapest(possible, self._trials.base.scaled(factor), _missing(tried) if factor > 1 else {})

    def _cheapest(
        self,
        candidates: Sequence[CandidateCluster],
        changes: Changes,
        missing: Mapping[CandidateCluster, Outcome],
    ) -> Row | None:
        """The cheapest of the candidates that meets the SLO after further changes of the scenario. None: all miss it.

        missing: outcomes of clusters that are known to miss the SLO, and are not simulated again.
        """
        tries = Tries(
            lambda batch: self._trials.first_outcomes([{**one.changes, **changes} for one in batch]),
            lambda batch: self._trials.outcomes([{**one.changes, **changes} for one in batch]),
        )
        tried = search(candidates, tries, known=missing)
        found = cheapest(tried)
        return Row(found[0], tried[found[0]]) if found else None

    @property
    def _load(self) -> str:
        """Describes the requests: their number, lengths, source and sending times."""
        base = self._trials.base
        requests = requests_of(base.scenario)
        prompt, output = (fmean(len(getattr(spec, name)) for spec in requests) for name in ("prompt", "output"))
        path = getattr(base.scenario.workload, "path", None)
        source = f" of {path.name}" if path is not None else ""
        sizes = f"mean {prompt:,.0f} tokens in, {output:,.0f} out"
        left_out = warm_up_text(base.scenario.client, len(requests))
        return f"{counted(len(requests), 'request')}{source} ({sizes}), sent {base.pace}{left_out}"


def _missing(tried: Mapping[CandidateCluster, Outcome]) -> dict[CandidateCluster, Outcome]:
    """Clusters of `tried` that miss the SLO, with their outcomes. The search takes for granted that these clusters also
    miss the SLO with slower step times or more load.
    """
    return {one: outcome for one, outcome in tried.items() if not outcome.meets}


def _missed(outcome: Outcome) -> Outcome:
    """The outcome of a cluster that missed the SLO with one seed. Such a cluster counts as a miss, even if its mean
    over all seeds meets the SLO.
    """
    return replace(outcome, meets=False, reason=_A_SEED_MISSES) if outcome.meets else outcome
