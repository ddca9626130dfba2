"""Time of a run: ns since its epoch, which is when its clients start, one for all processes of the machine."""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from time import monotonic_ns
from typing import Any


class Timeline:
    """Time since an epoch, and alarms on an event loop."""

    def __init__(self, epoch_ns: int, loop: AbstractEventLoop) -> None:
        """epoch_ns: by the monotonic clock; it may be set later."""
        self.epoch_ns = epoch_ns
        self.loop = loop

    @property
    def now_ns(self) -> int:
        return monotonic_ns() - self.epoch_ns

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> TimerHandle:
        """Call back with None; at once if that is over."""
        return self.loop.call_later(max(0, delay_ns) / 1e9, callback, None)

    def at(self, time_ns: int, callback: Callable[[Any], None]) -> TimerHandle:
        return self.after(time_ns - self.now_ns, callback)
