"""Searches clusters for the cheapest that meets an SLO, with few runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome

_BATCH = 8
"""Clusters that are simulated at once. A fixed number makes results independent of the number of workers."""

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
    """Candidates of the lowest price that meet the SLO, the one with most headroom first; empty if none meets it."""
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


def of_both_kinds(ranked: Sequence[CandidateCluster], count: int) -> list[CandidateCluster]:
    """The first ones, an aggregated and a disaggregated one among them, where there is one."""
    kinds = [next((one for one in ranked if one.is_aggregated == kind), None) for kind in (True, False)]
    first = [one for one in kinds if one is not None]
    chosen = [*first, *(one for one in ranked if one not in first)][:count]
    return [one for one in ranked if one in chosen]
