"""Finds the cheapest cluster that meets an SLO without a simulation of every candidate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome

_BATCH = 8
"""Maximum number of clusters in one batch for Tries.first. The number is fixed, so that results do not depend on the
number of workers.
"""

_LOW = 8
"""Sets the highest price of the next batch: the price of the candidate at 1/_LOW of the remaining candidates, sorted by
price. Low prices are tried first because a run that misses the SLO ends early, and takes about a tenth of the time of a
run that meets the SLO.
"""

Evaluate = Callable[[Sequence[CandidateCluster]], Sequence[Outcome]]


class Tries(NamedTuple):
    """Two functions that simulate clusters and return their outcomes in the same order. If `first` finds that a cluster
    misses the SLO, `final` would find the same.
    """

    first: Evaluate
    """Simulates clusters with only a few of their seeds. A cluster that misses the SLO with these seeds also misses the
    SLO with all seeds.
    """
    final: Evaluate
    """Simulates clusters with all seeds, one run per seed."""


def search(
    candidates: Sequence[CandidateCluster],
    tries: Tries,
    seen: Callable[[float], None] = lambda _price: None,
    known: Mapping[CandidateCluster, Outcome] = MappingProxyType({}),
) -> dict[CandidateCluster, Outcome]:
    """Simulates clusters until the cheapest ones that meet the SLO are known, and returns the outcomes of all simulated
    clusters, and those in `known`.

    A run ends as soon as too many requests miss the SLO, so clusters that fail cost little. Each batch has a low price
    among the remaining candidates, and `tries.first` judges the batch. If a cluster meets the SLO, more expensive ones
    are dropped; if a cluster misses the SLO, clusters with fewer instances are dropped. When no candidate remains,
    `tries.final` judges the cheapest; if these miss the SLO, the search goes on.

    candidates: sorted by price. seen: called before each batch with the lowest price at which a candidate may still
    meet the SLO. known: outcomes of clusters that need no run.
    """
    tried = dict(known)
    final = set(known)
    while True:
        while left := _left(candidates, tried):
            seen(left[0].price_per_h)
            batch = _batch(left)
            tried |= zip(batch, tries.first(batch), strict=True)
        best = [one for one in cheapest(tried) if one not in final]
        if not best:
            return tried
        tried |= zip(best, tries.final(best), strict=True)
        final |= set(best)


def cheapest(tried: Mapping[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Returns the cheapest clusters that meet the SLO. They have equal prices, and are sorted by their distance to the
    SLO's limits, the largest distance first. Empty: no cluster meets the SLO. tried: the simulated clusters, with their
    outcomes.
    """
    meeting = [one for one, outcome in tried.items() if outcome.meets]
    least = min((one.price_per_h for one in meeting), default=0.0)
    equal = [one for one in meeting if one.price_per_h == least]
    return sorted(equal, key=lambda one: (tried[one].ratio, one.label))


def _left(candidates: Iterable[CandidateCluster], tried: dict[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Candidates that must still be tried. Leaves out tried candidates and each candidate with a higher price than a
    tried cluster that meets the SLO. Also leaves out candidates of the same family as a tried cluster that misses the
    SLO, if they have at most as many instances of each role.
    """
    best = cheapest(tried)
    missing = [one for one, outcome in tried.items() if not outcome.meets]
    return [
        one
        for one in candidates
        if one not in tried
        and (not best or one.price_per_h <= best[0].price_per_h)
        and not any(one.is_part_of(other) for other in missing)
    ]


def _batch(left: Sequence[CandidateCluster]) -> list[CandidateCluster]:
    """Up to _BATCH clusters to simulate next, all with a low price (see _LOW). Takes one cluster of each family in
    turn, the most expensive cluster of a family first. left: the remaining candidates, sorted by price.
    """
    price = left[len(left) // _LOW].price_per_h
    below = sorted(
        (one for one in left if one.price_per_h <= price),
        key=lambda one: (one.family, -one.price_per_h, max(one.counts) - min(one.counts)),
    )
    families = [list(family) for _, family in groupby(below, key=lambda one: one.family)]
    turns = [(turn, -one.price_per_h, one.label, one) for family in families for turn, one in enumerate(family)]
    return [one for *_, one in sorted(turns, key=lambda turn: turn[:3])[:_BATCH]]


def headroom(grown: Mapping[float, Outcome]) -> tuple[float, str]:
    """Returns the largest multiple of the load that meets the SLO (1 if none in `grown` does), and a text about the
    first multiple that misses the SLO. The text is empty if none misses. grown: outcomes by multiple, ascending.
    Multiples above the first miss do not count.
    """
    kept = 1.0
    for factor, outcome in grown.items():
        if not outcome.meets:
            return kept, f"not {factor:g} x"
        kept = factor
    return kept, ""


def of_both_kinds(ranked: Sequence[CandidateCluster], count: int) -> list[CandidateCluster]:
    """Up to `count` clusters from the beginning of a ranking, in its order. If all of these are of one kind, aggregated
    or disaggregated, the last makes room for the first cluster of the other kind. ranked: the clusters, the best first.
    """
    kinds = [next((one for one in ranked if one.is_aggregated == kind), None) for kind in (True, False)]
    first = [one for one in kinds if one is not None]
    chosen = [*first, *(one for one in ranked if one not in first)][:count]
    return [one for one in ranked if one in chosen]
