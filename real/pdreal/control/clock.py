"""Time of a run in ns since its epoch, which is the moment when its clients start. All processes of a machine share the
epoch.
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from time import monotonic_ns
from typing import Any


class Timeline:
    """Clock of one process of a run: tells the time in ns since the run's epoch, and calls functions at given times."""

    def __init__(self, epoch_ns: int, loop: AbstractEventLoop) -> None:
        """epoch_ns: moment when the run's clients start, in ns of the monotonic clock. The caller may set it later."""
        self.epoch_ns = epoch_ns
        self.loop = loop

    @property
    def now_ns(self) -> int:
        return monotonic_ns() - self.epoch_ns

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> TimerHandle:
        """Calls callback(None) after the delay, or at once if the delay is negative."""
        return self.loop.call_later(max(0, delay_ns) / 1e9, callback, None)

    def at(self, time_ns: int, callback: Callable[[Any], None]) -> TimerHandle:
        return self.after(time_ns - self.now_ns, callback)
