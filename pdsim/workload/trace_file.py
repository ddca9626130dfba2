"""The file of a trace: its format, and its lines, CSV, JSON or Parquet. Errors name file, line and field."""

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import chain, islice, pairwise
from math import isnan
from pathlib import Path
from typing import IO, Any

from pdsim.inputs import MOST_SECONDS, MOST_TOKENS, InputError, finite, open_text, parse_json, shown, whole
from pdsim.workload.lengths import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.trace_fields import INPUT


class TraceError(InputError):
    """Raised for a trace that cannot be read. The message names the place and the accepted values."""


LONGEST_LINE = 2**24
"""Maximum characters of the first line that are used to detect the format."""


class InputWarning(UserWarning):
    """Warns of input that the user may not have intended, but that pdsim uses."""


class InputNote(InputWarning):
    """Tells what pdsim inferred from a file, which the user could not see otherwise."""


class Line:
    """A record of a trace, with its place in the file."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    @property
    def where(self) -> str:
        return self._where

    @property
    def fields(self) -> Mapping[str, Any]:
        return self._fields

    def flat(self) -> "Line":
        """The record, with the fields of nested objects beside its own. An object {value, unit} becomes its value."""
        if not any(isinstance(value, dict) for value in self._fields.values()):
            return self
        flat: dict[str, Any] = {}
        _flatten(self._fields, flat)
        return Line(self._where, flat)

    @property
    def request_class(self) -> str:
        """Class of the request. Empty: the line has no class."""
        found = self._fields.get("class")
        return "" if found is None else str(found).strip()

    def value(self, name: str) -> Any:
        if self._fields.get(name) in (None, ""):
            raise TraceError(f"{self._where}: no field {name!r}; the line has {', '.join(map(str, self._fields))}")
        return self._fields[name]

    def count(self, name: str, least: int = 1) -> int:
        return self._count(name, self.value(name), least)

    def counts(self, name: str, num: int, least: int = 1) -> list[int]:
        return [self._count(f"{name}[{i}]", found, least) for i, found in enumerate(self._list(name, num))]

    def time_ns(self, name: str, unit_ns: float) -> float:
        return self._time_ns(name, self.value(name), unit_ns)

    def times_ns(self, name: str, num: int, unit_ns: float) -> list[float]:
        return [self._time_ns(f"{name}[{i}]", found, unit_ns) for i, found in enumerate(self._list(name, num))]

    def _list(self, name: str, num: int) -> list[Any]:
        found = self.value(name)
        if not isinstance(found, list) or len(found) != num:
            raise self.error(name, found, f"a list of {num}")
        return found

    def _count(self, name: str, found: Any, least: int) -> int:
        try:
            count = whole(found)
        except ValueError:
            raise self.error(name, found, "a whole number of tokens") from None
        if not least <= count <= MOST_TOKENS:
            bound = f"at least {least}" if count < least else f"at most {MOST_TOKENS}"
            raise self.error(name, found, bound)
        return count

    def _time_ns(self, name: str, found: Any, unit_ns: float) -> float:
        try:
            time_ns = finite(found) * unit_ns
        except ValueError:
            raise self.error(name, found, "a time") from None
        if not 0 <= time_ns <= MOST_SECONDS * 1e9:
            raise self.error(name, found, "a time, 0 or later" if time_ns < 0 else f"at most {MOST_SECONDS:.0f} s")
        return time_ns

    def error(self, name: str, found: object, expected: str) -> TraceError:
        return TraceError(f"{self._where}: {name} is {shown(found)}, expected {expected}")


def _flatten(fields: Mapping[str, Any], into: dict[str, Any]) -> None:
    inside = []
    for name, value in fields.items():
        has_value = isinstance(value, dict) and "value" in value
        into.setdefault(name, value["value"] if has_value else value)
        if isinstance(value, dict) and not has_value:
            inside.append(value)
    for part in inside:
        _flatten(part, into)


def json_lines(path: Path) -> Iterator[Line]:
    """Lines of JSON, or rows of a Parquet file."""
    if is_parquet(path):
        yield from parquet_rows(path)
        return
    with open_trace(path) as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            fields = _parsed(text, f"{path}, line {number}")
            if not isinstance(fields, dict):
                raise TraceError(f"{path}, line {number}: expected a JSON object, found {text.strip()[:40]!r}")
            yield Line(f"{path}, line {number}", fields)


_LISTS = ("requests", "records", "data", "results", "traces", "conversations")
"""Fields of a JSON object that may hold the list of its records."""


def json_records(path: Path) -> Iterator[Line]:
    """Records of a JSON list, or of an object that holds such a list or columns of equal length."""
    with open_trace(path) as file:
        found = _parsed(file.read(), str(path))
    if isinstance(found, dict):
        found = _rows_of(found)
    if not isinstance(found, list):
        raise TraceError(f"{path}: expected a JSON list, found {type(found).__name__}")
    for number, fields in enumerate(found, 1):
        if not isinstance(fields, dict):
            raise TraceError(f"{path}, record {number}: expected a JSON object, found {str(fields)[:40]!r}")
        yield Line(f"{path}, record {number}", fields)


def _rows_of(found: dict[str, Any]) -> Any:
    """The list of records inside the object, the rows of its longest columns, or the object itself."""
    if "block_size" in found or "hash_id_scope" in found:  # a session of agents
        return [found]
    for name in _LISTS:
        if isinstance(found.get(name), list) and found[name] and isinstance(found[name][0], dict):
            return found[name]
    columns = {name: column for name, column in found.items() if isinstance(column, list) and column}
    longest = max(map(len, columns.values()), default=0)
    columns = {name: column for name, column in columns.items() if len(column) == longest}
    if not INPUT.names.keys() & columns.keys():
        return found
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text, where)
    except InputError as wrong:
        raise TraceError(str(wrong)) from None


_PARQUET = b"PAR1"
"""First bytes of a Parquet file."""
_DELIMITERS = ",;\t|"


def csv_lines(path: Path) -> Iterator[Line]:
    """Lines of a table with column names in its first line. Commas, semicolons, tabs or bars separate columns."""
    with open_trace(path) as file:
        head = file.readline(LONGEST_LINE)
        delimiter = max(_DELIMITERS, key=head.count)
        for number, fields in enumerate(csv.DictReader(chain([head], file), delimiter=delimiter), 2):
            named = {name.strip(): _cell(value) for name, value in fields.items() if name is not None}
            yield Line(f"{path}, line {number}", named)


def _cell(value: Any) -> Any:
    """The value of a cell. A JSON list in a cell becomes a list."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        return parse_json(value, "")
    except InputError:
        return value


def is_parquet(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def parquet_rows(path: Path) -> Iterator[Line]:
    """Rows of a Parquet file. Times of day become text, as a CSV file has them; empty numbers count as missing."""
    import pyarrow as pa  # noqa: PLC0415  only these traces pay for it
    from pyarrow import parquet  # noqa: PLC0415

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for number, fields in enumerate(batch.to_pylist(), number + 1):  # noqa: B020
                    yield Line(f"{path}, row {number}", {name: _plain(value) for name, value in fields.items()})
    except (pa.ArrowException, OSError) as broken:
        raise TraceError(f"{path}: cannot be read as Parquet: {broken}") from None


def num_parquet_rows(path: Path) -> int:
    """Number of rows of a Parquet file. Raises TraceError for a damaged file."""
    from pyarrow import ArrowException, parquet  # noqa: PLC0415

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (ArrowException, OSError) as broken:
        raise TraceError(f"{path}: cannot be read as Parquet: {broken}") from None


def _plain(value: Any) -> Any:
    """The value of a column as JSON or CSV would have it."""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, Decimal):
        return float(value)
    return None if isinstance(value, float) and isnan(value) else _cell(value)


def records(path: Path) -> Iterator[Line]:
    """Records of a file. Its beginning decides the format: Parquet, JSON lines, one JSON value, or a table."""
    if is_parquet(path):
        return parquet_rows(path)
    with open_trace(path) as file:
        first = _first_line(file)
    if not first.startswith(("{", "[")):
        return csv_lines(path)
    return json_lines(path) if _is_whole(first) else json_records(path)


def _first_line(file: IO[str]) -> str:
    while (line := file.readline(LONGEST_LINE)).isspace():
        pass
    return line.strip()


def _is_whole(line: str) -> bool:
    """True if the line is a JSON object by itself, so that more objects follow on further lines. A truncated line
    counts as one.
    """
    if not line.startswith("{"):
        return False
    if len(line) >= LONGEST_LINE:
        return True
    try:
        return not _has_rows(parse_json(line, ""))
    except InputError:
        return line.endswith("}")


def _has_rows(found: Any) -> bool:
    """True if the object is a file by itself: results of a client, with a column for each field."""
    return isinstance(found, dict) and "requests" not in found and _rows_of(found) not in (found, [found])


@contextmanager
def open_trace(path: Path) -> Iterator[IO[str]]:
    """Opens a trace, plain or gzip. Raises TraceError, also later for content that is not text."""
    if not path.is_file():
        raise TraceError(f"no trace file {path}")
    try:
        with open_text(path) as file:
            yield file
    except TraceError:
        raise
    except InputError as wrong:
        raise TraceError(str(wrong)) from None
    except csv.Error as broken:
        raise TraceError(f"{path}: cannot be read as a table: {broken}") from None


def in_order(specs: Iterable[RequestSpec], path: Path) -> Sequence[RequestSpec]:
    """Requests by arrival, numbered in this order; equal times keep the file's order. Input specs are numbered in the
    file's order.

    Warns if the file is not in order of time, because its first requests are then not the earliest.
    """
    specs = list(specs)
    times_ns = [spec.arrival_ns for spec in specs if not spec.after]
    if num_early := sum(later < earlier for earlier, later in pairwise(times_ns)):
        warnings.warn(
            f"{path}: not in order of time: lines that are earlier than the one before: {num_early}; "
            "its requests are sorted by arrival",
            InputWarning,
            stacklevel=3,
        )
    ordered = sorted(specs, key=lambda spec: spec.arrival_ns)
    if not ordered:
        raise TraceError(f"{path}: no requests in it")
    places = {spec.request_id: i for i, spec in enumerate(ordered)}
    if all(before == i for before, i in places.items()):
        return ordered
    return [
        spec._replace(request_id=i, after=tuple(places[earlier] for earlier in spec.after))
        for i, spec in enumerate(ordered)
    ]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Base class of trace formats. Each yields its requests in the order of the file."""

    path: Path
    """File of the trace, plain or gzip."""
    num_requests: int | None = None
    """Maximum number of requests, from the start of the file. None: all."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        """Requests by arrival. rng is not used, because a trace has no random part."""
        del rng
        return in_order(islice(self.specs(), self.num_requests), self.path)

    def specs(self) -> Iterable[RequestSpec]:
        """Requests in the order of the file, and numbered so. The caller may take only the first of them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedTrace(Trace):
    speedup: float = 1.0
    """Factor on arrival rates: 2 replays the arrivals in half the time. Pauses within sessions stay."""
    skip_requests: int = 0
    """Number of requests to leave out at the start. The first request after them is sent at time 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, speedup=self.speedup)
        if self.skip_requests < 0:
            raise ValueError(f"{type(self).__name__} needs skip_requests >= 0, found {self.skip_requests}")

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        if not self.skip_requests:
            return super().requests(rng)
        end = None if self.num_requests is None else self.skip_requests + self.num_requests
        specs = list(islice(self.specs(), end))
        if len(specs) <= self.skip_requests:
            raise TraceError(
                f"{self.path}: skip_requests is {self.skip_requests}, but the trace has {len(specs)} requests"
            )
        return in_order(_without_first(self.skip_requests, specs), self.path)


def _without_first(num_skipped: int, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The remaining specs, numbered from 0, with times from 0. Dependencies on skipped requests are dropped."""
    kept = specs[num_skipped:]
    begin_ns = min(spec.arrival_ns for spec in kept)
    return [
        spec._replace(
            request_id=number,
            arrival_ns=spec.arrival_ns - begin_ns,
            after=tuple(earlier - num_skipped for earlier in spec.after if earlier >= num_skipped),
        )
        for number, spec in enumerate(kept)
    ]
