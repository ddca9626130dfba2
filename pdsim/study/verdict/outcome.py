"""The outcome of a cluster: whether the cluster meets an SLO, which numbers it has, and which limits it misses."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from math import inf, isfinite
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import is_saturated
from pdsim.study.verdict.readings import Attainment, Reading, Times, mean_attainment
from pdsim.study.verdict.slo import Judgement, Slo, Term
from pdsim.workload.client import Client, OpenLoop

SATURATED = "cannot take the load"
NEAR = 1.5
"""A number is near its limit if the larger of the two is at most this many times the smaller. The factor is large
because chance can change a p99 by a quarter.
"""


@dataclass(frozen=True)
class Outcome:
    """How a cluster does under an SLO, over its runs. Each run has another seed."""

    meets: bool
    """True: each run went on to its end and is not saturated, and the mean over the runs of each number that the SLO
    limits keeps its limit.
    """
    reason: str
    """Says why the cluster misses the SLO. Empty: it meets the SLO."""
    num_ended: int
    """Number of requests that had finished or failed when the verdict was certain, including warm-up requests, summed
    over the runs. outcome_of_run counts no warm-up requests.
    """
    judgement: Judgement | None = field(default=None, kw_only=True)
    """The values of the numbers that the SLO limits. None: the run stopped early or failed."""
    classes: Mapping[str, Attainment] = field(default_factory=dict, kw_only=True)
    """For each class of requests, by its name: how many of them meet the SLO. Empty: requests have no classes, or a run
    stopped early or failed.
    """

    @property
    def attained(self) -> Attainment | None:
        return None if self.judgement is None else self.judgement.attained

    @property
    def readings(self) -> list[Reading]:
        """The numbers that the SLO limits, with their values and limits. A term that asks for a share, such as "ttft <
        2 s and tpot < 50 ms for 90 %", gives each metric at the percentile of the share (TTFT p90, TPOT p90), then the
        share of requests. Empty: the run stopped early or failed.
        """
        return [] if self.judgement is None else self.judgement.listed

    @property
    def ratios(self) -> Mapping[Term, float]:
        """For each term of the SLO: the term's value divided by its limit (Term.ratio). Empty: the run stopped early or
        failed.
        """
        return {} if self.judgement is None else self.judgement.ratios

    @property
    def ratio(self) -> float:
        """The largest quotient of a value and its limit (`ratios`) over all terms of the SLO. Infinite: the run stopped
        early or failed, or too many requests failed.
        """
        return max(self.ratios.values(), default=inf)

    @property
    def is_near(self) -> bool:
        """True if the number furthest above its limit, or nearest below, is near the limit, so that chance may change
        the verdict.
        """
        return 1 / NEAR <= self.ratio <= NEAR

    @property
    def why(self) -> str:
        """Clause that says why the cluster misses the SLO. Empty: the cluster meets the SLO."""
        return f"it {SATURATED}" if self.reason == SATURATED else self.reason

    @property
    def lack(self) -> str:
        """Lists the missed terms with their values. If no values are known, or the cluster is saturated: gives the
        reason. Empty: the cluster meets the SLO.
        """
        if self.judgement is None or self.reason == SATURATED or not self.judgement.missed:
            return self.why
        return " and ".join(self.judgement.lacks)

    @property
    def shortfall(self) -> str:
        """Describes in a few words the limit of the SLO that is missed most. If no values are known, or the cluster is
        saturated: gives the reason. Empty: the cluster meets the SLO.
        """
        judged = self.judgement
        if judged is None or self.reason == SATURATED or not judged.missed:
            return self.reason
        term = max(judged.missed, key=judged.ratios.__getitem__)
        worst = max(judged.details_of(term), key=lambda one: one.value / one.limit, default=judged.readings[term])
        if worst.value == inf:
            return "requests fail"
        return judged.readings[term].short if worst.is_met or worst.is_share else f"{worst.name} is {worst.value_text}"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"meets": self.meets, "reason": self.reason, "terms": [], "limits": []}
        if self.judgement is None:
            return {**found, "attained": None, "goodput_per_s": None}
        found["terms"] = [
            one.to_json() | {"of_limit": finite(self.judgement.ratios[term])}
            for term, one in self.judgement.readings.items()
        ]
        found["limits"] = [one.to_json() for one in self.judgement.details]
        attained = self.judgement.attained
        joint = {"attained": attained.share, "goodput_per_s": attained.goodput_per_s}
        classes = {name: asdict(one) for name, one in self.classes.items()}
        return {**found, **joint, **({"classes": classes} if classes else {})}


def finite(value: float) -> float | None:
    return value if isfinite(value) else None


def outcome_of(rows: Sequence[Mapping[str, Any]], slo: Slo) -> Outcome:
    """The outcome of a cluster from the rows of its runs, one per seed. A queue that grows under generated arrivals
    counts as a miss.
    """
    num_ended = sum(map(_num_ended, rows))
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return Outcome(meets=False, reason=bad[0]["message"], num_ended=num_ended)
    runs = [Times.of_row(row) for row in rows]
    failures = next((row["failures"] for row in rows if row["failures"]), "")
    return _judged(slo, runs, num_ended, failures, is_overloaded=any(row["saturated"] for row in rows))


def _num_ended(row: Mapping[str, Any]) -> int:
    """Number of requests that finished or failed in a run, including warm-up requests. row: the run's row of results.
    If the run ended early, its column `completed` counts them all.
    """
    return sum(row.get(count) or 0 for count in ("completed", "failed", "warm_up_requests"))


def outcome_of_run(requests: Sequence[RequestRecord], client: Client, slo: Slo, failures: str = "") -> Outcome:
    """The outcome of one run from the records of its requests. failures: text on how many requests failed, and why."""
    num_ended = sum(request.outcome != "unfinished" for request in requests)
    is_overloaded = cannot_take_load(client, requests)
    return _judged(slo, [Times.of_requests(requests)], num_ended, failures, is_overloaded=is_overloaded)


def cannot_take_load(client: Client, requests: Sequence[RequestRecord]) -> bool:
    """True if the cluster is saturated: more and more requests wait under generated arrivals. Always False for clients
    that send at a trace's recorded times, all at once, or in a closed loop.
    """
    return isinstance(client, OpenLoop) and client.arrivals is not None and is_saturated(requests)


def _judged(slo: Slo, runs: Sequence[Times], num_ended: int, failures: str, *, is_overloaded: bool) -> Outcome:
    judged = slo.judge(runs)
    missed = [*(term.missed for term in judged.missed), *([failures] if judged.missed and failures else [])]
    reason = SATURATED if is_overloaded else " and ".join(missed)
    names = sorted({str(name) for times in runs if times.classes is not None for name in times.classes})
    classes = {name: mean_attainment([slo.attained(times, name) for times in runs]) for name in names}
    return Outcome(meets=not reason, reason=reason, num_ended=num_ended, judgement=judged, classes=classes)
