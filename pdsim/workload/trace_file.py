"""The file of a trace: its format, and its lines, CSV or JSON, plain or gzip. Errors name file, line and field."""

import csv
import gzip
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any

from pdsim.inputs import MOST_SECONDS, MOST_TOKENS, InputError, finite, parse_json, shown, whole
from pdsim.workload.lengths import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, Streams


class TraceError(InputError):
    """A trace that cannot be read: says where and what would be right."""


class InputWarning(UserWarning):
    """Something that a user may not have meant, and that is taken all the same."""


class Line:
    """A record of a trace and where it stands."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    @property
    def request_class(self) -> str:
        """Empty: the line has none."""
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


def json_lines(path: Path) -> Iterator[Line]:
    with open_trace(path) as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            fields = _parsed(text, f"{path}, line {number}")
            if not isinstance(fields, dict):
                raise TraceError(f"{path}, line {number}: expected a JSON object, found {text.strip()[:40]!r}")
            yield Line(f"{path}, line {number}", fields)


def json_records(path: Path) -> Iterator[Line]:
    """Records of one JSON list."""
    with open_trace(path) as file:
        found = _parsed(file.read(), str(path))
    if not isinstance(found, list):
        raise TraceError(f"{path}: expected a JSON list, found {type(found).__name__}")
    for number, fields in enumerate(found, 1):
        if not isinstance(fields, dict):
            raise TraceError(f"{path}, record {number}: expected a JSON object, found {str(fields)[:40]!r}")
        yield Line(f"{path}, record {number}", fields)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text, where)
    except InputError as wrong:
        raise TraceError(str(wrong)) from None


def csv_lines(path: Path) -> Iterator[Line]:
    with open_trace(path) as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            yield Line(f"{path}, line {number}", {name: value for name, value in fields.items() if name is not None})


@contextmanager
def open_trace(path: Path) -> Iterator[IO[str]]:
    """Raises TraceError, also for what is found to be no text while it is read."""
    if not path.is_file():
        raise TraceError(f"no trace file {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error) as broken:
        raise TraceError(f"{path}: cannot be read as text: {broken}") from None


LONGEST_LINE = 2**20
WITHOUT_TIMES = ("applied_compute_trace", "sharegpt")
"""Kinds whose requests have no arrival times."""
_SIGNS = {
    "chat_id": "bailian_trace",
    "hash_ids": "mooncake_trace",
    "tool_call_latency": "applied_compute_trace",
    "ContextTokens": "azure_trace",
    "Request tokens": "burstgpt_trace",
}
"""Fields of first lines, the rarer ones first; a table of requests has none of them."""
_WAITS = '"wait_for"'


def trace_kind(path: Path) -> str:
    """Name of the workload that reads the file. Later lines tell whether requests wait for others."""
    with open_trace(path) as file:
        first = file.readline(LONGEST_LINE)
        kind = next((kind for sign, kind in _SIGNS.items() if sign in first), "request_table")
        if first.lstrip().startswith("["):
            kind = "sharegpt"
        elif kind == "mooncake_trace" and any(_WAITS in line for line in chain([first], file)):
            kind = "agentic_mooncake_trace"
    return kind


def in_order(specs: Iterable[RequestSpec], path: Path) -> Sequence[RequestSpec]:
    """Requests by arrival, and numbered so; ties stay as in the file. Specs are numbered as they stand.

    Warns if the file is not in this order: "the first so many" are then not the earliest.
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
    """Base of the formats. Each yields its requests as they stand in the file."""

    path: Path
    """File, plain or gzip."""
    num_requests: int | None = None
    """The first so many; None: all."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        """Requests by arrival: a trace leaves nothing to draw."""
        del rng
        return in_order(islice(self.specs(), self.num_requests), self.path)

    def specs(self) -> Iterable[RequestSpec]:
        """Requests in the order of the file, numbered so; more than are asked for may be left unmade."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedTrace(Trace):
    speedup: float = 1.0
    """2 replays the arrivals in half the time; pauses stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, speedup=self.speedup)


@dataclass(frozen=True, kw_only=True)
class BlockTrace(TimedTrace):
    """Prompts are hash ids, one for each block."""

    block_tokens: int = 512
    """Tokens of one hash id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, block_tokens=self.block_tokens)
