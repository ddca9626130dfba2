"""Reads fields of JSON results. Errors name the file and the field's place in the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from pdsim.inputs import finite, shown, whole
from pdsim.scenario.yaml_file import ConfigError


class ResultFields:
    """A JSON object in a benchmark's result. It knows its file and its path in the file, so that error messages can
    name both.

    Fields that are null count as missing.
    """

    def __init__(self, found: Any, where: str, path: str = "") -> None:
        """found: the object. where: names the file, and the line or result in it, for messages. path: dotted path of
        the object in this result. Raises ConfigError if `found` is no object.
        """
        self.where = f"{where}: {path}" if path else where
        if not isinstance(found, dict):
            raise ConfigError(f"{self.where}: expected an object, found {_kind(found)}")
        self._found: dict[str, Any] = found
        self._file, self._path = where, path

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __contains__(self, name: str) -> bool:
        return self._found.get(name) is not None

    @property
    def objects(self) -> set[str]:
        """Names of the fields that hold JSON objects."""
        return {name for name, value in self._found.items() if isinstance(value, dict)}

    def get(self, name: str) -> Any:
        return self._found.get(name)

    def part(self, name: str) -> "ResultFields":
        return ResultFields(self.get(name), self._file, self._to(name))

    def parts(self, name: str) -> "list[ResultFields]":
        found = self.get(name)
        if not isinstance(found, list):
            raise ConfigError(f"{self._file}: {self._to(name)}: expected an array, found {_kind(found)}")
        return [ResultFields(one, self._file, f"{self._to(name)}[{number}]") for number, one in enumerate(found)]

    def number(self, name: str) -> float | None:
        """A finite number. None: the field is missing. Raises ConfigError if the field's value is no finite number."""
        value = self.get(name)
        if value is None:
            return None
        try:
            finite(value if isinstance(value, int | float) else None)
        except ValueError:
            raise self._foreign(name, "a finite number") from None
        number: float = value
        return number

    def count(self, name: str) -> int:
        """A whole number, which the file may have as text. Raises ConfigError if the field is missing or has another
        value.
        """
        value = self.get(name)
        try:
            return whole(value)
        except ValueError:
            raise self._foreign(name, "a whole number") from None

    def numbers(self, names: Mapping[str, str], factor: float = 1) -> dict[str, float]:
        """Finite numbers, by their fields in a summary, multiplied by `factor`. Missing ones are left out. names:
        fields of a summary, by the tool's names; several names may have the same field.
        """
        found = [(ours, self.number(theirs)) for theirs, ours in names.items()]
        return {ours: value * factor for ours, value in found if value is not None}

    def unit(self, name: str, units: Mapping[str, float]) -> float:
        """The factor in `units` for the unit that the field `name` has as text. Raises ConfigError if the unit is
        missing or unknown.
        """
        unit = self.get(name)
        if not isinstance(unit, str) or unit not in units:
            raise ConfigError(f"{self.where}: no unit {unit!r}; there are {', '.join(units)}")
        return units[unit]

    def _foreign(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self._file}: {self._to(name)}: expected {expected}, found {shown(self.get(name))}")

    def _to(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def statistics_of(latency: str, names: Mapping[str, str]) -> dict[str, str]:
    """Maps a tool's names of statistics, such as avg, to fields of a summary, such as mean_ttft_ms. latency: the
    latency's name in a summary, such as ttft. names: a summary's names of statistics, such as mean, by the tool's
    names.
    """
    return {theirs: f"{ours}_{latency}_ms" for theirs, ours in names.items()}


def _kind(found: Any) -> str:
    return "nothing" if found is None else type(found).__name__
