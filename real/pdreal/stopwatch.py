"""How long a piece of work takes, as often as the time allows."""

from collections.abc import Callable
from time import perf_counter_ns, sleep
from typing import Any

_LEAST = 3
_LEAST_RESTED = 5
"""After a pause the host is slow to begin as well, now and then."""
_MOST = 50


def repeat_us(work: Callable[[], Any], seconds: float, *, warm_ups: int = 1, pause_seconds: float = 0) -> list[float]:
    """Sorted. Three times at least, five with a pause before each; until `seconds` are over or it was done 50 times."""
    for _ in range(warm_ups):
        work()
    times_us: list[float] = []
    end_ns = perf_counter_ns() + seconds * 1e9
    least = _LEAST_RESTED if pause_seconds else _LEAST
    while len(times_us) < least or (len(times_us) < _MOST and perf_counter_ns() < end_ns):
        sleep(pause_seconds)
        times_us.append(once_us(work))
    return sorted(times_us)


def once_us(work: Callable[[], Any]) -> float:
    begin_ns = perf_counter_ns()
    work()
    return (perf_counter_ns() - begin_ns) / 1e3
