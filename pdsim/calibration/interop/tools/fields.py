"""A JSON object of a result that knows where it stands, so that errors name file and field."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from pdsim.scenario.yaml_file import ConfigError


class Fields:
    """Fields that are null count as absent."""

    def __init__(self, found: Any, where: str, path: str = "") -> None:
        self.where = f"{where}: {path}" if path else where
        if not isinstance(found, dict):
            raise ConfigError(f"{self.where}: expected an object, found {_kind(found)}")
        self._found: dict[str, Any] = found
        self._file, self._path = where, path

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __contains__(self, name: str) -> bool:
        return self._found.get(name) is not None

    def get(self, name: str) -> Any:
        return self._found.get(name)

    def part(self, name: str) -> "Fields":
        return Fields(self.get(name), self._file, self._to(name))

    def parts(self, name: str) -> "list[Fields]":
        found = self.get(name)
        if not isinstance(found, list):
            raise ConfigError(f"{self._file}: {self._to(name)}: expected an array, found {_kind(found)}")
        return [Fields(one, self._file, f"{self._to(name)}[{number}]") for number, one in enumerate(found)]

    def number(self, name: str) -> float | None:
        """Finite; None where the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(f"{self._file}: {self._to(name)}: expected a finite number, found {value!r}")
        return value

    def count(self, name: str) -> int:
        """A whole number, which may be written as text."""
        value = self.get(name)
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{self._file}: {self._to(name)}: expected a whole number, found {value!r}") from None

    def numbers(self, names: Mapping[str, str], factor: float = 1) -> dict[str, float]:
        """Those that are there, under our names: `names` are ours by theirs."""
        found = {ours: self.number(theirs) for theirs, ours in names.items()}
        return {ours: value * factor for ours, value in found.items() if value is not None}

    def unit(self, name: str, units: Mapping[str, float]) -> float:
        """What one of the named unit is worth."""
        unit = self.get(name)
        if not isinstance(unit, str) or unit not in units:
            raise ConfigError(f"{self.where}: no unit {unit!r}; there are {', '.join(units)}")
        return units[unit]

    def _to(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def statistics_of(latency: str, statistics: Mapping[str, str]) -> dict[str, str]:
    """Our fields of a latency by a tool's names of statistics."""
    return {theirs: f"{ours}_{latency}_ms" for theirs, ours in statistics.items()}


def _kind(found: Any) -> str:
    return "nothing" if found is None else type(found).__name__
