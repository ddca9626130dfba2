"""The rule for the width of ranges, whose table python -m docs.accuracy --coverage prints.

KERNELS_SPREAD of pdsim/cost/settings.py is the smallest multiple of 0.05 at which the ranges hold HELD of the measured
numbers of each metric, for GPUs with kernels and for GPUs without. To show what the rule is worth for a server that
nobody measured, the numbers of some sources choose a width, and those of the others judge it.
"""

# ruff: noqa: INP001  a script

from collections.abc import Callable, Sequence
from math import ceil, inf, log

from docs.accuracy import BLIND, METRICS, Number

HELD = 0.8
"""Share of measured numbers that ranges must hold."""
STEP = 0.05
"""Step in which the table gives a width, as a share of the present width."""
COLUMNS = (
    "known",
    "metric",
    "numbers",
    "width asked for",
    "one half chooses, the other judges",
    "the other way round",
    "study left out",
    "GPU left out",
    "engine left out",
)


def needed(number: Number) -> float:
    """Returns the smallest width of a range that holds the measured value, as a share of the present width: at most 1
    if the value is inside. Nothing is simulated: at another width, the ratio of an end to the prediction is taken to be
    a power of the present ratio.
    """
    if number.measured == number.predicted:
        return 0
    end = number.high if number.measured > number.predicted else number.low
    return log(number.measured / number.predicted) / log(end / number.predicted) if end != number.predicted else inf


def chosen(numbers: Sequence[Number]) -> float:
    """Returns the smallest width, a multiple of STEP as a share of the present width, that holds HELD of the
    numbers.
    """
    least = sorted(map(needed, numbers))[ceil(HELD * len(numbers)) - 1]
    return ceil(least / STEP - 1e-9) * STEP if least < inf else inf


def halves(numbers: Sequence[Number]) -> tuple[list[Number], list[Number]]:
    """Divides the numbers by their studies, in alphabetical order: every second study, and the others."""
    first = set(sorted({one.study for one in numbers})[::2])
    return [one for one in numbers if one.study in first], [one for one in numbers if one.study not in first]


def widths(found: Sequence[Number]) -> list[list[str]]:
    """Rows of a table with COLUMNS, one for each metric: for GPUs with kernels, and without. Widths are shares of the
    present width.
    """
    rows = []
    for known in BLIND:
        for metric in METRICS:
            group = [one for one in found if (one.known, one.metric) == (known, metric)]
            first, second = halves(group)
            rows.append([known, metric, str(len(group)), f"{chosen(group):.2f}"])
            rows[-1] += [_judged(*sides) for sides in ((first, second), (second, first))]
            rows[-1] += [f"{left_out(group, of):.0%}" for of in _SOURCES]
    return rows


def _judged(choosing: Sequence[Number], judging: Sequence[Number]) -> str:
    """Text: the width that some numbers choose, and the share of other numbers that such a range holds."""
    width = chosen(choosing)
    return f"{width:.2f}: {_held(judging, width) / len(judging):.0%} of {len(judging)}"


def left_out(numbers: Sequence[Number], of: Callable[[Number], str]) -> float:
    """Returns the share of numbers that lie inside their ranges if, for each source, the numbers of all other sources
    choose the width. of: returns the source of a number.
    """
    held = 0
    for source in {of(one) for one in numbers}:
        others = [one for one in numbers if of(one) != source]
        held += _held([one for one in numbers if of(one) == source], chosen(others))
    return held / len(numbers)


def _held(numbers: Sequence[Number], width: float) -> int:
    return sum(needed(one) <= width for one in numbers)


_SOURCES: tuple[Callable[[Number], str], ...] = (
    lambda one: one.study,
    lambda one: one.gpu,
    lambda one: one.engine.partition(" ")[0],
)
