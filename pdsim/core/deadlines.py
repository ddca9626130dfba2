"""Requests that are kept for a time: until a message must arrive, or until no message about them can arrive any
more.
"""

from collections import deque
from collections.abc import Callable

from pdsim.core.messages import Command, WakeAt

KEPT_NS = 120_000_000_000
"""Time in ns that exceeds the latency of any message. SGLang's bootstrap server also forgets rooms after this time."""


class Deadlines:
    """Requests with the same timeout, in order of their deadlines. `add` returns a request to be woken; `expired`
    returns overdue requests.
    """

    def __init__(self, owner: str, timeout_ns: int | None, name: str = "timeout") -> None:
        """Sets the timeout and its name. None: no request expires."""
        self._owner = owner
        self._timeout_ns = timeout_ns
        self._name = name
        self._due: deque[tuple[int, int]] = deque()
        self._woken_ns = -1
        """Time of the last alarm that was set."""

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
        """Overdue requests that are still live, in order. The call forgets them and sets an alarm for the next
        deadline.
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
        """Command to wake the owner at the first deadline, unless an earlier alarm is still pending."""
        if self._woken_ns > now_ns or not self._due:
            return []
        self._woken_ns = self._due[0][0]
        return [WakeAt(self._owner, self._woken_ns)]


class LateRequests:
    """Requests that ended or never arrived at this instance, each with the reason. Messages about them may still be on
    the way.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, str]] = {}
        """Time until which a request is kept, and the reason; ordered by time."""
        self._now_ns = 0

    def at(self, now_ns: int) -> None:
        """Sets the present time, and forgets requests older than KEPT_NS."""
        self._now_ns = now_ns
        while self._kept and next(iter(self._kept.values()))[0] <= now_ns:
            del self._kept[next(iter(self._kept))]

    def add(self, request_id: int, why: str = "") -> None:
        """Remembers a request with its reason. A request that is remembered already keeps its first reason."""
        self._kept.setdefault(request_id, (self._now_ns + KEPT_NS, why))

    def discard(self, request_id: int) -> None:
        self._kept.pop(request_id, None)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._kept

    def why(self, request_id: int) -> str:
        return self._kept[request_id][1]
