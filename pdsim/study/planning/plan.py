"""A plan: the cluster, the alternatives to it, and how sure it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.examination import LoneRequest
from pdsim.study.measurement import Measurement
from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome
from pdsim.study.verdict.slo import Slo

_MOST_EQUAL = 3
"""Clusters at the plan's price that are listed, those with most headroom."""


class Row(NamedTuple):
    candidate: CandidateCluster
    outcome: Outcome
    limit: Limit | None = None
    """Limit of one that misses the SLO, in the term that it misses most."""
    repeated: Sequence[Outcome] = ()
    """Outcomes with slightly faster and slower messages; empty: the cluster was not repeated."""

    @property
    def num_meeting(self) -> int:
        """Runs that meet the SLO, of the cluster's own and those repeated."""
        return sum(one.meets for one in (self.outcome, *self.repeated))

    @property
    def is_stable(self) -> bool:
        """True if chance does not change the verdict."""
        return self.num_meeting in {0, 1 + len(self.repeated)}

    def to_json(self) -> dict[str, Any]:
        one = self.candidate
        head = {"cluster": one.label, "gpus": one.num_gpus, "price_per_h": one.price_per_h, "kw": one.kw}
        found = {**head, "changes": one.changes, **self.outcome.to_json()}
        if self.repeated:
            found |= {"runs": 1 + len(self.repeated), "runs_that_meet": self.num_meeting}
        return found if self.limit is None else {**found, "limit": self.limit._asdict()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    model: str
    load: str
    """The requests: how many, of which lengths, from where and when."""
    currency: str
    """Symbol or code of prices; empty: GPUs have no prices, and the cheapest is that of the fewest GPUs."""
    slo: Slo
    num_candidates: int
    num_tried: int
    max_gpus: int
    chosen: Row | None
    """None: nothing meets it."""
    others: tuple[Row, ...]
    """Clusters at the same price that meet the SLO."""
    nearest: tuple[Row, ...]
    """Clusters at this price or less that miss the SLO: the nearest to it first."""
    faster: tuple[Row, ...] = ()
    """Clusters that cost more, each with more headroom than all cheaper ones."""
    load_factor: float | None = None
    """Largest multiple of the load that it takes within the SLO; None: the load cannot be scaled."""
    breaks: str = ""
    """The load at which it misses the SLO first, and how; empty: it meets the SLO at all loads that were tried."""
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of the cluster without one of its servers, by role; a role with a single server is left out."""
    ends: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes at the fast and at the slow end of the predicted range; empty where a server was measured."""

    safe: Row | None = None
    """The cheapest cluster that meets the SLO at the slow end, too, where the plan does not."""
    measure: Measurement | None = None
    """The measurement that would tell whether it meets the SLO; None: both ends meet it."""
    foreign_setup: tuple[str, ...] = ()
    """Differences between its setup and the one whose times were measured."""
    is_measured: bool = True
    """A server was measured: the scenario has a profile."""
    loads: Mapping[float, Row | None] = field(default_factory=dict)
    """The cheapest cluster by multiple of the load; None: nothing meets the SLO."""
    own: Row | None = None
    """The cluster of the scenario that the plan began with."""
    checked: Outcome | None = None
    """Outcome on the trace that it was not made from."""
    lone: LoneRequest | None = None
    """A request that misses it alone, where nothing meets it because requests do so on every server."""

    busiest: Mapping[str, Any] | None = None
    """Load and queue of the plan in its worst minutes (`busiest`); None: nobody keeps them."""

    @property
    def meets_at_both_ends(self) -> bool:
        return all(outcome.meets for outcome in self.ends.values())

    @property
    def alternatives(self) -> list[Row]:
        """The scenario's own cluster and all others that were examined, by price, each once."""
        known = {} if self.chosen is None else {self.chosen.candidate.label}
        found: dict[str, Row] = {}
        own = () if self.own is None else (self.own,)
        safe = () if self.safe is None else (self.safe,)
        for row in (*own, *self.others[:_MOST_EQUAL], *self.nearest, *safe, *self.faster):
            if row.candidate.label not in known:
                found.setdefault(row.candidate.label, row)
        return sorted(found.values(), key=lambda row: (row.candidate.price_per_h, not row.outcome.meets))

    @property
    def rows(self) -> list[Row]:
        """The plan, then its alternatives."""
        return [*([] if self.chosen is None else [self.chosen]), *self.alternatives]
