"""A request that misses the SLO with no other beside it: then no number of instances helps."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from pdsim.metrics.records import RequestRecord
from pdsim.study.planning.slo import Slo, Term


@dataclass(frozen=True)
class LoneRequest:
    """The request at the percentile that is missed most, where requests are sent one at a time."""

    cluster: str
    term: Term
    strain: float
    """The percentile over its limit; infinite: the request fails."""
    request_id: int
    num_input_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return (
            f"One at a time on {self.cluster}, {self.term.lack(self.strain)}: request {self.request_id}, with "
            f"{self.num_input_tokens:,} tokens in and {self.num_output_tokens:,} out. Requests alone miss the SLO on "
            "all other servers, too, so more instances do not help"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster,
            "term": str(self.term),
            "of_limit": self.strain if isfinite(self.strain) else None,
            "request": self.request_id,
            "input_tokens": self.num_input_tokens,
            "output_tokens": self.num_output_tokens,
        }


def lone_request(cluster: str, slo: Slo, requests: Sequence[RequestRecord]) -> LoneRequest | None:
    """requests: of a run in which none waits for another. None: it meets the SLO."""
    found = [(*_at_percentile(term, requests), term) for term in slo.terms]
    strain, request, term = max(found, key=lambda one: one[0])
    if request is None or strain <= 1:
        return None
    return LoneRequest(cluster, term, strain, request.request_id, request.num_prompt_tokens, request.num_output_tokens)


def _at_percentile(term: Term, requests: Sequence[RequestRecord]) -> tuple[float, RequestRecord | None]:
    """The percentile over its limit, and the request that has it; None: the term is about no request."""
    strains = sorted(
        (_strain(term, request), place)
        for place, request in enumerate(requests)
        if term.covers(request.request_class) and term.is_about(request.num_output_tokens)
    )
    if not strains:
        return 0.0, None
    strain, place = strains[len(strains) - 1 - term.num_allowed(len(strains))]
    return strain, requests[place]


def _strain(term: Term, request: RequestRecord) -> float:
    return term.strain([request]) if request.outcome == "finished" else inf
