"""A plan: the chosen cluster, its alternatives, and the confidence."""

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
"""Maximum number of listed clusters at the plan's price; those with most headroom are listed."""


class Row(NamedTuple):
    candidate: CandidateCluster
    outcome: Outcome
    limit: Limit | None = None
    """Limiting resource of a cluster that misses the SLO, for the term that it misses most."""
    repeated: Sequence[Outcome] = ()
    """Outcomes with slightly faster and slower messages. Empty: the cluster was not repeated."""

    @property
    def runs(self) -> list[Outcome]:
        """Outcomes of the cluster's own run and of its repetitions."""
        return [self.outcome, *self.repeated]

    @property
    def num_meeting(self) -> int:
        """Number of these runs that meet the SLO."""
        return sum(one.meets for one in self.runs)

    @property
    def is_stable(self) -> bool:
        """True if all repetitions have the same verdict."""
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
    """The load as text: number of requests, lengths, source and times."""
    currency: str
    """Symbol or code of the prices. Empty: GPUs have no prices, and the cluster with the fewest GPUs is the
    cheapest."""
    slo: Slo
    num_candidates: int
    num_tried: int
    max_gpus: int
    chosen: Row | None
    """The chosen cluster. None: no cluster meets the SLO."""
    others: tuple[Row, ...]
    """Other clusters at the same price that meet the SLO."""
    nearest: tuple[Row, ...]
    """Clusters at this price or below that miss the SLO, the nearest first."""
    faster: tuple[Row, ...] = ()
    """More expensive clusters, each with more headroom than all cheaper ones."""
    load_factor: float | None = None
    """Largest multiple of the load that the plan takes within the SLO. None: the load cannot be scaled."""
    breaks: str = ""
    """The smallest load at which the plan misses the SLO, as text. Empty: it meets the SLO at all loads that were
    tried."""
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcome of the plan without one of its servers, by role. A role with a single server is left out."""
    ends: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes at the fast and at the slow end of the predicted range. Empty if step times were measured on a
    server."""

    safe: Row | None = None
    """The cheapest cluster that also meets the SLO at the slow end, if the plan does not."""
    measure: Measurement | None = None
    """The measurement that would decide whether the plan meets the SLO. None: both ends of the range meet it."""
    foreign_setup: tuple[str, ...] = ()
    """Differences between the plan's setup and the setup whose times were measured."""
    is_measured: bool = True
    """True: the scenario has a profile that was measured on a server."""
    loads: Mapping[float, Row | None] = field(default_factory=dict)
    """The cheapest cluster for each multiple of the load. None: no cluster meets the SLO."""
    own: Row | None = None
    """The cluster of the scenario from which the search started."""
    checked: Outcome | None = None
    """Outcome on a second trace, which was not used for planning."""
    lone: LoneRequest | None = None
    """A request that misses the SLO even without a queue, if that is why no cluster meets the SLO."""

    busiest: Mapping[str, Any] | None = None
    """Load and queue of the plan in its worst minutes (`busiest`). None: not computed."""

    @property
    def meets_at_both_ends(self) -> bool:
        return all(outcome.meets for outcome in self.ends.values())

    @property
    def alternatives(self) -> list[Row]:
        """The scenario's own cluster and all other examined clusters, by price, each once."""
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
        """Rows of the table of clusters: the plan, then its alternatives."""
        return [*([] if self.chosen is None else [self.chosen]), *self.alternatives]
