"""How a core's speed comes and goes: a virtual one has neighbours on the processor under it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean, median, quantiles
from time import perf_counter, sleep

from pdreal.measure.rows import Row
from pdreal.stopwatch import Work, once_us

_LOOP_ROUNDS = 250_000
"""3 to 4 ms at full speed, as a small step."""
_REST_SECONDS = 0.0004
"""As decode loops have between two steps: a core that never rests keeps its place on the processor, and is slow less
often.
"""
_SLOW = 1.25
"""Times as long as at full speed; cores are seen to take 1.4 times and more, and to wander by a tenth."""
_NEIGHBOURS = 3
"""Times of the work whose median says how fast the core is: one that was interrupted is no spell."""


def pace_rows(work: Work, seconds: float, **sizes: float) -> Iterator[Row]:
    """A row of each spell in which a core that does the same again and again kept its speed: `full`, or `slow`."""
    end = perf_counter() + seconds
    times_us: list[tuple[float, float]] = []
    while perf_counter() < end or len(times_us) < _NEIGHBOURS:
        times_us.append((once_us(work), once_us(_rest)))
    is_slow = _slow([work_us for work_us, _ in times_us])
    for slow, spell in groupby(zip(is_slow, times_us, strict=True), key=lambda time: time[0]):
        of_work, of_rest = zip(*(time_us for _, time_us in spell), strict=True)
        what, means = "slow" if slow else "full", {"time_us": fmean(of_work), "rest_us": fmean(of_rest)}
        yield Row(kind="pace", repeats=len(of_work), what=what, **means, **sizes)  # type: ignore[arg-type]


def loop() -> None:
    """What a host does between steps is in Python."""
    for _ in range(_LOOP_ROUNDS):
        pass


def _rest() -> None:
    sleep(_REST_SECONDS)


def _slow(times_us: Sequence[float]) -> list[bool]:
    """Each time, whether the core was slow then: it is at full speed in a quarter of all time at least."""
    full_us = quantiles(times_us, n=4)[0]
    half = _NEIGHBOURS // 2
    around = (times_us[max(0, i - half) : i + half + 1] for i in range(len(times_us)))
    return [median(neighbours) > _SLOW * full_us for neighbours in around]
