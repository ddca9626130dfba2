"""Events of one instant happen in a fixed order, so that who scheduled first never matters:

first    messages, transfers, arrivals      in the order in which they were scheduled
then     ends of steps                      by instance
last     instances choose what to do next   by instance
"""

from collections.abc import Callable
from typing import Any

from simpy import Environment, Event
from simpy.events import EventPriority

FIRST = 1
STEP_ENDS = 1 << 20
CHOICES = 1 << 40


class Alarm(Event):
    """Calls back once, after delay_ns, in its place among the events of that instant."""

    def __init__(
        self, env: Environment, delay_ns: int, callback: Callable[[Event], None], *, value: Any = None, order: int = FIRST
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value = value
        self._ok = True
        env.schedule(self, EventPriority(order), delay_ns)

    def cancel(self) -> None:
        """It still passes, without effect."""
        self.callbacks = []
