"""Simulated time in integer ns. Events of one instant run in this order:

first   messages, transfers, arrivals                            in the order in which they were scheduled
then    instances handle ended steps, and choose the next steps  by instance

Therefore the order of instances does not depend on which instance scheduled its event first.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from simpy import Environment
from simpy.events import EventPriority

FIRST = EventPriority(1)
CHOICES = EventPriority(1 << 20)

Callback = Callable[[Any], None]
"""Function that an alarm calls with its payload."""


class Alarm:
    """A scheduled call of a function at one time."""

    def __init__(self, callback: Callback, payload: Any) -> None:
        self.callback = callback
        self.payload = payload

    def cancel(self) -> None:
        """Cancels the alarm. Its time then passes without effect."""
        self.callback = _nothing


def _nothing(_: Any) -> None:
    pass


class Timeline:
    """SimPy's event queue, with delays in whole ns. Law: tests/laws/test_alarms.py."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0
        """Number of events scheduled so far."""
        self._queue: list[Any] = Environment()._queue  # noqa: SLF001  not inherited, for it is compiled

    def after(self, delay_ns: int, callback: Callback, payload: Any = None, order: EventPriority = FIRST) -> Alarm:
        """Schedules a callback, as SimPy's timeout does. order: priority among events of the same instant, lower
        first.
        """
        assert delay_ns >= 0, f"{callback} is due {-delay_ns} ns ago"
        alarm = Alarm(callback, payload)
        self.num_events += 1
        heappush(self._queue, (self.now_ns + delay_ns, order, self.num_events, alarm))
        return alarm

    def run_all(self) -> None:
        """Runs all alarms, as SimPy's run does. SimPy's own loop is not needed, because all events here are alarms, and
        none can fail.
        """
        queue = self._queue
        while queue:
            now_ns, _, _, alarm = heappop(queue)
            self.now_ns = now_ns
            alarm.callback(alarm.payload)

    @property
    def is_last_now(self) -> bool:
        """True if no other event is due at the present instant."""
        return not self._queue or self._queue[0][0] > self.now_ns

    @property
    def has_ended(self) -> bool:
        return not self._queue
