"""Traces with one request per row. The field names that tools use are in `trace_fields.py`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.inputs import finite
from pdsim.workload import trace_fields as names
from pdsim.workload.hash_ids import HashBlocks, TextBlocks, block_tokens_of, has_only_whole
from pdsim.workload.lengths import positive
from pdsim.workload.request_spec import RequestSpec, Streams, fresh_streams
from pdsim.workload.trace_fields import Quantity
from pdsim.workload.trace_file import Line, TimedTrace, TraceError, records, warn
from pdsim.workload.trace_images import TraceImages

_LOOKED_AT = 1000
"""Number of first rows from which block sizes and units of times are inferred."""
EPOCH_S = 1e9
"""Times of at least this number of s count from 1970. Times since the start of a trace are far smaller."""
_DAY_S = 86_400
"""If the first request's time is at least this number of s, times are assumed to be a time of day or a date."""
_LEAST_GAP = 2
"""Whole-number times are taken as s if the mean gap between successive requests is above 0 and below this number,
otherwise as ms. If such times were in ms, there would be over 500 requests per second."""
_EPOCHS = (("s", 1e12), ("ms", 1e15), ("us", 1e18), ("ns", inf))
"""Units of times since 1970, from the longest unit to the shortest. Each has a limit; times are in the first unit whose
limit they do not reach."""


@dataclass(frozen=True, kw_only=True)
class RowTrace(TimedTrace):
    """Base class of traces with one request per row: CSV, Parquet, JSON lines, or JSON (a list of rows, or columns)."""

    block_tokens: int | None = None
    """Number of tokens per hash id. None: as the file says, or inferred from lengths and numbers of ids."""
    time_unit: str = ""
    """Unit of arrival times whose field name tells none: s, ms, us or ns. Empty: the format's unit, or inferred from
    the values, with a note unless the times count from 1970."""
    image_tokens: int = 0
    """Number of tokens that each image adds to its prompt."""
    new_turns: bool | None = None
    """Meaning of prompt lengths in later turns of a session, for rows without prefix_id and without ids of tokens or
    blocks. true: length of the new input (AIPerf). false: length of the whole prompt. None: new input if any prompt is
    shorter than prompt and output of the turn before, otherwise the whole prompt; with a warning."""

    unit: ClassVar[str] = ""
    """The format's unit of arrival times, for field names that name no unit. Empty: the format has no fixed unit."""
    clock_s: ClassVar[float] = _DAY_S
    """If the first request arrives at this time in s or later, arrival times are taken as times of day or dates, and
    are counted from the first request."""
    usual_unit: ClassVar[str] = ""
    """Unit of the format's field `timestamp`, unless its values count from 1970. Empty: inferred from the values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, block_tokens=self.block_tokens)
        if self.time_unit not in ("", *names.UNITS):
            raise ValueError(f"{type(self).__name__} needs time_unit of {', '.join(names.UNITS)}")
        if self.image_tokens < 0:
            raise ValueError(f"{type(self).__name__} needs image_tokens >= 0, found {self.image_tokens}")

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        """Returns the requests in order of arrival. Times of day (see clock_s) are counted from the first request."""
        ordered = super().requests(rng)
        begin_ns = ordered[0].arrival_ns
        if begin_ns * self.speedup < self.clock_s * 1e9:
            return ordered
        return [spec._replace(arrival_ns=spec.arrival_ns - begin_ns) for spec in ordered]

    def specs(self) -> Iterator[RequestSpec]:
        rows = rows_of(self.path)
        first = list(islice(rows, _LOOKED_AT))
        reader = RowReader(self, first)
        yield from reader.read(chain(first, rows))


_DYNAMO_REQUEST = "request_end"
_FORMATS = ("ContextTokens", "Request tokens")
"""Fields by which Azure's and BurstGPT's traces are recognised. In these traces, `rows_of` renames no field."""


def rows_of(path: Path) -> Iterator[Line]:
    """Yields rows with the field names of trace_fields. A session yields one row per turn. The rows of Dynamo's request
    traces are sorted by arrival, because these traces list requests by end time; their other events are left out.
    """
    lines = (line for line in records(path) if line.get("event_type") in (None, _DYNAMO_REQUEST))
    first = next(lines, None)
    if first is None:
        return
    ours = {} if any(name in first.fields for name in _FORMATS) else _other_spellings(first.flat().fields)
    rows: Iterator[Line] = (line.flat() for line in chain((first,), lines))
    if first.get("event_type") == _DYNAMO_REQUEST:
        rows = iter(sorted(rows, key=_received))
    for row in rows:
        named = Line(row.where, {ours.get(name, name): value for name, value in row.fields.items()}) if ours else row
        yield from _turns_of(named)


def _received(row: Line) -> float:
    return row.time_ns("request_received_ms", names.MS)


def _other_spellings(fields: Mapping[str, Any]) -> dict[str, str]:
    """Maps a row's fields such as Prompt Tokens, promptTokens and prompt-tokens to names in trace_fields."""
    known = {name for quantity in names.QUANTITIES for name in quantity.names}
    found: dict[str, str] = {}
    for name in fields:
        if isinstance(name, str) and name not in known:
            parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
            plain = "_".join(parts).lower()
            if plain in known and plain not in fields and plain not in found.values():
                found[name] = plain
    return found


def _turns_of(line: Line) -> Iterable[Line]:
    """Returns one row per turn for a session whose first turn has a prompt length, otherwise the row itself."""
    turns = line.get("turns")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns)):
        return (line,)
    has_lengths = Line(line.where, turns[0]).quantity(names.INPUT) is not None
    return _rows_of_session(line, turns) if has_lengths else (line,)


def _rows_of_session(line: Line, turns: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Yields one row per turn. The first row also has the fields of the session's line, such as its arrival time."""
    around = {name: value for name, value in line.fields.items() if name != "turns"}
    session = line.quantity(names.SESSION)
    own = {} if session is None else {session[0]: session[1]}
    for number, turn in enumerate(turns, start=1):
        fields = {"session_id": line.where, **(around if number == 1 else own), **turn}
        yield Line(f"{line.where}, turn {number}", fields).flat()


def _required(line: Line, quantity: Quantity) -> tuple[str, Any]:
    """Returns field name and value of a quantity. Raises TraceError if no field of the row has a value for it."""
    if (found := line.quantity(quantity)) is None:
        some = ", ".join(islice(quantity.names, 6))
        there = ", ".join(map(str, line.fields))
        raise TraceError(f"{line.where}: no field of {quantity.what}: {some} or the like; the line has {there}")
    return found


@dataclass
class RowReader:
    """Makes requests from the rows of a trace."""

    trace: RowTrace
    first: Sequence[Line]
    """The first rows, from which block size and unit of times are inferred."""
    streams: Iterator[int] = field(default_factory=fresh_streams)
    """Yields numbers of new token streams. Prompts share tokens only if they have spans of the same stream."""

    def __post_init__(self) -> None:
        self._blocks: HashBlocks | None = None
        self._token_ids = TextBlocks(self.streams)
        self._prefixes: dict[str, int] = {}
        self._turns: dict[str, tuple[RequestSpec, int | None]] = {}
        """Last turn of each session, and the time in ns at which it ended in the trace."""
        self._units_ns: dict[str, float] = {}
        self._has_times = any(line.quantity(names.ARRIVAL) for line in self.first)
        self._has_new_turns = self.trace.new_turns
        if self._has_new_turns is None:
            self._has_new_turns = has_new_turns(self.first)
        self._skipped = self._told_turns = 0
        self.images = TraceImages(self.trace.image_tokens)

    def read(self, rows: Iterable[Line]) -> Iterator[RequestSpec]:
        number = 0
        for line in rows:
            if _is_left_out(line):
                self._skipped += 1
                continue
            yield self._spec(number, line)
            number += 1
        self.say()

    def say(self) -> None:
        path = self.trace.path
        if self._skipped:
            warn(f"{path}: {self._skipped} requests are left out, which failed or warmed up the server")
        if (num := self.images.num_images) and not self.trace.image_tokens:
            warn(f"{path}: prompt lengths are assumed to include {num} images; if not, set image_tokens (of one image)")
        if self._told_turns and self.trace.new_turns is None:
            what = "the lengths of new input" if self._has_new_turns else "the lengths of whole prompts"
            warn(f"{path}: {self._told_turns} later turns continue their conversation, and have {what} (new_turns)")

    def _spec(self, number: int, line: Line) -> RequestSpec:
        if line.get("wait_for"):
            raise line.error("wait_for", line.get("wait_for"), "none: agentic_mooncake_trace reads it")
        prompt = self.prompt(line)
        num_outputs = self.num_outputs(line)
        output = Spans.of(next(self.streams), num_outputs)
        found = line.quantity(names.CLASS)
        request_class = "" if found is None else str(found[1]).strip()
        session = line.quantity(names.SESSION)
        turn = None if session is None else self._turns.get(str(session[1]))
        arrival_ns = self._arrival_ns(line) if turn is None else 0
        spec = RequestSpec(number, prompt, output, num_outputs, arrival_ns, request_class=request_class)
        if turn is not None:
            spec = self._as_later_turn(spec, line, *turn)
        if session is not None:
            self.note_turn(str(session[1]), spec, line)
        return self.images.placed(spec, prompt)

    def prompt(self, line: Line) -> Spans:
        token_ids, blocks = line.quantity(names.TOKEN_IDS), line.quantity(names.BLOCKS)
        if token_ids is not None and isinstance(token_ids[1], list):
            return self._token_ids.prompt(token_ids[1])
        num_tokens = line.count_of(*_required(line, names.INPUT))
        if blocks is not None and blocks[1] != []:
            prompt = self._hash_blocks.prompt(line, blocks[0], num_tokens)
        else:
            prompt = Spans(self._spans(line, num_tokens))
        if (images := _images_of(line)) and (added := self.images.read(images)):
            prompt = prompt.then(Spans.of(next(self.streams), added))
        return prompt

    def num_outputs(self, line: Line) -> int:
        return line.count_of(*_required(line, names.OUTPUT))

    @property
    def _hash_blocks(self) -> HashBlocks:
        if self._blocks is None:
            size = self.trace.block_tokens or block_tokens_of(self.first, str(self.trace.path))
            self._blocks = HashBlocks(size, self.streams, only_whole=has_only_whole(self.first, size))
        return self._blocks

    def _spans(self, line: Line, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yields the spans of a prompt, each as (number of the token stream, position in this stream, number of
        tokens). The first span is the prefix that prefix_id names, if any.
        """
        shared = 0
        if (prefix_id := line.get("prefix_id")) not in (None, ""):
            shared = line.count("prefix_tokens", least=0)
            if shared > num_tokens:
                raise line.error("prefix_tokens", shared, f"at most the prompt's tokens, which are {num_tokens}")
            stream = self._prefixes.get(str(prefix_id))
            if stream is None:
                stream = self._prefixes[str(prefix_id)] = next(self.streams)
            yield (stream, 0, shared)
        yield (next(self.streams), 0, num_tokens - shared)

    def _as_later_turn(self, spec: RequestSpec, line: Line, before: RequestSpec, ended_ns: int | None) -> RequestSpec:
        """Returns the request as a turn of a session that follows the turn `before`, with its prompt, arrival time and
        pause. The pause is the row's delay or, without a delay, the time from ended_ns to the arrival. Raises
        TraceError if the row arrives before the turn before arrived.

        ended_ns: time at which the turn before ended in the trace; None: not known, so the time of its arrival counts.
        """
        delay = line.quantity(names.DELAY)
        is_timed = line.quantity(names.ARRIVAL) is not None or (delay is None and self._has_times)
        arrival_ns = self._arrival_ns(line) if is_timed else before.arrival_ns
        if arrival_ns < before.arrival_ns:
            name, found = line.quantity(names.ARRIVAL) or ("", None)
            raise line.error(name, found, "a time not before the session's previous turn")
        think_ns = arrival_ns - (before.arrival_ns if ended_ns is None else min(ended_ns, arrival_ns))
        if delay is not None:
            think_ns = round(line.time_ns(delay[0], names.DELAY.names[delay[0]] or names.MS))
        prompt = self.continued(before, spec.prompt, line)
        return spec._replace(prompt=prompt, arrival_ns=arrival_ns, after=(before.request_id,), think_ns=think_ns)

    def note_turn(self, session: str, spec: RequestSpec, line: Line) -> None:
        """Keeps a turn, and the time of its end in the trace, for the next turn of the session."""
        self._turns[session] = spec, self._end_ns(line)

    def continued(self, before: RequestSpec, prompt: Spans, line: Line) -> Spans:
        """Returns a later turn's prompt: `prompt` if the row has ids of tokens or blocks or prefix_id. Otherwise prompt
        and output of the turn `before`, then `prompt` if lengths count new input, else cut or extended to its length.
        """
        if _tells_prompt(line):
            return prompt
        self._told_turns += 1
        history = before.prompt.then(before.output)
        if self._has_new_turns:
            return history.then(prompt)
        num_new = len(prompt) - len(history)
        return history.then(prompt.first(num_new)) if num_new > 0 else history.first(len(prompt))

    def _arrival_ns(self, line: Line) -> int:
        if not self._has_times:
            return 0
        name, found = _required(line, names.ARRIVAL)
        if isinstance(found, str) and not _is_number(found):
            return self._scaled(_date_ns(line, name, found))
        unit_ns = names.ARRIVAL.names[name]
        return self._scaled(line.time_of(name, found, self._found_unit_ns(name) if unit_ns is None else unit_ns))

    def _end_ns(self, line: Line) -> int | None:
        found = line.quantity(names.END)
        if found is None:
            return None
        return self._scaled(line.time_ns(found[0], names.END.names[found[0]] or names.NS))

    def _scaled(self, time_ns: float) -> int:
        return round(time_ns if self.trace.speedup == 1 else time_ns / self.trace.speedup)

    def _found_unit_ns(self, name: str) -> float:
        """Returns the length in ns of a field's unit: as the user set it, as the format has it, or inferred."""
        if name not in self._units_ns:
            unit = self.trace.time_unit or self.trace.unit
            if not unit:
                values = [value for line in self.first if (value := _number(line.get(name))) is not None]
                unit, is_sure = unit_of(values)
                if not is_sure and name == "timestamp" and self.trace.usual_unit:
                    unit = self.trace.usual_unit
                elif not is_sure:
                    warn(f"{self.trace.path}: {name} is assumed to be in {unit}; else set time_unit")
            self._units_ns[name] = names.UNITS[unit]
        return self._units_ns[name]


_OUTCOMES = {"benchmark_phase", "Response tokens", "success", *names.FAILURE.names}


def _is_left_out(line: Line) -> bool:
    """True for failed requests, requests without an answer, and the warm-up requests in AIPerf's records."""
    if _OUTCOMES.isdisjoint(line.fields):
        return False
    if line.get("benchmark_phase") not in (None, "", "profiling"):
        return True
    failure = line.quantity(names.FAILURE)
    if failure is not None and failure[1] not in (False, "0", 0, [], "None", "null"):
        return True
    return line.get("Response tokens") == "0" or line.get("success") in (False, "False", "false")


def _tells_prompt(line: Line) -> bool:
    """True if the row tells which tokens of its prompt other prompts share."""
    return any(line.quantity(one) is not None for one in (names.BLOCKS, names.TOKEN_IDS)) or "prefix_id" in line.fields


def has_new_turns(lines: Iterable[Line]) -> bool:
    """True if some prompt is shorter than prompt and output of its session's turn before: lengths count new input."""
    known: dict[str, int] = {}
    for line in lines:
        session, length, output = (line.quantity(one) for one in (names.SESSION, names.INPUT, names.OUTPUT))
        if session is None or length is None or output is None:
            continue
        num_tokens, name = line.count(length[0]), str(session[1])
        if num_tokens < known.get(name, 0):
            return True
        known[name] = num_tokens + line.count(output[0])
    return False


def _images_of(line: Line) -> list[str]:
    """Returns a name for each image of the row. An empty name: the row names no URL or id of the image."""
    found = line.quantity(names.IMAGES)
    if found is None:
        return []
    name, value = found
    if isinstance(value, list):
        return list(map(str, value))
    return [""] * line.count(name, least=0) if _is_number(value) else [str(value)]


def unit_of(times: Sequence[float]) -> tuple[str, bool]:
    """Finds the unit of times whose field name does not imply a unit. Returns (s, ms, us or ns, whether the unit is
    certain). Only the unit of times since 1970 is certain.
    """
    if not times or max(times) < EPOCH_S:
        is_dense = 0 < max(times) - min(times) < _LEAST_GAP * (len(times) - 1) if times else False
        return ("s" if is_dense or any(value != int(value) for value in times) else "ms"), False
    return next(unit for unit, below in _EPOCHS if max(times) < below), True


def _date_ns(line: Line, name: str, text: str) -> int:
    """Returns the time in ns of a date, in UTC if it has no zone. Fractions of a second are not left to datetime, which
    keeps six digits: Azure's traces have seven.
    """
    head, point, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        at = datetime.fromisoformat(head + rest[len(digits) :] if point else head)
    except ValueError:
        at = None
    if at is None or (point and not digits):
        raise line.error(name, text, "a time such as 2023-11-16 18:17:03.9799600")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.timestamp()) * 10**9 + int(digits[:9].ljust(9, "0"))


def _is_number(value: Any) -> bool:
    return _number(value) is not None


def _number(value: Any) -> float | None:
    try:
        return finite(value)
    except ValueError:
        return None
