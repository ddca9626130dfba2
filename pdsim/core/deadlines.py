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

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, request_id: int, now_ns: int) -> None:
        if self._timeout_ns is not None:
            self._due.append((now_ns + self._timeout_ns, request_id))

    def expired(self, now_ns: int) -> list[int]:
        """In order; they are forgotten. Also those that are long done: the owner knows."""
        found = []
        while self._due and self._due[0][0] <= now_ns:
            found.append(self._due.popleft()[1])
        return found

    def alarm(self, is_live: Callable[[int], bool], now_ns: int) -> list[Command]:
        """What wakes the owner for the first of those still live, unless it will be woken earlier anyway."""
        if self._woken_ns > now_ns:
            return []
        while self._due and not is_live(self._due[0][1]):
            self._due.popleft()
        if not self._due:
            return []
        self._woken_ns = self._due[0][0]
        return [WakeAt(self._owner, self._woken_ns)]
