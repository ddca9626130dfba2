"""The queue in which requests of a prefill instance wait until decode has granted pages.

state       begins when                                     ends when
ungranted   NewRequest came                                 KvGranted comes, a timeout ends, or the request is given up
early       KvGranted came before NewRequest                NewRequest comes, a timeout ends, or the request is given up
refused     prefill or decode will not serve the request    KEPT_NS later; messages about it are ignored until then
"""

from pdsim.core.deadlines import Deadlines, LateRequests
from pdsim.core.messages import Command, KvGranted
from pdsim.core.transfer.send_planner import PrefillRequest


class BootstrapQueue:
    """Requests of one prefill instance that wait for a grant of pages, and grants that came before their requests."""

    def __init__(self, prefill_id: str, *, timeout_ns: int | None) -> None:
        """timeout_ns: maximum wait of a request for its grant, and of a grant for its request. None: no limit."""
        self.ungranted: dict[int, PrefillRequest] = {}
        """Requests without a grant. Optimistic requests among them may be computed already."""
        self.early: dict[int, KvGranted] = {}
        self.refused = LateRequests()
        self._deadlines = Deadlines(prefill_id, timeout_ns, "bootstrap_timeout")

    @property
    def limit(self) -> str:
        """Text of the bootstrap timeout for messages: its name and its duration, such as "bootstrap_timeout 20 s"."""
        return self._deadlines.limit

    @property
    def bootstrapping(self) -> list[PrefillRequest]:
        """Requests without a grant that are not optimistic: prefill begins them only after the grant."""
        return [request for request in self.ungranted.values() if not request.is_optimistic]

    def watch(self, request_id: int, now_ns: int) -> list[Command]:
        """Begins the timeout of a request without a grant. Returns an alarm for the end of the timeout; nothing if an
        earlier alarm is pending.
        """
        return self._deadlines.add(request_id, now_ns)

    def keep(self, grant: KvGranted, now_ns: int) -> list[Command]:
        """Keeps a grant until its request arrives, unless the request was refused. Returns an alarm for the grant's
        timeout; nothing if there is no timeout or an earlier alarm is pending.
        """
        if grant.request_id in self.refused.kept:
            return []
        self.early[grant.request_id] = grant
        return self._deadlines.add(grant.request_id, now_ns)

    def refuse(self, request_id: int) -> PrefillRequest | None:
        """Refuses a request: drops its early grant, if there is one, and marks the request as refused. Returns the
        request if it is here without a grant; else None.
        """
        self.refused.add(request_id)
        self.early.pop(request_id, None)
        return self.ungranted.pop(request_id, None)

    def expired(self, now_ns: int, commands: list[Command]) -> list[PrefillRequest]:
        """Applies the timeout: refuses and returns requests that got no grant in time. Drops grants whose requests did
        not come in time, and refuses these requests. Adds an alarm for the next deadline to `commands`.
        """
        overdue = self._deadlines.expired(now_ns, commands, self._is_live)
        return [request for request_id in overdue if (request := self.refuse(request_id))]

    def _is_live(self, request_id: int) -> bool:
        return request_id in self.ungranted or request_id in self.early
