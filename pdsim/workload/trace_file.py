"""Lines of a trace, CSV or JSON, plain or gzip. A broken one is an error that names file, line and field."""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pdsim.workload.request_spec import RequestSpec


class TraceError(ValueError):
    """A trace that cannot be read: says where and what would be right."""


class Line:
    """One record of a trace and where it stands."""

    def __init__(self, path: Path, number: int, fields: dict[str, Any]) -> None:
        self._where = f"{path}, line {number}"
        self._fields = fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def value(self, name: str) -> Any:
        if self._fields.get(name) in (None, ""):
            raise TraceError(f"{self._where}: no field {name!r}; the line has {', '.join(map(str, self._fields))}")
        return self._fields[name]

    def count(self, name: str, least: int = 1) -> int:
        found = self.value(name)
        try:
            number = int(found)
        except (TypeError, ValueError):
            raise self.error(name, found, "a number of tokens") from None
        if number < least:
            raise self.error(name, found, f"at least {least}")
        return number

    def time_ns(self, name: str, unit_ns: float) -> float:
        found = self.value(name)
        try:
            time_ns = float(found) * unit_ns
        except (TypeError, ValueError):
            raise self.error(name, found, "a time") from None
        if not 0 <= time_ns < float("inf"):
            raise self.error(name, found, "a time, 0 or later")
        return time_ns

    def error(self, name: str, found: object, expected: str) -> TraceError:
        return TraceError(f"{self._where}: {name} is {found!r}, expected {expected}")


def json_lines(path: Path) -> Iterator[Line]:
    with _open(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except json.JSONDecodeError as broken:
                raise TraceError(f"{path}, line {number}: not JSON: {broken.msg} at column {broken.colno}") from None
            if not isinstance(fields, dict):
                raise TraceError(f"{path}, line {number}: expected a JSON object, found {text.strip()[:40]!r}")
            yield Line(path, number, fields)


def csv_lines(path: Path) -> Iterator[Line]:
    with _open(path) as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            yield Line(path, number, {name: value for name, value in fields.items() if name is not None})


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    if not path.is_file():
        raise TraceError(f"no trace file {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as broken:
        raise TraceError(f"{path}: cannot be read as text: {broken}") from None


def in_order(specs: Iterable[RequestSpec], path: Path) -> Sequence[RequestSpec]:
    """By arrival, and numbered so; ties stay as in the file. Specs are numbered as they stand."""
    ordered = sorted(specs, key=lambda spec: spec.arrival_ns)
    if not ordered:
        raise TraceError(f"{path}: no requests in it")
    places = {spec.request_id: i for i, spec in enumerate(ordered)}
    return [
        spec._replace(request_id=i, after=None if spec.after is None else places[spec.after])
        for i, spec in enumerate(ordered)
    ]
