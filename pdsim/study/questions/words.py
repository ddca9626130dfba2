"""Numbers as answers say them: with the unit, three digits, and the 95 % interval where there are replications."""

from math import isinf

from pdsim.study.result import Estimate


def number(value: float, digits: int = 3) -> str:
    """So many digits, and all of those before the point."""
    if isinf(value):
        return "∞"
    if not value or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def spread(value: Estimate, digits: int = 3) -> str:
    """The mean, and how far from it the true one may lie."""
    half = value.half_width
    mean = number(value.mean, digits)
    return mean if not half else f"{mean} ± {number(half, 2)}"


def milliseconds(value: Estimate) -> str:
    return f"{spread(value)} ms" if value.mean < 1000 else f"{spread(value.divided(1e3))} s"  # noqa: PLR2004


def times(value: Estimate) -> str:
    """A ratio."""
    return f"{spread(value)} times"


def percent(share: float) -> str:
    return f"{share:.0%}"


def share(value: float) -> str:
    """A percentage with four digits: 98.63 % is not 99 %."""
    return f"{100 * value:.4g}%"


def change(value: Estimate) -> str:
    """A ratio as a change: "12 ± 3 % more"."""
    percent = Estimate(abs(value.mean - 1), value.half_width).scaled(100)
    return f"{spread(percent)} % {'more' if value.mean >= 1 else 'less'}"


def is_told_apart(ratio: Estimate) -> bool:
    """True if 1 lies outside the interval. Where one run is all there is, or none varies: if it differs by 2 %."""
    return abs(ratio.mean - 1) > (ratio.half_width or 0.02)
