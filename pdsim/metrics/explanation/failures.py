"""Counts the failed requests of a run by reason, and names the fields of the scenario that would prevent such
failures.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pdsim.core.instance import LACKS
from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.relief import relief_of
from pdsim.metrics.records import RequestRecord

_INSTANCE = re.compile(r"\b(prefill|decode|aggregated)-\d+(?:\.\d+)?\b")
_NUMBER = re.compile(r"\d+")
_RESOURCES = {
    LACKS["slots"]: "{role} slots",
    LACKS["pages"]: "{role} KV",
    "does not fit the staging ring": "staging ring",
    "do not fit the host memory": "decode host memory",
    " tokens of ": "{last} KV",
    " pages of ": "{last} KV",
    "no transfer from": "link",
}
"""The resource that was missing, by words that the reason contains. {role} is the role of the first instance in the
reason, {last} that of the last.
"""
_ASKED_FOR = ("aborted by the client", "shed")
"""First words of the reasons of failures that no fault causes: the scenario has clients that abort, or a router that
refuses.
"""
_TOO_LARGE = "fit"
"""Word in the reason of every request that fails because it is too large, as in "does not fit the staging ring". Faults
of instances or links do not cause such failures.
"""


@dataclass(frozen=True)
class Failure:
    """The requests that failed for one reason."""

    reason: str
    """Reason of the failures, as the first failed request gives it. Names of instances are replaced by their roles."""
    num_requests: int
    relief: str
    """Text with the fields of the scenario that give more of the missing resource. Empty: the reason names none."""
    is_wanted: bool
    """True: the scenario asks for failures with this reason. A client aborted the request, or the router refused
    it, or in the scenario instances die or links slow down, and the reason is not that the request is too large.
    """
    example: int
    """Id of the first request that failed for this reason."""

    @property
    def text(self) -> str:
        return f"{self.reason}; relieved by {self.relief}" if self.relief else self.reason


def failures_of(requests: Iterable[RequestRecord], *, has_faults: bool) -> list[Failure]:
    """Failures by reason, the most frequent first.

    has_faults: True: instances die or links slow down in the scenario, so that any request may fail.
    """
    by_kind: dict[str, list[RequestRecord]] = {}
    for request in requests:
        if request.outcome == "failed":
            by_kind.setdefault(_NUMBER.sub("", _by_role(request.reason)), []).append(request)
    found = [_failure(group, has_faults=has_faults) for group in by_kind.values()]
    return sorted(found, key=lambda failure: (-failure.num_requests, failure.example))


def _failure(group: Sequence[RequestRecord], *, has_faults: bool) -> Failure:
    first = group[0]
    is_asked_for = first.reason.startswith(_ASKED_FOR)
    return Failure(
        reason=_by_role(first.reason),
        num_requests=len(group),
        relief=relief_of(_resource(first.reason), aggregated=first.is_aggregated),
        is_wanted=is_asked_for or (has_faults and _TOO_LARGE not in first.reason.split()),
        example=first.request_id,
    )


def _by_role(reason: str) -> str:
    return _INSTANCE.sub(lambda found: found[1], reason)


def _resource(reason: str) -> str:
    roles = _INSTANCE.findall(reason)
    if not roles:
        return ""
    named = (resource for words, resource in _RESOURCES.items() if words in reason)
    return next(named, "").format(role=roles[0], last=roles[-1])


def failure_rows(requests: Iterable[RequestRecord], *, has_faults: bool) -> list[dict[str, Any]]:
    """Failed requests by reason: the fields of each Failure as a dict, for summaries. has_faults: True: instances die
    or links slow down in the scenario.
    """
    return [asdict(failure) for failure in failures_of(requests, has_faults=has_faults)]


def failures_in(summary: Mapping[str, Any]) -> list[Failure]:
    """The failures that a summary lists. Empty: the summary comes from another tool, or from an earlier release of
    pdsim.
    """
    return [Failure(**row) for row in summary.get("pdsim", {}).get("failures", ())]


def failure_text(summary: Mapping[str, Any]) -> str:
    """A sentence on the failures that the scenario does not ask for. Empty: there are none."""
    unwanted = [failure for failure in failures_in(summary) if not failure.is_wanted]
    if not unwanted:
        return ""
    own = summary["pdsim"]
    num_sent = summary["completed"] + own["failed"] + own["unfinished"]
    number = sum(failure.num_requests for failure in unwanted)
    if len(unwanted) == 1:
        return f"{number:,} of {num_sent:,} requests failed: {unwanted[0].text}"
    reasons = "; ".join(f"{failure.num_requests:,} ({failure.text})" for failure in unwanted)
    return f"{number:,} of {num_sent:,} requests failed: {reasons}"
