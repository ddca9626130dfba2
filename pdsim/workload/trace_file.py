"""Reads the file of a trace: detects its format (CSV, JSON or Parquet), and yields its records. Errors name file, line
and field.
"""

import csv
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from itertools import chain, islice, pairwise
from math import isnan
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from pdsim.dataclass import dataclass
from pdsim.inputs import MOST_SECONDS, MOST_TOKENS, InputError, finite, open_text, parse_json, shown, whole
from pdsim.workload.lengths import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.trace_fields import INPUT, Quantity, quantities_of


class TraceError(InputError):
    """Raised if a trace cannot be read. The message names the place in the file and the accepted values."""


LONGEST_LINE = 2**24
"""Maximum number of characters that are read of a file's first line, to detect the file's format."""


class InputWarning(UserWarning):
    """Warns of input that pdsim uses although the user may not have intended it."""


class InputNote(InputWarning):
    """Tells the user about a choice that pdsim made when it read a file, such as an inferred unit, and that no other
    output shows.
    """


class Line:
    """A record of a trace, with its place in the file for messages."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields
        self._quantities: dict[str, tuple[str, Any]] | None = None

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    @property
    def where(self) -> str:
        return self._where

    @property
    def fields(self) -> Mapping[str, Any]:
        return self._fields

    def quantity(self, quantity: Quantity) -> tuple[str, Any] | None:
        """Returns field name and value of a quantity: of the first of its names that the record has. None: the record
        has none.
        """
        if self._quantities is None:
            self._quantities = quantities_of(self._fields)
        return self._quantities.get(quantity.what)

    def flat(self) -> "Line":
        """Returns the record with the fields of nested objects added to its own. An object {value, unit} becomes its
        value.
        """
        if dict not in map(type, self._fields.values()):
            return self
        flat: dict[str, Any] = {}
        _flatten(self._fields, flat)
        return Line(self._where, flat)

    @property
    def request_class(self) -> str:
        """Class of the request. Empty: the record has no class."""
        found = self._fields.get("class")
        return "" if found is None else str(found).strip()

    def value(self, name: str) -> Any:
        if self._fields.get(name) in (None, ""):
            raise TraceError(f"{self._where}: no field {name!r}; the line has {', '.join(map(str, self._fields))}")
        return self._fields[name]

    def count(self, name: str, least: int = 1) -> int:
        return self.count_of(name, self.value(name), least)

    def counts(self, name: str, num: int, least: int = 1) -> list[int]:
        return [self.count_of(f"{name}[{i}]", found, least) for i, found in enumerate(self._list(name, num))]

    def time_ns(self, name: str, unit_ns: float) -> float:
        return self.time_of(name, self.value(name), unit_ns)

    def times_ns(self, name: str, num: int, unit_ns: float) -> list[float]:
        return [self.time_of(f"{name}[{i}]", found, unit_ns) for i, found in enumerate(self._list(name, num))]

    def _list(self, name: str, num: int) -> list[Any]:
        found = self.value(name)
        if not isinstance(found, list) or len(found) != num:
            raise self.error(name, found, f"a list of {num}")
        return found

    def count_of(self, name: str, found: Any, least: int = 1) -> int:
        """Returns a number of tokens. name: field of the record, for messages. found: the field's value. Raises
        TraceError if the value is no whole number from `least` to MOST_TOKENS.
        """
        try:
            count = whole(found)
        except ValueError:
            raise self.error(name, found, "a whole number of tokens") from None
        if not least <= count <= MOST_TOKENS:
            bound = f"at least {least}" if count < least else f"at most {MOST_TOKENS}"
            raise self.error(name, found, bound)
        return count

    def time_of(self, name: str, found: Any, unit_ns: float) -> float:
        """Returns a time in ns. name: field of the record, for messages. found: the field's value, in units of unit_ns.
        Raises TraceError if the value is no time.
        """
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
    """Yields one Line per record of a trace. A record is a line of a JSON Lines file, or a row of a Parquet file."""
    if is_parquet(path):
        yield from parquet_rows(path)
        return
    name = str(path)
    with open_trace(path) as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            where = f"{name}, line {number}"
            fields = _parsed(text, where)
            if not isinstance(fields, dict):
                raise TraceError(f"{where}: expected a JSON object, found {text.strip()[:40]!r}")
            yield Line(where, fields)


_LISTS = ("requests", "records", "data", "results", "traces", "conversations")
"""Names of fields of a JSON object that may contain the list of records."""


def json_records(path: Path) -> Iterator[Line]:
    """Yields the records of a JSON list, or of an object that contains such a list or columns of equal length."""
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
    """Returns the list of records in an object. Without such a list: one row per index of the longest columns (fields
    that are lists), if one column has prompt lengths; otherwise the object itself. A session of agents is one record.
    """
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
    """Returns a JSON value. Raises TraceError if the text is no JSON, also for Infinity and NaN, because JSON has no
    such numbers. A number that exceeds all floats, such as 1e999, becomes infinity; the readers of single fields refuse
    infinity. where: names the text in messages.
    """
    try:
        return from_json(text, allow_inf_nan=False)  # in half the time of json
    except ValueError:
        pass
    try:
        return parse_json(text, where)  # which also reads unpaired surrogates, and says what is wrong
    except InputError as wrong:
        raise TraceError(str(wrong)) from None


_PARQUET = b"PAR1"
"""The first bytes of every Parquet file."""
_DELIMITERS = ",;\t|"


def csv_lines(path: Path) -> Iterator[Line]:
    """Yields the rows of a table whose first line has the column names. Commas, semicolons, tabs or vertical bars
    separate columns.
    """
    with open_trace(path) as file:
        head = file.readline(LONGEST_LINE)
        delimiter = max(_DELIMITERS, key=head.count)
        for number, fields in enumerate(csv.DictReader(chain([head], file), delimiter=delimiter), 2):
            named = {name.strip(): _cell(value) for name, value in fields.items() if name is not None}
            yield Line(f"{path}, line {number}", named)


def _cell(value: Any) -> Any:
    """Returns the value of a table's cell. A JSON list in a cell becomes a list."""
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
    """Yields the rows of a Parquet file. Dates with times become text, as in CSV files. Empty numbers count as
    missing. Raises TraceError if the file is damaged.
    """
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
    """Returns the number of rows of a Parquet file. Raises TraceError if the file is damaged."""
    from pyarrow import ArrowException, parquet  # noqa: PLC0415

    try:
        return int(parquet.read_metadata(path).num_rows)
    except (ArrowException, OSError) as broken:
        raise TraceError(f"{path}: cannot be read as Parquet: {broken}") from None


def _plain(value: Any) -> Any:
    """Returns a value of a Parquet column in the form that it would have in a JSON or CSV file, such as a text in place
    of a date.
    """
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, Decimal):
        return float(value)
    return None if isinstance(value, float) and isnan(value) else _cell(value)


def records(path: Path) -> Iterator[Line]:
    """Yields the records of a file. The beginning of the file decides the format: Parquet, JSON lines, one JSON value,
    or a table.
    """
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
    """True if a file's first line is one record of JSON lines: a JSON object that does not hold a list of records. Also
    true for a line that was cut at LONGEST_LINE characters, and for a line that ends with a brace but is not valid
    JSON.
    """
    if not line.startswith("{"):
        return False
    if len(line) >= LONGEST_LINE:
        return True
    try:
        return not _has_rows(_parsed(line, ""))
    except InputError:
        return line.endswith("}")


def _has_rows(found: Any) -> bool:
    """True if this one JSON object holds all records of a file: a load generator's result, with a list of records or
    one list per field.
    """
    return isinstance(found, dict) and "requests" not in found and _rows_of(found) not in (found, [found])


@contextmanager
def open_trace(path: Path) -> Iterator[IO[str]]:
    """Opens a trace, which may be gzip-compressed. Raises TraceError if there is no such file, and, also while reading,
    if the content is not text.
    """
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
    """Returns requests by arrival, numbered in this order. Requests with equal times keep the file's order. specs:
    requests numbered in the file's order. Warns if requests that wait for no other are not ordered by time in the file:
    num_requests then takes the first requests of the file, not the earliest. Raises TraceError if there are no
    requests.
    """
    specs = list(specs)
    times_ns = [spec.arrival_ns for spec in specs if not spec.after]
    if num_early := sum(later < earlier for earlier, later in pairwise(times_ns)):
        warnings.warn(
            f"{path}: not in order of time, so requests are sorted by arrival; "
            f"lines earlier than the line before: {num_early}",
            InputWarning,
            stacklevel=3,
        )
    ordered = sorted(specs, key=lambda spec: spec.arrival_ns)
    if not ordered:
        raise TraceError(f"{path}: no requests in it")
    if ordered == specs:
        return ordered
    places = {spec.request_id: i for i, spec in enumerate(ordered)}
    return [
        spec._replace(request_id=i, after=tuple(places[earlier] for earlier in spec.after))
        for i, spec in enumerate(ordered)
    ]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Base class of trace formats. A format yields its requests in the order of the file."""

    path: Path
    """Path of the trace, which may be gzip-compressed."""
    num_requests: int | None = None
    """Maximum number of requests, counted from the start of the file. None: all requests."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        """Returns the requests by arrival. rng is not used, because traces need no random numbers."""
        del rng
        return in_order(islice(self.specs(), self.num_requests), self.path)

    def specs(self) -> Iterable[RequestSpec]:
        """Yields the requests in the order of the file, numbered in this order. The caller may stop early."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedTrace(Trace):
    speedup: float = 1.0
    """Factor on the arrival rate: with 2 the requests arrive in half the time. Pauses within sessions do not change."""
    skip_requests: int = 0
    """Number of first requests to leave out. The first request after them arrives at time 0."""

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
    """Returns the requests after the first num_skipped ones, numbered from 0, with times from 0. The returned requests
    do not wait for skipped requests.
    """
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


def warn(text: str) -> None:
    warnings.warn(text, InputWarning, stacklevel=4)
