"""The outcome of a cluster: its runs read back, whole or ended when they missed the SLO."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite
from statistics import fmean
from typing import Any

import numpy as np

from pdsim.metrics.records import RequestRecord
from pdsim.study.planning.slo import Slo, Term

SATURATED = "cannot take the load"


@dataclass(frozen=True)
class Attainment:
    """Requests within all limits that cover them, of all seeds."""

    num_requests: int
    share: float
    goodput_per_s: float


@dataclass(frozen=True)
class Outcome:
    """Outcome of all seeds together."""

    meets: bool
    reason: str
    """Reason why it does not; empty if it does."""
    num_ended: int
    """Requests that had ended when it was sure."""
    attained: Attainment | None = field(default=None, kw_only=True)
    """None: the run was not whole."""
    classes: Mapping[str, Attainment] = field(default_factory=dict, kw_only=True)
    """Attainment of each class that requests have."""
    strains: Mapping[Term, float]
    """Each term's percentile over its limit; empty if the run was not whole."""

    @property
    def strain(self) -> float:
        """The largest; infinite if they are not known."""
        return max(self.strains.values(), default=inf)

    @property
    def worst(self) -> Term | None:
        """The term that it is nearest to, or misses most."""
        return max(self.strains, key=self.strains.__getitem__, default=None)

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return f"it {SATURATED}" if self.reason == SATURATED else self.reason

    @property
    def lack(self) -> str:
        """Terms that it misses, and how far; the reason where that is not known."""
        lacks = [term.lack(strain) for term, strain in self.strains.items() if strain > 1]
        return self.why if self.reason == SATURATED or not lacks else " and ".join(lacks)

    def to_json(self) -> dict[str, Any]:
        strains = {term: strain if isfinite(strain) else None for term, strain in self.strains.items()}
        of_limits = {str(term): strain for term, strain in strains.items()}
        found = {"meets": self.meets, "reason": self.reason, "of_limits": of_limits}
        if self.attained is None:
            return {**found, "attained": None, "goodput_per_s": None}
        classes = {
            name: asdict(attained)
            | {"of_limits": {term.name_in_class: s for term, s in strains.items() if term.request_class == name}}
            for name, attained in self.classes.items()
        }
        joint = {"attained": self.attained.share, "goodput_per_s": self.attained.goodput_per_s}
        return {**found, **joint, **({"classes": classes} if classes else {})}


def outcome_of(rows: Sequence[Mapping[str, Any]], slo: Slo, *, is_record: bool) -> Outcome:
    """The outcome of a point by its rows, one for each seed. Generated arrivals must not leave a growing queue;
    a record, with its own times, is judged as it was.
    """
    num_ended = sum(row["completed"] or 0 for row in rows)
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return Outcome(meets=False, reason=bad[0]["message"], num_ended=num_ended, strains={})
    strains = {term: fmean(term.strain_of_row(row) for row in rows) for term in slo.terms}
    missed = [term.missed for term, strain in strains.items() if strain > 1]
    reason = SATURATED if not is_record and any(row["saturated"] for row in rows) else " and ".join(missed)
    kept = [slo.kept(row) for row in rows]
    names = sorted({name for row in rows for name in row["classes"] or ()})
    return Outcome(
        meets=not reason,
        reason=reason,
        num_ended=num_ended,
        strains=strains,
        attained=_attainment(rows, kept),
        classes={name: _attainment(rows, kept, name) for name in names},
    )


def _attainment(rows: Sequence[Mapping[str, Any]], kept: Sequence[Any], name: str | None = None) -> Attainment:
    """Attainment of one class; None: of all requests."""
    num_sent, num_kept, rates = 0, 0, []
    for row, is_kept in zip(rows, kept, strict=True):
        num_ended = row["completed"] + row["failed"] + row["unfinished"]
        is_of_class = np.full(num_ended, fill_value=True) if name is None else np.asarray(row["classes"], str) == name
        count = int((is_kept & is_of_class[: len(is_kept)]).sum())
        num_sent += int(is_of_class.sum())
        num_kept += count
        rates.append(count / row["duration"] if row["duration"] else 0.0)
    return Attainment(num_sent, num_kept / max(1, num_sent), fmean(rates))


@dataclass(frozen=True)
class LoneRequest:
    """The request at the percentile that is missed most, where requests are sent one at a time."""

    cluster: str
    term: Term
    strain: float
    """The percentile over its limit; infinite: the request fails."""
    request: RequestRecord

    def __str__(self) -> str:
        request = self.request
        return (
            f"One at a time on {self.cluster}, {self.term.lack(self.strain)}: request {request.request_id}, with "
            f"{request.num_prompt_tokens:,} tokens in and {request.num_output_tokens:,} out. Requests alone miss "
            "the SLO on all other servers, too, so more instances do not help"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "term": str(self.term),
            "of_limit": self.strain if isfinite(self.strain) else None,
            "request": self.request.request_id,
            "input_tokens": self.request.num_prompt_tokens,
            "output_tokens": self.request.num_output_tokens,
        }


def lone_request(cluster: str, slo: Slo, requests: Sequence[RequestRecord]) -> LoneRequest | None:
    """requests: of a run in which none waits for another. None: it meets the SLO."""
    found = [(*_at_percentile(term, requests), term) for term in slo.terms]
    strain, request, term = max(found, key=lambda one: one[0])
    if request is None or strain <= 1:
        return None
    return LoneRequest(cluster, term, strain, request)


def _at_percentile(term: Term, requests: Sequence[RequestRecord]) -> tuple[float, RequestRecord | None]:
    """The percentile over its limit, and the request that has it; None: the term is about no request."""
    strains = sorted(
        (term.strain([request]) if request.outcome == "finished" else inf, place)
        for place, request in enumerate(requests)
        if term.covers(request.request_class) and term.is_about(request.num_output_tokens)
    )
    if not strains:
        return 0.0, None
    strain, place = strains[len(strains) - 1 - term.num_allowed(len(strains))]
    return strain, requests[place]
