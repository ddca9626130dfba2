"""The cheapest of many clusters that meets an SLO, found with few runs.

A run ends as soon as too many requests miss the SLO, so that what fails costs little. What misses it with its instances
misses it with fewer. The search halves the prices that are left: it tries clusters of the middle price, and drops what
is dearer than one that meets the SLO, and what is part of one that misses it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from pdsim.study.planning.outcome import Outcome
from pdsim.study.planning.space import CandidateCluster

_BATCH = 8
"""Clusters that are tried at once: not the number of workers, on which results must not depend."""

Evaluate = Callable[[Sequence[CandidateCluster]], Sequence[Outcome]]


def search(candidates: Sequence[CandidateCluster], evaluate: Evaluate) -> dict[CandidateCluster, Outcome]:
    """Outcomes of what was tried. The cheapest that meet the SLO are all in it. candidates: by price."""
    tried: dict[CandidateCluster, Outcome] = {}
    while left := _left(candidates, tried):
        batch = _middle(left)
        tried |= zip(batch, evaluate(batch), strict=True)
    return tried


def cheapest(tried: Mapping[CandidateCluster, Outcome]) -> list[CandidateCluster]:
    """Candidates of the lowest price that meet the SLO, the one with the most to spare first; empty: none does."""
    meeting = [one for one, outcome in tried.items() if outcome.meets]
    least = min((one.price_per_h for one in meeting), default=0.0)
    equal = [one for one in meeting if one.price_per_h == least]
    return sorted(equal, key=lambda one: (tried[one].strain, one.label))


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
