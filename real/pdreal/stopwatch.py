"""How long a piece of work takes, as often as the time allows."""

from collections.abc import Callable, Iterator
from itertools import repeat
from time import perf_counter_ns, sleep
from typing import Any

Work = Callable[[], Any]

_LEAST = 3
_LEAST_RESTED = 5
"""After a pause the host is slow to begin as well, now and then."""
_MOST = 50


def repeat_us(work: Work, seconds: float, *, warm_ups: int = 1) -> list[float]:
    """Sorted. Three times at least; until `seconds` are over or it was done 50 times."""
    return repeat_each_us(repeat(work), seconds, warm_ups=warm_ups)


def repeat_each_us(
    works: Iterator[Work], seconds: float, *, warm_ups: int = 1, pause_seconds: float = 0
) -> list[float]:
    """Of one work after another, which are alike. Five times at least with a pause before each."""
    for _ in range(warm_ups):
        next(works)()
    times_us: list[float] = []
    end_ns = perf_counter_ns() + seconds * 1e9
    least = _LEAST_RESTED if pause_seconds else _LEAST
    while len(times_us) < least or (len(times_us) < _MOST and perf_counter_ns() < end_ns):
        work = next(works)
        sleep(pause_seconds)
        times_us.append(once_us(work))
    return sorted(times_us)


def once_us(work: Work) -> float:
    begin_ns = perf_counter_ns()
    work()
    return (perf_counter_ns() - begin_ns) / 1e3
