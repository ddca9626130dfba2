"""Finds the cheapest cluster that meets an SLO, with few runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome

_BATCH = 8
"""Number of clusters that are simulated at once. It is fixed, so that results do not depend on the number of
workers."""

Evaluate = Callable[[Sequence[CandidateCluster]], Sequence[Outcome]]


def search(
    candidates: Sequence[CandidateCluster], evaluate: Evaluate, seen: Callable[[float], None] = lambda _price: None
) -> dict[CandidateCluster, Outcome]:
    """Outcomes of the clusters that were tried, including all that meet the SLO at the lowest price. candidates: by
    price.

    A run ends as soon as too many requests miss the SLO, so clusters that fail cost little. Each batch has the middle
    price of the remaining candidates. If a cluster meets the SLO, more expensive ones are dropped; if it misses,
    clusters with fewer instances are dropped. seen: called with the lowest price that is not decided yet.
    """
    tried: dict[CandidateCluster, Outcome] = {}
    while left := _left(candidates, tried):
        seen(left[0].price_per_h)
        batch = _middle(left)
        tried |= zip(batch, evaluate(batch), strict=True)
    return tried


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


def _middle(left: Sequence[CandidateCluster]) -> list[CandidateCluster]:
    """A batch of candidates at the middle price or below: one of each family in turn, the most expensive of
    each first.
    """
    middle = left[len(left) // 2].price_per_h
    below = sorted(
        (one for one in left if one.price_per_h <= middle),
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
