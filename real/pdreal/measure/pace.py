"""How a core's speed comes and goes: a virtual one has neighbours on the processor under it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean, median, quantiles
from time import perf_counter

from pdreal.measure.rows import Row
from pdreal.stopwatch import once_us

_UNIT_ROUNDS = 20_000
"""Of a unit of work: 0.2 to 0.4 ms at full speed."""
_SLOW = 1.25
"""Times as long as at full speed; cores are seen to take 1.5 times and more, and to wander by a tenth."""
_NEIGHBOURS = 21
"""Units whose median says how fast the core is: a spell of less than some milliseconds passes within a step."""


def pace_rows(seconds: float) -> Iterator[Row]:
    """A row of each spell in which a core that is never idle kept its speed: `full`, or `slow`."""
    end = perf_counter() + seconds
    times_us: list[float] = []
    while perf_counter() < end or len(times_us) < _NEIGHBOURS:
        times_us.append(once_us(_unit))
    for is_slow, spell in groupby(zip(_slow(times_us), times_us, strict=True), key=lambda unit: unit[0]):
        units = [time_us for _, time_us in spell]
        yield Row(kind="pace", time_us=fmean(units), repeats=len(units), what="slow" if is_slow else "full")


def _slow(times_us: Sequence[float]) -> list[bool]:
    """Of each unit, whether the core was slow then: it is at full speed in a quarter of all time at least."""
    full_us = quantiles(times_us, n=4)[0]
    half = _NEIGHBOURS // 2
    around = (times_us[max(0, i - half) : i + half + 1] for i in range(len(times_us)))
    return [median(units) > _SLOW * full_us for units in around]


def _unit() -> None:
    for _ in range(_UNIT_ROUNDS):
        pass
