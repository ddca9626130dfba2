"""Requests that are remembered for a limited time: until a timeout, or until messages about an ended request can no
longer arrive.
"""

from collections import deque
from collections.abc import Callable

from pdsim.core.messages import Command, WakeAt

KEPT_NS = 120_000_000_000
"""Time in ns for which LateRequests remembers a request, longer than any message takes. SGLang's bootstrap server also
forgets rooms after this time.
"""


class Deadlines:
    """Requests with one common timeout, in order of their deadlines. `add` starts a request's timeout. `expired`
    returns overdue requests.
    """

    def __init__(self, owner: str, timeout_ns: int | None, name: str = "timeout") -> None:
        """owner: instance to wake at a deadline. timeout_ns: time in ns after which a request expires; None: requests
        never expire. name: name of the timeout in messages.
        """
        self._owner = owner
        self._timeout_ns = timeout_ns
        self._name = name
        self._due: deque[tuple[int, int]] = deque()
        self._woken_ns = -1
        """Time in ns at which the last requested alarm wakes the owner. -1: no alarm was requested yet."""

    @property
    def limit(self) -> str:
        """The timeout with its name, such as "bootstrap_timeout 20 s"."""
        assert self._timeout_ns is not None
        return f"{self._name} {self._timeout_ns / 1e9:g} s"

    def add(self, request_id: int, now_ns: int) -> list[Command]:
        if self._timeout_ns is None:
            return []
        self._due.append((now_ns + self._timeout_ns, request_id))
        return self._alarm(now_ns)

    def expired(self, now_ns: int, commands: list[Command], is_live: Callable[[int], bool]) -> list[int]:
        """Removes and returns, in order, the ids of requests that are overdue and for which is_live returns True. Adds
        an alarm for the next deadline to the commands.
        """
        if self._woken_ns > now_ns:
            return []
        found = []
        while self._due and (self._due[0][0] <= now_ns or not is_live(self._due[0][1])):
            request_id = self._due.popleft()[1]
            if is_live(request_id):
                found.append(request_id)
        commands += self._alarm(now_ns)
        return found

    def _alarm(self, now_ns: int) -> list[Command]:
        """Returns a command to wake the owner at the first deadline. Returns no command if an earlier alarm is still
        pending.
        """
        if self._woken_ns > now_ns or not self._due:
            return []
        self._woken_ns = self._due[0][0]
        return [WakeAt(self._owner, self._woken_ns)]


class LateRequests:
    """Requests that ended at an instance, or that never arrived there, each with the reason. Messages about these
    requests may still arrive. The owner sets now_ns at each message, and calls `forget` if `kept` is not empty.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.kept: dict[int, tuple[int, str]] = {}
        """Per request: the time in ns until which it is remembered, and the reason. Ordered by time."""

    def forget(self) -> None:
        """Forgets requests that were added KEPT_NS ago or earlier."""
        while self.kept and next(iter(self.kept.values()))[0] <= self.now_ns:
            del self.kept[next(iter(self.kept))]

    def add(self, request_id: int, why: str = "") -> None:
        """Remembers a request with a reason. A request that is already remembered keeps its first reason."""
        self.kept.setdefault(request_id, (self.now_ns + KEPT_NS, why))

    def why(self, request_id: int) -> str:
        return self.kept[request_id][1]
