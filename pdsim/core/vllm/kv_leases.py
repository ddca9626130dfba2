"""Leases on computed KV, which prefill holds until decode reads it. As long as the decode instance runs, it renews the
lease again and again.

If decode dies, nobody tells prefill that the KV is not needed: prefill frees it when the lease ends. NIXL's lease lasts
30 s from the end of the prompt's computation and 20 s from each renewal (vLLM 0.33.0, nixl/base_scheduler.py:84,
base_worker.py:631, 3392). Mooncake's lease lasts 480 s and is never renewed (envs.py:268). If decode refuses or aborts
a request, it tells prefill to free the KV (nixl/pull_scheduler.py:220, push_scheduler.py:233,
mooncake_connector.py:1189).
"""

from collections.abc import Iterable
from typing import NamedTuple

from pdsim.core.messages import Command, WakeAt

_SECOND_NS = 10**9


class LeaseTimes(NamedTuple):
    duration_ns: int
    """Duration in ns of a lease, from the end of the prompt's last forward."""
    renewal_ns: int = 0
    """Duration in ns of a renewed lease, from its last renewal. 0: leases are not renewed."""


NIXL = LeaseTimes(30 * _SECOND_NS, 20 * _SECOND_NS)
MOONCAKE = LeaseTimes(480 * _SECOND_NS)


class KvLeases:
    """How long one prefill instance still keeps the KV of computed prompts that decode has not read."""

    def __init__(self, owner: str, times: LeaseTimes) -> None:
        """owner: the prefill instance, which is woken at the end of a lease. times: duration of a lease, from its begin
        and from a renewal.
        """
        self._owner = owner
        self._times = times
        self._computed_ns: dict[int, int] = {}
        """By request id: time in ns at which the prompt was computed. Has only requests whose KV decode has not begun
        to read."""
        self._ends_ns: dict[int, int] = {}
        """By request id: time in ns at which the lease ends. Has only requests whose decode instance has died."""

    def begin(self, request_id: int, now_ns: int) -> None:
        """Notes that the request's prompt is computed at now_ns, and that its KV waits until decode reads it."""
        self._computed_ns[request_id] = now_ns

    def end(self, request_id: int) -> None:
        """Ends the lease of a request whose KV is being read or was freed. No effect if there is no lease."""
        self._computed_ns.pop(request_id, None)
        self._ends_ns.pop(request_id, None)

    def outlives_decode(self, request_id: int) -> bool:
        """True if prefill still keeps the request's KV although the request's decode instance is dead."""
        return request_id in self._ends_ns

    def on_decode_down(self, request_ids: Iterable[int], seen_ns: int) -> list[Command]:
        """Lets the leases of these requests run out, because their decode instance has died. Returns alarms for their
        ends. Requests without a lease are ignored. seen_ns: time in ns of the instance's last sign of life, which
        counts as its last renewal.
        """
        left = [request_id for request_id in request_ids if request_id in self._computed_ns]
        for request_id in left:
            self._ends_ns[request_id] = max(
                self._computed_ns[request_id] + self._times.duration_ns, seen_ns + self._times.renewal_ns
            )
        return [WakeAt(self._owner, end_ns) for end_ns in sorted({self._ends_ns[one] for one in left})]

    def expired(self, now_ns: int) -> list[int]:
        """Removes those leases of dead decode instances that have ended by now_ns. Returns the ids of the requests."""
        found = [request_id for request_id, end_ns in self._ends_ns.items() if end_ns <= now_ns]
        for request_id in found:
            self.end(request_id)
        return found
