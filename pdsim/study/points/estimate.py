"""Estimates of a number from one or several runs, each with an interval if it is known, and texts of estimates."""

from collections.abc import Callable, Sequence
from functools import cache
from math import atan, cos, isinf, pi, sin, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

_CONFIDENCE = 0.95


class Estimate(NamedTuple):
    mean: float
    """Mean over seeds. For a single run: its value."""
    half_width: float | None
    """Half of the 95 % confidence interval over seeds. With a single seed, but repetitions of the run with other
    message latencies: the largest difference between the run and a repetition. None: a single run without repetitions.
    """

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(self.mean * factor, None if self.half_width is None else self.half_width * factor)

    def divided(self, divisor: float) -> "Estimate":
        return Estimate(self.mean / divisor, None if self.half_width is None else self.half_width / divisor)

    def spread(self, digits: int = 3) -> str:
        """Text of the estimate, such as "12.3 ± 0.40": the mean and the half-width of its interval. digits: significant
        digits of the mean. The half-width is left out if it is at most the share 10**-digits of the mean (0.1 % for 3
        digits).
        """
        mean = number(self.mean, digits)
        half = self.half_width or 0.0
        return f"{mean} ± {number(half, 2)}" if half > abs(self.mean) * 10**-digits else mean

    @property
    def duration(self) -> str:
        """Text of an estimated time (in ms) with its half-width (see `spread`): in ms below 1000 ms, otherwise in s."""
        return f"{self.spread()} ms" if self.mean < 1000 else f"{self.divided(1e3).spread()} s"  # noqa: PLR2004

    @property
    def times(self) -> str:
        """Text of an estimated ratio, such as "1.20 times"."""
        return f"{self.spread()} times"

    @property
    def change(self) -> str:
        """Text of an estimated ratio as a change: "12.0 ± 3.0 % more"; below 1: "... % less"."""
        percent = Estimate(abs(self.mean - 1), self.half_width).scaled(100)
        return f"{percent.spread()} % {'more' if self.mean >= 1 else 'less'}"

    @property
    def is_told_apart(self) -> bool:
        """True if an estimated ratio differs from 1 by more than its half-width. If the half-width is 0 or not known,
        the ratio must differ by more than 2 %.
        """
        return abs(self.mean - 1) > (self.half_width or 0.02)

    def overlaps(self, other: "Estimate") -> bool:
        """True if both estimates have an interval, and some value lies in both intervals."""
        if self.half_width is None or other.half_width is None:
            return False
        return abs(self.mean - other.mean) <= self.half_width + other.half_width

    def text(self, shown: Callable[[float], str]) -> str:
        """Text of the mean, with the half-width of its interval if there is one, such as "1.2 ± 0.1". shown: makes the
        text of one number.
        """
        half = "" if self.half_width is None else f" ± {shown(self.half_width)}"
        return shown(self.mean) + half


def estimate(values: Sequence[float]) -> Estimate:
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None)
    return Estimate(mean, quantile(len(values) - 1) * stdev(values) / sqrt(len(values)))


def band(value: float, repeated: Sequence[float]) -> Estimate:
    """Estimate from one run: its value, and the largest change of the value over repeated runs that differ by
    chance.
    """
    return Estimate(value, max(abs(one - value) for one in repeated))


@cache
def quantile(degrees: int) -> float:
    """The number t for which 95 % of Student's t-distribution with `degrees` degrees of freedom lies in [-t, t]."""
    low, high = 0.0, 100.0
    while high - low > 1e-9:  # noqa: PLR2004
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < _CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Probability that a value of Student's t-distribution lies in [-t, t], by the finite series of Abramowitz and
    Stegun 26.7.3 and 26.7.4. degrees: degrees of freedom.
    """
    angle = atan(t / sqrt(degrees))
    is_odd = degrees % 2
    term = cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (k - 1) / k
    return (angle + sin(angle) * total) * 2 / pi if is_odd else sin(angle) * total


def number(value: float, digits: int = 3) -> str:
    """Text of a number with `digits` significant digits. Keeps all digits before the decimal point. Infinite: "∞"."""
    if isinf(value):
        return "∞"
    if not value or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def percent(share: float) -> str:
    return f"{share:.0%}"


def share(value: float) -> str:
    """Text of a share (0 to 1) as a percentage with at most four digits, so that 98.63 % is not printed as 99 %."""
    return f"{100 * value:.4g}%"
