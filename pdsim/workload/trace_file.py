"""Lines of a trace, CSV or JSON, plain or gzip. A broken one is an error that names file, line and field."""

import csv
import gzip
import json
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from pdsim.core.sequence import Spans
from pdsim.workload.lengths import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, fresh_streams


class TraceError(ValueError):
    """A trace that cannot be read: says where and what would be right."""


class InputWarning(UserWarning):
    """Something that a user may not have meant, and that is taken all the same."""


class Line:
    """One record of a trace and where it stands."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

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
            number = int(found)
        except (TypeError, ValueError):
            raise self.error(name, found, "a number of tokens") from None
        if number < least:
            raise self.error(name, found, f"at least {least}")
        return number

    def _time_ns(self, name: str, found: Any, unit_ns: float) -> float:
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
    with open_trace(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except json.JSONDecodeError as broken:
                raise TraceError(f"{path}, line {number}: not JSON: {broken.msg} at column {broken.colno}") from None
            if not isinstance(fields, dict):
                raise TraceError(f"{path}, line {number}: expected a JSON object, found {text.strip()[:40]!r}")
            yield Line(f"{path}, line {number}", fields)


def json_records(path: Path) -> Iterator[Line]:
    """Of one JSON list."""
    with open_trace(path) as file:
        try:
            found = json.load(file)
        except json.JSONDecodeError as broken:
            raise TraceError(f"{path}, line {broken.lineno}: not JSON: {broken.msg} at column {broken.colno}") from None
    if not isinstance(found, list):
        raise TraceError(f"{path}: expected a JSON list, found {type(found).__name__}")
    for number, fields in enumerate(found, 1):
        if not isinstance(fields, dict):
            raise TraceError(f"{path}, record {number}: expected a JSON object, found {str(fields)[:40]!r}")
        yield Line(f"{path}, record {number}", fields)


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
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as broken:
        raise TraceError(f"{path}: cannot be read as text: {broken}") from None


def in_order(specs: Iterable[RequestSpec], path: Path) -> Sequence[RequestSpec]:
    """By arrival, and numbered so; ties stay as in the file. Specs are numbered as they stand.

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
    return [
        spec._replace(request_id=i, after=tuple(places[earlier] for earlier in spec.after))
        for i, spec in enumerate(ordered)
    ]


@dataclass(frozen=True, kw_only=True)
class Trace:
    path: Path
    num_requests: int | None = None
    """The first so many; None reads all."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)


@dataclass(frozen=True, kw_only=True)
class TimedTrace(Trace):
    speedup: float = 1.0
    """2 replays the arrivals in half the time; delays stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, speedup=self.speedup)


@dataclass(frozen=True, kw_only=True)
class BlockTrace(TimedTrace):
    """Prompts are hash ids, one for each block."""

    block_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, block_tokens=self.block_tokens)


class BlockRun(NamedTuple):
    """Blocks whose ids rise by one and whose tokens follow each other in one stream."""

    first_id: int
    stream: int
    offset: int
    """Of the first block's first token."""
    num_blocks: int


class HashBlocks:
    """Prompts as hash ids, one for each block: an id stands for its block and all before it.

    So equal leading ids are a shared prefix. Each id has one parent, and a chain of first children is one stream: few
    spans, however long the prompt and however short the blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._streams = fresh_streams()
        self._first_ids: list[int] = []
        self._runs: list[BlockRun] = []
        """Of ids that are above all before them, as most traces number theirs: sorted."""
        self._others: dict[int, BlockRun] = {}
        """Of one block each."""
        self._parents: set[int] = set()
        """Ids at the end of a run whose first child is in another."""

    def spec(self, number: int, line: Line, arrival_ns: float) -> RequestSpec:
        num_tokens, num_outputs = line.count("input_length"), line.count("output_length")
        prompt = self._prompt(line, num_tokens)
        output = Spans.of(next(self._streams), num_outputs)
        return RequestSpec(number, prompt, output, num_outputs, arrival_ns=round(arrival_ns))

    def _prompt(self, line: Line, num_tokens: int) -> Spans:
        ids = line.value("hash_ids")
        size = self._size
        if not isinstance(ids, list) or len(ids) != -(-num_tokens // size):
            raise line.error("hash_ids", ids, f"a list of {-(-num_tokens // size)} ids, one per {size} input tokens")
        if not set(map(type, ids)) <= {int}:
            raise line.error("hash_ids", ids, "whole numbers")
        spans: list[tuple[int, int, int]] = []
        at = 0
        while at < len(ids):
            run = self._known(ids[at]) or self._add(ids, at, spans[-1] if spans else None)
            skipped = ids[at] - run.first_id
            num_blocks = _num_rising(ids, at, run.num_blocks - skipped)
            num_span_tokens = min(num_blocks * size, num_tokens - at * size)
            spans.append((run.stream, run.offset + skipped * size, num_span_tokens))
            at += num_blocks
        return Spans(spans)

    def _known(self, block: int) -> BlockRun | None:
        place = bisect_right(self._first_ids, block) - 1
        if place >= 0 and block - self._first_ids[place] < self._runs[place].num_blocks:
            return self._runs[place]
        return self._others.get(block)

    def _add(self, ids: Sequence[int], at: int, before: tuple[int, int, int] | None) -> BlockRun:
        """The run that begins with a new block; before: the span that it follows in its prompt."""
        block = ids[at]
        if before is not None and self._has_no_child(ids[at - 1]):
            self._parents.add(ids[at - 1])
            stream, offset = before[0], before[1] + before[2]
        else:
            stream, offset = next(self._streams), 0
        if self._runs and block < self._runs[-1].first_id + self._runs[-1].num_blocks:
            self._others[block] = run = BlockRun(block, stream, offset, 1)
            return run
        run = BlockRun(block, stream, offset, _num_rising(ids, at, len(ids) - at))
        self._first_ids.append(block)
        self._runs.append(run)
        return run

    def _has_no_child(self, block: int) -> bool:
        run = self._known(block)
        return run is not None and block == run.first_id + run.num_blocks - 1 and block not in self._parents


def _num_rising(ids: Sequence[int], at: int, limit: int) -> int:
    """How many ids from here on, at most `limit`, rise by one."""
    stop = min(at + limit, len(ids))
    if ids[stop - 1] - ids[at] == stop - 1 - at and ids[at:stop] == list(range(ids[at], ids[at] + stop - at)):
        return stop - at
    count = 1
    while at + count < stop and ids[at + count] == ids[at] + count:
        count += 1
    return count
