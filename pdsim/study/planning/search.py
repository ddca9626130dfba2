"""Finds the cheapest cluster that meets an SLO, with few runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome

_BATCH = 8
"""Number of clusters that are simulated at once. It is fixed, so that results do not depend on the number of
workers."""

_LOW = 8
"""A batch has the price of one candidate in this many, from the cheapest: runs that miss the SLO end early, at about a
tenth of the cost of runs that meet it.
"""

Evaluate = Callable[[Sequence[CandidateCluster]], Sequence[Outcome]]


class Tries(NamedTuple):
    """Two ways to try clusters, which call the same clusters failing."""

    first: Evaluate
    """Judges clusters by few runs. A cluster that misses the SLO in these runs misses the SLO in all runs, too."""
    final: Evaluate
    """Judges clusters by all of their runs, one per seed."""


def search(
    candidates: Sequence[CandidateCluster],
    tries: Tries,
    seen: Callable[[float], None] = lambda _price: None,
    known: Mapping[CandidateCluster, Outcome] = MappingProxyType({}),
) -> dict[CandidateCluster, Outcome]:
    """Outcomes of the clusters that were tried, including all that meet the SLO at the lowest price. candidates: by
    price.

    A run ends as soon as too many requests miss the SLO, so clusters that fail cost little. Each batch has a low
    price among the remaining candidates. If a cluster meets the SLO, more expensive ones are dropped; if it misses,
    clusters with fewer instances are dropped. Few runs judge a cluster that is only a step on the way; all runs
    judge the cheapest. seen: called with the lowest price that is not decided yet. known: outcomes that need no run.
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
    """Candidates of the lowest price at which any meets the SLO, with most headroom first. Empty if none meets it."""
    meeting = [one for one, outcome in tried.items() if outcome.meets]
    least = min((one.price_per_h for one in meeting), default=0.0)
    equal = [one for one in meeting if one.price_per_h == least]
    return sorted(equal, key=lambda one: (tried[one].ratio, one.label))


def _left(candidates: Iterable[CandidateCluster], tried: dict[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Candidates that may still be the cheapest, or as cheap as the cheapest."""
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
    """A batch of candidates at a low price or below: one of each family in turn, the most expensive of each first."""
    price = left[len(left) // _LOW].price_per_h
    below = sorted(
        (one for one in left if one.price_per_h <= price),
        key=lambda one: (one.family, -one.price_per_h, max(one.counts) - min(one.counts)),
    )
    families = [list(family) for _, family in groupby(below, key=lambda one: one.family)]
    turns = [(turn, -one.price_per_h, one.label, one) for family in families for turn, one in enumerate(family)]
    return [one for *_, one in sorted(turns, key=lambda turn: turn[:3])[:_BATCH]]


def headroom(grown: Mapping[float, Outcome]) -> tuple[float, str]:
    """The largest multiple of the load that meets the SLO, and text on the first that misses it; empty: none misses.

    grown: outcomes by multiple, ascending. Multiples beyond the first that misses the SLO do not count.
    """
    kept = 1.0
    for factor, outcome in grown.items():
        if not outcome.meets:
            return kept, f"misses at {factor:g} x"
        kept = factor
    return kept, ""


def of_both_kinds(ranked: Sequence[CandidateCluster], count: int) -> list[CandidateCluster]:
    """The first candidates of the ranking, with at least one aggregated and one disaggregated cluster if both exist."""
    kinds = [next((one for one in ranked if one.is_aggregated == kind), None) for kind in (True, False)]
    first = [one for one in kinds if one is not None]
    chosen = [*first, *(one for one in ranked if one not in first)][:count]
    return [one for one in ranked if one in chosen]
