"""Prompts of a trace that gives them as hash ids."""

from bisect import bisect_right
from typing import NamedTuple

from pdsim.core.sequence import Spans
from pdsim.workload.request_spec import RequestSpec, fresh_streams
from pdsim.workload.trace_file import Line


class BlockRun(NamedTuple):
    """Blocks whose ids rise by one and whose tokens follow each other in one stream."""

    first_id: int
    stream: int
    offset: int
    """Position of the first block's first token."""
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
        """Runs of ids above all before them, as most traces number theirs: sorted."""
        self._others: dict[int, BlockRun] = {}
        """Runs of one block each."""
        self._parents: set[int] = set()
        """Ids at the end of a run whose first child is in another."""

    def spec(self, number: int, line: Line, arrival_ns: float) -> RequestSpec:
        num_tokens, num_outputs = line.count("input_length"), line.count("output_length")
        ids, num_blocks = line.value("hash_ids"), -(-num_tokens // self._size)
        if not isinstance(ids, list) or len(ids) != num_blocks:
            raise line.error("hash_ids", ids, f"a list of {num_blocks} ids, one per {self._size} input tokens")
        try:
            prompt = self._prompt(ids, num_tokens)
        except TypeError:
            raise line.error("hash_ids", ids, "whole numbers") from None
        output = Spans.of(next(self._streams), num_outputs)
        return RequestSpec(number, prompt, output, num_outputs, round(arrival_ns), request_class=line.request_class)

    def _prompt(self, ids: list[int], num_tokens: int) -> Spans:
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
        return Spans(spans)

    def _known(self, block: int) -> BlockRun | None:
        place = bisect_right(self._first_ids, block) - 1
        if place >= 0 and block - self._first_ids[place] < self._runs[place].num_blocks:
            return self._runs[place]
        return self._others.get(block)

    def _add(self, ids: list[int], at: int, before: tuple[int, int, int] | None) -> BlockRun:
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


def _num_rising(ids: list[int], at: int, limit: int) -> int:
    """Number of ids from here on, at most `limit`, that rise by one."""
    stop = min(at + limit, len(ids))
    shift = ids[at] - at
    if ids[at:stop] == list(range(ids[at], stop + shift)):
        return stop - at
    for i in range(at + 1, stop):
        if ids[i] != i + shift:
            return i - at
    return stop - at
