"""The values that a field of a sweep takes: a list, or a range between two numbers or quantities."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdsim.scenario.fields import DIMENSIONS, Dimension
from pdsim.scenario.yaml_file import did_you_mean

_KEYS = ("from", "to", "count", "step", "scale")
_SCALES = ("linear", "log")
_EXAMPLE = "[1, 2, 4] or {from: 64 MiB, to: 4 GiB, count: 7, scale: log}"


@dataclass(frozen=True)
class Range:
    """A range from first to last, both included, in base units."""

    first: float
    last: float
    dimension: Dimension | None
    """None: plain numbers."""
    is_whole: bool
    is_log: bool
    count: int | None
    step: float | None

    def at(self, share: float) -> Any:
        """The value so far along the way, 0 to 1: a number, or a quantity with its unit."""
        if self.is_log:
            amount = self.first * (self.last / self.first) ** share
            return self._shown(round(amount) if self.is_whole else amount)
        if self.is_whole:  # every whole number takes an equal part of the way
            return self._shown(min(self.last, self.first + math.floor((self.last - self.first + 1) * share)))
        return self._shown(self.first + (self.last - self.first) * share)

    @property
    def num_values(self) -> int:
        """Number of values that a grid takes, or a few less. Raises ValueError if nothing says how many."""
        if self.step is not None:
            return math.floor((self.last - self.first) / self.step * (1 + 1e-12)) + 1
        if self.count is not None:
            return self.count
        if self.is_whole and self.dimension is None and not self.is_log:
            return int(self.last) - int(self.first) + 1
        raise ValueError("a range in a grid needs count, or step")

    def values(self) -> list[Any]:
        """Raises ValueError if nothing says how many."""
        if self.step is not None:
            return [self._shown(self.first + i * self.step) for i in range(self.num_values)]
        if self.count is not None:
            made = [self.at(i / (self.count - 1)) for i in range(self.count)]
            return list(dict.fromkeys(made))  # few whole numbers lie between near ends
        return [self._shown(int(self.first) + i) for i in range(self.num_values)]

    def _shown(self, amount: float) -> Any:
        if self.dimension is not None:
            return self.dimension.show(amount)
        return int(amount) if self.is_whole else amount


Values = Sequence[Any] | Range


def parse_values(given: Any) -> Values:
    """Raises ValueError with what is possible."""
    if isinstance(given, Mapping):
        return _range(given)
    if not isinstance(given, list | tuple):
        raise ValueError(f"expected values such as {_EXAMPLE}, found {given!r}")
    if not given:
        raise ValueError(f"an empty list: give it values, such as {_EXAMPLE}, or leave the field out")
    return list(given)


def pick(values: Values, share: float) -> Any:
    """A value of a list, or a place in a range, by a number from 0 up to 1."""
    return values.at(share) if isinstance(values, Range) else values[int(share * len(values))]


def _range(given: Mapping[str, Any]) -> Range:
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"a range has no {key!r}{did_you_mean(str(key), _KEYS)}; it has {', '.join(_KEYS)}")
    for key in ("from", "to"):
        if key not in given:
            raise ValueError(f"a range needs {key}, as in {_EXAMPLE}")
    if "count" in given and "step" in given:
        raise ValueError("a range has count or step, not both")
    if (scale := given.get("scale", "linear")) not in _SCALES:
        raise ValueError(f"scale is linear or log, found {scale!r}")
    (first, dimension), (last, other) = _amount(given["from"]), _amount(given["to"])
    if dimension is not other:
        raise ValueError(f"from {given['from']!r} to {given['to']!r}: the two are of different kinds")
    if first >= last:
        raise ValueError(f"from {given['from']!r} to {given['to']!r}: the first must be less than the second")
    if scale == "log" and first <= 0:
        raise ValueError(f"from {given['from']!r}: a log range begins above 0")
    step = _step(given.get("step"), dimension, scale)
    ends = [first, last] if step is None else [first, last, step]
    whole = all(float(end).is_integer() for end in ends) if dimension else all(isinstance(end, int) for end in ends)
    return Range(first, last, dimension, whole, scale == "log", _count(given.get("count")), step)


def _step(given: Any, dimension: Dimension | None, scale: str) -> float | None:
    if given is None:
        return None
    step, other = _amount(given)
    if other is not dimension or step <= 0 or scale == "log":
        raise ValueError(f"step {given!r}: expected one above 0, of the kind of its range, which is linear")
    return step


def _count(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 2):  # noqa: PLR2004
        raise ValueError(f"count {given!r}: expected a whole number from 2 on")
    return given


def _amount(given: Any) -> tuple[float, Dimension | None]:
    """The amount in base units, and of what kind it is."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return given, None
    unit = str(given).lstrip("+-0123456789._ eE") if isinstance(given, str) else ""
    dimension = next((one for one in DIMENSIONS if unit and unit in one.units), None)
    if dimension is None:
        raise ValueError(f"expected a number, or a quantity such as '64 MiB', found {given!r}")
    return dimension.parse(given), dimension
