"""Built-in shedding policies: whom a router refuses when too many wait."""

from dataclasses import dataclass

from pdsim.policy.views import SheddingView, WaitingRequest


@dataclass
class QueueLimit:
    """So many may wait for their first token: SGLang's rule for a full queue (--max-queued-requests).

    The one that arrives is refused, unless one of a lower priority waits: then the last of the lowest goes.
    """

    max_queued_requests: int
    """Requests that may wait."""

    def __post_init__(self) -> None:
        if self.max_queued_requests < 1:
            raise ValueError(f"max_queued_requests is at least 1, found {self.max_queued_requests}")

    def shed(self, request: WaitingRequest, view: SheddingView) -> int | None:
        waiting = view.waiting
        if len(waiting) < self.max_queued_requests:
            return None
        lowest = min(reversed(waiting), key=lambda other: other.priority)
        return lowest.request_id if lowest.priority < request.priority else request.request_id
