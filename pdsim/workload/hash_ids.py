"""Reads prompts from hash ids in a trace, one id per block of tokens. Writes prompts as hash ids into Mooncake traces.

An id stands for its block and all blocks before it, so prompts with equal first ids share a prefix.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.files import write_whole
from pdsim.workload import trace_fields as names
from pdsim.workload.client import sessions_of
from pdsim.workload.request_spec import RequestSpec, fresh_streams
from pdsim.workload.trace_file import Line, TraceError, warn

_USUAL_BLOCK_TOKENS = 512
"""Number of tokens per block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks with consecutive ids, whose tokens are consecutive tokens of one stream."""

    first_id: int
    """Hash id of the first block. The id of each further block is higher by 1."""
    stream: int
    """Number of the token stream from which the blocks' tokens are taken. Tokens at the same position of the same
    stream are equal.
    """
    offset: int
    """Position in the token stream at which the first block begins."""
    num_blocks: int


class HashBlocks:
    """Makes prompts from hash ids, one per block of tokens.

    The parent of an id is the id before it in the prompt where the id first appears. The first id with a given parent
    continues the parent's token stream; each other id begins a new stream. Therefore even a long prompt of short blocks
    has only a few spans.
    """

    def __init__(self, block_tokens: int, streams: Iterator[int] | None = None, *, only_whole: bool = False) -> None:
        """block_tokens: number of tokens per block. streams: yields the numbers of new token streams; None: 0, 1, ...
        only_whole: True: if the last block of a prompt is not full, the block has no id.
        """
        self._size, self._only_whole = block_tokens, only_whole
        self._streams = fresh_streams() if streams is None else streams
        self._first_ids: list[int] = []
        self._runs: list[BlockRun] = []
        """Runs in ascending order of their ids. In most traces, new ids are higher than all earlier ids."""
        self._others: dict[int, BlockRun] = {}
        """Runs of one block, by id. For ids that are not higher than all earlier ids."""
        self._parents: set[int] = set()
        """Ids that end a run and that ids of other runs follow."""

    def spec(self, number: int, line: Line, arrival_ns: float) -> RequestSpec:
        """Makes a request from a line with the fields of Mooncake's traces. number: id of the request. arrival_ns: its
        arrival time in ns.
        """
        num_tokens, num_outputs = line.count("input_length"), line.count("output_length")
        prompt = self.prompt(line, "hash_ids", num_tokens)
        output = Spans.of(next(self._streams), num_outputs)
        return RequestSpec(number, prompt, output, num_outputs, round(arrival_ns), request_class=line.request_class)

    def prompt(self, line: Line, name: str, num_tokens: int) -> Spans:
        """Makes a prompt of num_tokens tokens from the list of ids in the line's field `name`. Raises TraceError if the
        number of ids does not fit num_tokens, or if an id is no integer or occurs twice.
        """
        ids, rest = line.value(name), bool(num_tokens % self._size) and not self._only_whole
        num_blocks = num_tokens // self._size + rest
        if not isinstance(ids, list) or len(ids) != num_blocks:
            expected = (
                f"a list of {num_blocks} ids, one per {self._size} input tokens; block_tokens sets the block size"
            )
            raise line.error(name, ids, expected)
        for block in ids:
            if type(block) is not int:
                raise line.error(name, ids, "whole numbers")
        spans = self._spans(ids, num_tokens)
        if len(spans) > 1 and len(set(ids)) < num_blocks:  # a single span has consecutive ids
            raise line.error(name, ids, "no id twice: an id stands for its block and all blocks before it")
        return Spans(spans)

    def of_ids(self, ids: list[int], num_tokens: int) -> Spans:
        """Makes a prompt from the ids of its blocks. Tokens without an id are shared with no other prompt."""
        return Spans(self._spans(ids, num_tokens))

    def _spans(self, ids: list[int], num_tokens: int) -> list[tuple[int, int, int]]:
        size = self._size
        spans: list[tuple[int, int, int]] = []
        at = 0
        while at < len(ids):
            run = self._known(ids[at])
            if run is None:
                run = self._add(ids, at, spans[-1] if spans else None)
                skipped, num_blocks = 0, run.num_blocks
            else:
                skipped = ids[at] - run.first_id
                num_blocks = _num_rising(ids, at, run.num_blocks - skipped)
            spans.append((run.stream, run.offset + skipped * size, min(num_blocks * size, num_tokens - at * size)))
            at += num_blocks
        if at * size < num_tokens:
            spans.append((next(self._streams), 0, num_tokens - at * size))
        return spans

    def _known(self, block: int) -> BlockRun | None:
        place = bisect_right(self._first_ids, block) - 1
        if place >= 0 and block - self._first_ids[place] < self._runs[place].num_blocks:
            return self._runs[place]
        return self._others.get(block)

    def _add(self, ids: list[int], at: int, before: tuple[int, int, int] | None) -> BlockRun:
        """Adds and returns a run that begins at ids[at], a block id that is not known yet. If this id is higher than
        all ids of earlier runs, the run has all ids that follow consecutively; otherwise the run has one block. before:
        the last span of the prompt before this block: number of its token stream, offset in the stream, and length.
        None: the block is the prompt's first.
        """
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


def _num_rising(ids: list[int], at: int, limit: int) -> int:
    """Number of consecutive ids from ids[at] on (included), each higher by 1 than the id before; at most `limit`."""
    stop = min(at + limit, len(ids))
    shift = ids[at] - at
    for i in range(at + 1, stop):
        if ids[i] != i + shift:
            return i - at
    return stop - at


TEXT_BLOCK = 16
"""Number of tokens per block of text. Shared prefixes of texts are whole blocks."""


class TextBlocks:
    """Makes prompts from texts or token ids. Prompts share equal beginnings, in whole blocks of 16 tokens. The argument
    `block` of the constructor is the number of units (characters or token ids) that make one such block. streams:
    yields numbers of new token streams.
    """

    def __init__(self, streams: Iterator[int], block: int = TEXT_BLOCK) -> None:
        self._blocks = HashBlocks(TEXT_BLOCK, streams)
        self._size = block
        self._known: dict[tuple[int, Hashable], int] = {}

    def prompt(self, units: Sequence[Any], num_tokens: int | None = None) -> Spans:
        """Makes a prompt of num_tokens tokens. units: the prompt's token ids or characters, which only decide the
        blocks that the prompt shares with others: as many units as the constructor's argument `block` make one block of
        16 tokens. num_tokens: None: as many as units.
        """
        size, num_tokens = self._size, len(units) if num_tokens is None else num_tokens
        ids: list[int] = []
        for start in range(0, min(len(units), num_tokens * size // TEXT_BLOCK) - size + 1, size):
            part = units[start : start + size]
            key = (ids[-1] if ids else -1, part if isinstance(part, str) else tuple(part))
            ids.append(self._known.setdefault(key, len(self._known)))
        return self._blocks.of_ids(ids[: num_tokens // TEXT_BLOCK], num_tokens)


class NotASessionError(ValueError):
    """Raised if requests are no turns of sessions: a request follows several requests, or is followed by several."""


def write_mooncake(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows of a trace in Mooncake's format, as JSON lines, which most load generators can replay."""
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def mooncake_rows(
    requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yields rows of a Mooncake trace for the requests that were sent, in the order of sending. sent_ns: time by
    request id. block_tokens: number of tokens per hash id.

    Prompts share whole blocks. A last block that is not full has its own id. Turns of a session with several turns have
    session_id. Turns that follow another turn also have delay (ms). Rows cannot say which tokens of a turn's prompt
    repeat an earlier answer. Raises NotASessionError if requests wait for each other in another way than the turns of
    one session do.
    """
    specs = _in_order_of_sending(requests, sent_ns)
    _check_turns(specs)
    ids = _Ids(block_tokens)
    sessions = [session for session in sessions_of(specs) if len(session) > 1]
    names = {turn.request_id: f"session-{session[0].request_id}" for session in sessions for turn in session}

    def row(spec: RequestSpec) -> dict[str, Any]:
        session = {"session_id": names[spec.request_id]} if spec.request_id in names else {}
        delay = {"delay": _ms(spec.think_ns)} if spec.after else {}
        return {"timestamp": _ms(sent_ns[spec.request_id]), **session, **delay, **ids.lengths(spec)}

    return map(row, specs)


def agentic_rows(
    requests: Iterable[RequestSpec], sent_ns: Mapping[int, int], *, block_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yields rows of an agentic Mooncake trace for the requests that were sent, in the order of sending. sent_ns: time
    by request id. block_tokens: number of tokens per hash id. Rows have request_id. A request that follows others also
    has wait_for (their ids) and delay (ms).
    """
    ids = _Ids(block_tokens)
    for spec in _in_order_of_sending(requests, sent_ns):
        waits = {"wait_for": list(map(str, spec.after)), "delay": _ms(spec.think_ns)} if spec.after else {}
        timestamp = _ms(sent_ns[spec.request_id])
        yield {"request_id": str(spec.request_id), "timestamp": timestamp, **waits, **ids.lengths(spec)}


class _Ids:
    """Gives ids to blocks of prompts, so that the prompts can be written."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._known: dict[tuple[int, Hashable], int] = {}
        self._next = 0

    def lengths(self, spec: RequestSpec) -> dict[str, Any]:
        return {
            "input_length": len(spec.prompt),
            "output_length": len(spec.output),
            "hash_ids": self._of(spec.prompt),
            **({"class": spec.request_class} if spec.request_class else {}),
        }

    def _of(self, prompt: Spans) -> list[int]:
        found: list[int] = []
        for start in range(0, len(prompt) - self._size + 1, self._size):
            key = (found[-1] if found else -1, prompt.page_key(start, self._size))
            if key not in self._known:
                self._known[key] = self._fresh()
            found.append(self._known[key])
        if len(prompt) % self._size:
            found.append(self._fresh())
        return found

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def _in_order_of_sending(requests: Iterable[RequestSpec], sent_ns: Mapping[int, int]) -> Sequence[RequestSpec]:
    sent = [spec for spec in requests if spec.request_id in sent_ns]
    return sorted(sent, key=lambda spec: (sent_ns[spec.request_id], spec.request_id))


def _check_turns(specs: Sequence[RequestSpec]) -> None:
    num_followers = Counter(earlier for spec in specs for earlier in spec.after)
    for spec in specs:
        if len(spec.after) > 1 or num_followers[spec.request_id] > 1:
            how = "follows several" if len(spec.after) > 1 else "is followed by several"
            raise NotASessionError(f"request {spec.request_id} {how}, and rows of a session follow one by one")


def _ms(time_ns: int) -> float:
    """Converts a time to ms: an integer if it is a whole number, as most readers expect, else a float that is exact to
    the nanosecond.
    """
    return time_ns // 10**6 if time_ns % 10**6 == 0 else time_ns / 1e6


def has_only_whole(lines: Sequence[Line], block_tokens: int) -> bool:
    """True if each prompt with ids has one id per full block and none for tokens after its last full block, and some
    prompt has such tokens, as in engines that hash only full blocks. False if only one prompt has ids, unless the trace
    is Dynamo's.
    """
    sizes = [
        (line.count(length[0]), len(ids[1]))
        for line in lines
        if (ids := line.quantity(names.BLOCKS)) and (length := line.quantity(names.INPUT)) and isinstance(ids[1], list)
    ]
    is_dynamo = any(line.get("input_sequence_hashes") is not None for line in lines)
    has_rest = any(num_tokens % block_tokens for num_tokens, _ in sizes)
    return has_rest and (is_dynamo or len(sizes) > 1) and all(num_ids == num // block_tokens for num, num_ids in sizes)


def block_tokens_of(lines: Iterable[Line], path: str) -> int:
    """Returns the number of tokens per block, from the first row that has a field for it. If no row has one: 512 if 512
    fits the prompt lengths and numbers of block ids of all rows, or if no prompt has two ids; otherwise the smallest
    power of two that fits, with a warning; otherwise the only number that fits. Raises TraceError if several other
    numbers or none fit.
    """
    whole_low, whole_high, cut_low, cut_high = 1, inf, 1, inf
    for line in lines:
        if (said := line.quantity(names.BLOCK_TOKENS)) is not None:
            return line.count(said[0])
        ids, length = line.quantity(names.BLOCKS), line.quantity(names.INPUT)
        if ids is None or length is None or not isinstance(ids[1], list) or not ids[1]:
            continue
        num_tokens, num_ids = line.count(length[0]), len(ids[1])
        cut_low = max(cut_low, -(-num_tokens // num_ids))
        cut_high = min(cut_high, (num_tokens - 1) // (num_ids - 1) if num_ids > 1 else inf)
        whole_low = max(whole_low, num_tokens // (num_ids + 1) + 1)
        whole_high = min(whole_high, num_tokens // num_ids)
    if cut_low <= _USUAL_BLOCK_TOKENS <= cut_high or cut_high == inf:  # with no bound above, a wrong line says so
        return _USUAL_BLOCK_TOKENS
    bounds = ((cut_low, cut_high), (whole_low, whole_high))
    for low, high in bounds:
        size = 1 << (low - 1).bit_length()
        if size <= high:
            warn(f"{path}: blocks of {size} tokens fit all lengths and hash_ids; if they have others, set block_tokens")
            return size
    for low, high in bounds:
        if low == high:
            return low
        if low < high:
            fits = f"blocks of {low} to {int(high)} tokens fit"
            raise TraceError(f"{path}: {fits} all lengths and hash_ids: set block_tokens")
    raise TraceError(f"{path}: no block size fits all lengths and hash_ids: set block_tokens")
