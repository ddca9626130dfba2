"""Public traces and plain request tables. A broken line is an error that names file, line and field."""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from pdsim.core.sequence import Spans
from pdsim.workload.checks import above_zero, positive
from pdsim.workload.request_spec import RequestSpec, Streams, fresh_streams


class TraceError(ValueError):
    """A trace that cannot be read: says where and what would be right."""


@dataclass(frozen=True, kw_only=True)
class MooncakeTrace:
    """One JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one id per block).

    An id stands for its block and all before it, so equal leading ids are a shared prefix. Sessions and delays of the
    format's extensions are not read.
    """

    path: Path
    num_requests: int | None = None
    """The first so many; None reads all."""
    block_tokens: int = 512
    speedup: float = 1.0
    """2 replays the arrivals in half the time."""

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests, block_tokens=self.block_tokens)
        above_zero(self, speedup=self.speedup)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        places: dict[int, tuple[int, int]] = {}
        streams = fresh_streams()
        specs: list[RequestSpec] = []
        for line in islice(_json_lines(self.path), self.num_requests):
            num_tokens, num_outputs = line.count("input_length"), line.count("output_length")
            arrival_ns = line.time_ns("timestamp", 1e6) / self.speedup
            prompt = self._prompt(line, num_tokens, places, streams)
            output = Spans.of(next(streams), num_outputs)
            specs.append(RequestSpec(len(specs), prompt, output, num_outputs, arrival_ns=round(arrival_ns)))
        return _in_order(specs, self.path)

    def _prompt(
        self, line: "_Line", num_tokens: int, places: dict[int, tuple[int, int]], streams: Iterator[int]
    ) -> Spans:
        """Each id has one parent, so a chain of first children is one stream: few spans, however long the prompt."""
        ids = line.value("hash_ids")
        size = self.block_tokens
        if not isinstance(ids, list) or len(ids) != -(-num_tokens // size):
            raise line.error("hash_ids", ids, f"a list of {-(-num_tokens // size)} ids, one per {size} input tokens")
        spans = []
        before = None
        for i, block in enumerate(ids):
            if block not in places:
                continues = before is not None and ids[i - 1] == block - 1
                places[block] = (before[0], before[1] + size) if continues and before else (next(streams), 0)
            before = places[block]
            spans.append((*before, min(size, num_tokens - i * size)))
        return Spans(spans)


@dataclass(frozen=True, kw_only=True)
class AzureTrace:
    """Azure's 2023 and 2024 LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens. Prompts share nothing."""

    path: Path
    num_requests: int | None = None
    speedup: float = 1.0

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)
        above_zero(self, speedup=self.speedup)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        specs: list[RequestSpec] = []
        start_ns = None
        for line in islice(_csv_lines(self.path), self.num_requests):
            at_ns = self._time_ns(line)
            start_ns = at_ns if start_ns is None else start_ns
            num_outputs = line.count("GeneratedTokens")
            i = len(specs)
            prompt, output = Spans.of(2 * i, line.count("ContextTokens")), Spans.of(2 * i + 1, num_outputs)
            arrival_ns = round((at_ns - start_ns) / self.speedup)
            specs.append(RequestSpec(i, prompt, output, num_outputs, arrival_ns=arrival_ns))
        return _in_order(specs, self.path)

    @staticmethod
    def _time_ns(line: "_Line") -> int:
        """Seven fractional digits, one more than datetime reads; some rows have none."""
        text = str(line.value("TIMESTAMP")).split("+")[0]
        seconds, _, fraction = text.partition(".")
        try:
            at = datetime.fromisoformat(seconds + "+00:00")
            return int(at.timestamp()) * 10**9 + int(fraction.ljust(9, "0")[:9] or 0)
        except ValueError:
            raise line.error("TIMESTAMP", text, "a time such as 2023-11-16 18:17:03.9799600") from None


@dataclass(frozen=True, kw_only=True)
class RequestTable:
    """CSV or JSONL, plain or gzip: arrival_s, in_tokens, out_tokens and, for shared prefixes, prefix_id, prefix_tokens.

    The first prefix_tokens of prompts with one prefix_id are the same. Further columns are ignored.
    """

    path: Path
    num_requests: int | None = None
    speedup: float = 1.0

    def __post_init__(self) -> None:
        positive(self, num_requests=self.num_requests)
        above_zero(self, speedup=self.speedup)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        del rng
        is_csv = ".csv" in self.path.suffixes
        prefixes: dict[str, int] = {}
        streams = fresh_streams()
        specs: list[RequestSpec] = []
        for line in islice(_csv_lines(self.path) if is_csv else _json_lines(self.path), self.num_requests):
            num_tokens, num_outputs = line.count("in_tokens"), line.count("out_tokens")
            arrival_ns = line.time_ns("arrival_s", 1e9) / self.speedup
            spans = []
            shared = 0
            prefix_id = line.get("prefix_id")
            if prefix_id not in (None, ""):
                shared = line.count("prefix_tokens", least=0)
                if shared > num_tokens:
                    raise line.error("prefix_tokens", shared, f"at most in_tokens, which is {num_tokens}")
                if str(prefix_id) not in prefixes:
                    prefixes[str(prefix_id)] = next(streams)
                spans.append((prefixes[str(prefix_id)], 0, shared))
            spans.append((next(streams), 0, num_tokens - shared))
            output = Spans.of(next(streams), num_outputs)
            specs.append(RequestSpec(len(specs), Spans(spans), output, num_outputs, arrival_ns=round(arrival_ns)))
        return _in_order(specs, self.path)


class _Line:
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


def _json_lines(path: Path) -> Iterator[_Line]:
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
            yield _Line(path, number, fields)


def _csv_lines(path: Path) -> Iterator[_Line]:
    with _open(path) as file:
        for number, fields in enumerate(csv.DictReader(file), 2):
            yield _Line(path, number, {name: value for name, value in fields.items() if name is not None})


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


def _in_order(specs: Iterable[RequestSpec], path: Path) -> Sequence[RequestSpec]:
    """By arrival; ties stay as in the file."""
    ordered = sorted(specs, key=lambda spec: spec.arrival_ns)
    if not ordered:
        raise TraceError(f"{path}: no requests in it")
    return [spec._replace(request_id=i) for i, spec in enumerate(ordered)]
