"""Requests that something must have come of within a time. All may take equally long: the first in is the first due."""

from collections import deque
from collections.abc import Callable

from pdsim.core.messages import Command, WakeAt


class Deadlines:
    """Asks to be woken for the first that is due; `expired` names those that are."""

    def __init__(self, owner: str, timeout_ns: int | None) -> None:
        """Without a timeout nothing is ever due."""
        self._owner = owner
        self._timeout_ns = timeout_ns
        self._due: deque[tuple[int, int]] = deque()
        self._woken_ns = -1
        """For when the last alarm was set."""

    def add(self, request_id: int, now_ns: int) -> list[Command]:
        if self._timeout_ns is None:
            return []
        self._due.append((now_ns + self._timeout_ns, request_id))
        return self._alarm(now_ns)

    def expired(self, now_ns: int, commands: list[Command], is_live: Callable[[int], bool]) -> list[int]:
        """Those still live, in order. They are forgotten, and an alarm is set for the next."""
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
        """Unless the owner will be woken anyway, and sees then what is due next."""
        if self._woken_ns > now_ns or not self._due:
            return []
        self._woken_ns = self._due[0][0]
        return [WakeAt(self._owner, self._woken_ns)]
