"""The result of a plan: the chosen cluster, alternatives to it, and the confidence in it."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.sim.uncertainty.sensitivity import Limit
from pdsim.study.examination import LoneRequest
from pdsim.study.measurement import Measurement
from pdsim.study.space import CandidateCluster
from pdsim.study.verdict.outcome import Outcome
from pdsim.study.verdict.slo import Slo

_MOST_EQUAL = 3
"""Maximum number of clusters of Plan.others in the report. Clusters furthest below the SLO's limits are kept."""


class Row(NamedTuple):
    candidate: CandidateCluster
    """The cluster that the row is about."""
    outcome: Outcome
    """Whether the cluster meets the SLO, and its numbers, over all its seeds."""
    limit: Limit | None = None
    """The scarce resource that makes the cluster miss the SLO. If the cluster misses several of the SLO's limits: the
    resource for the limit that is exceeded most. None: the row is not one of Plan.nearest, or the resource is not
    known.
    """
    repeated: Sequence[Outcome] = ()
    """Outcomes of repeated runs with slightly faster and slower messages. They differ by chance. Empty: the cluster's
    run was not repeated.
    """

    @property
    def runs(self) -> list[Outcome]:
        """The cluster's own outcome, followed by the outcomes of its repetitions."""
        return [self.outcome, *self.repeated]

    @property
    def num_meeting(self) -> int:
        """Number of the cluster's runs, repetitions included, that meet the SLO."""
        return sum(one.meets for one in self.runs)

    @property
    def is_stable(self) -> bool:
        """True if either all of the cluster's runs meet the SLO, or all miss it."""
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
    """Name of the plan's model in the catalog. If no cluster meets the SLO: names of the models of all candidates,
    joined by "or".
    """
    load: str
    """Describes the requests: their number, lengths, source and sending times."""
    currency: str
    """Symbol or code of the prices. Empty: the user gave no prices, and the cluster with the fewest GPUs counts as the
    cheapest.
    """
    slo: Slo
    """The SLO that the plan must meet."""
    num_candidates: int
    """Number of clusters within the limits of the search, simulated or not."""
    num_tried: int
    """Number of clusters of num_candidates that the search simulated. Copies with other settings, which are tried after
    the search, do not count.
    """
    max_gpus: int
    """Largest number of GPUs that a cluster may have."""
    chosen: Row | None
    """The chosen cluster. None: no cluster meets the SLO."""
    others: tuple[Row, ...]
    """Other clusters that meet the SLO at the plan's price."""
    nearest: tuple[Row, ...]
    """Clusters that miss the SLO and cost at most as much as the plan, those nearest to the limits first."""
    faster: tuple[Row, ...] = ()
    """Clusters with a higher price than the plan, the cheapest first. Each lies further below the SLO's limits than the
    plan and the clusters before it.
    """
    load_factor: float | None = None
    """Largest simulated multiple of the load up to which the plan always meets the SLO. 1: the plan misses the SLO at
    the smallest multiple. None: the load cannot be scaled.
    """
    breaks: str = ""
    """Text on the smallest load at which the plan misses the SLO, such as "not 1.5 x". Empty: the plan meets the SLO at
    all loads that were tried.
    """
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes of the plan with one server less, by the role of the lost server. Roles with a single server are left
    out.
    """
    ends: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes of the plan with the fastest and the slowest step times that measured kernels allow, by "fastest" and
    "slowest". Empty: step times were measured on a server.
    """

    safe: Row | None = None
    """The cheapest cluster that meets the SLO even with the slowest step times that measured kernels allow. None: the
    plan's own cluster does so, or no cluster does."""
    measure: Measurement | None = None
    """The measurement that would decide whether the plan meets the SLO. None: step times were measured on a server, or
    the plan meets the SLO with both the fastest and the slowest step times, or no cluster meets the SLO.
    """
    foreign_setup: tuple[str, ...] = ()
    """Differences between the scenario's own servers (not those of the plan's cluster) and the server on which the step
    times were measured, each as text.
    """
    is_measured: bool = True
    """True: the scenario's profile has step times that were measured on a server."""
    loads: Mapping[float, Row | None] = field(default_factory=dict)
    """The cheapest cluster that meets the SLO, by multiple of the load, for each multiple that the user asked for.
    None: no cluster meets the SLO.
    """
    own: Row | None = None
    """The user's own cluster, which the scenario describes. None: the user gave no scenario, one of the cluster's GPUs
    has no price, or no cluster meets the SLO.
    """
    checked: Outcome | None = None
    """Outcome of the plan on a second trace (--check), which was not used to choose the plan. None: no second trace."""
    lone: LoneRequest | None = None
    """A request that misses the SLO even if requests are sent one at a time; the reason why no cluster meets the SLO.
    None: there is another reason, or a cluster meets the SLO.
    """

    busiest: Mapping[str, Any] | None = None
    """Request rate and queue of the plan's cluster in those minutes of the load in which the queue is longest (see
    pdsim.study.planning.busiest). None: no cluster meets the SLO, or the plan is not written to a folder.
    """

    @property
    def meets_at_both_ends(self) -> bool:
        return all(outcome.meets for outcome in self.ends.values())

    @property
    def alternatives(self) -> list[Row]:
        """All clusters of the report except the plan, each once, the cheapest first: the user's own, up to _MOST_EQUAL
        of `others`, and those of `nearest`, `safe` and `faster`. At equal prices, clusters that meet the SLO come
        first.
        """
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
        """Rows of the table of clusters: the plan first, followed by the alternatives, the cheapest first."""
        return [*([] if self.chosen is None else [self.chosen]), *self.alternatives]
