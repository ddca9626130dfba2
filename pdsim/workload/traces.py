"""Reads public traces, including traces of agents, and tables with one request per row."""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path
from typing import ClassVar

from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.system.catalog import hint
from pdsim.workload.hash_ids import HashBlocks, block_tokens_of
from pdsim.workload.lengths import positive
from pdsim.workload.request_spec import RequestSpec, conversation, fresh_streams
from pdsim.workload.trace_file import Line, TimedTrace, Trace, json_lines
from pdsim.workload.trace_rows import EPOCH_S, RowTrace


@dataclass(frozen=True, kw_only=True)
class MooncakeTrace(RowTrace):
    """Mooncake's JSON lines: timestamp (ms), input_length, output_length, hash_ids.

    Prompts with equal first ids share a prefix; prompts without ids share nothing. Lines with the same session_id are
    turns of a session. A turn is sent when the turn before has ended and a pause is over: delay (ms), or else the
    difference of the timestamps.
    """

    unit: ClassVar[str] = "ms"
    clock_s: ClassVar[float] = EPOCH_S


@dataclass(frozen=True, kw_only=True)
class AgenticMooncakeTrace(TimedTrace):
    """DynoSim's agentic_mooncake without a header: Mooncake's fields, request_id, wait_for.

    A line with wait_for is sent delay + tool_wait_ms (in ms) after all requests in wait_for have ended. Other lines are
    sent at their timestamp. The fields session_id, branches, prefix_reset and tool_events are not read.
    """

    block_tokens: int | None = None
    """Number of tokens per hash id. None: inferred from lengths and numbers of ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, block_tokens=self.block_tokens)

    def specs(self) -> Iterator[RequestSpec]:
        """Yields the requests, each after the requests that it waits for, so that a caller can stop after any number of
        them.
        """
        lines = _named_lines(self.path)
        found = self.block_tokens or block_tokens_of((line for line, _ in lines.values()), str(self.path))
        blocks = HashBlocks(found)
        made: dict[str, RequestSpec] = {}
        for name, (line, awaited) in _earlier_first(lines):
            made[name] = self._spec(blocks, line, len(made), [made[one] for one in awaited])
            yield made[name]

    def _spec(self, blocks: HashBlocks, line: Line, number: int, awaited: Sequence[RequestSpec]) -> RequestSpec:
        is_timed = line.get("timestamp") is not None or not awaited
        own_ns = line.time_ns("timestamp", 1e6) / self.speedup if is_timed else 0
        arrival_ns = max([round(own_ns), *(spec.arrival_ns for spec in awaited)])
        spec = blocks.spec(number, line, arrival_ns)
        if not awaited:
            return spec
        pauses_ns = [line.time_ns(name, 1e6) for name in ("delay", "tool_wait_ms") if line.get(name) is not None]
        return spec._replace(after=tuple(one.request_id for one in awaited), think_ns=round(sum(pauses_ns)))


_Lines = Mapping[str, tuple[Line, list[str]]]
"""By request_id: a line, and the request ids in its wait_for."""


def _named_lines(path: Path) -> _Lines:
    lines: dict[str, tuple[Line, list[str]]] = {}
    for line in json_lines(path):
        name = str(line.value("request_id"))
        if name in lines:
            raise line.error("request_id", name, "an id that no earlier line has")
        awaited = line.get("wait_for") or []
        if not isinstance(awaited, list):
            raise line.error("wait_for", awaited, "a list of request ids")
        lines[name] = line, list(dict.fromkeys(map(str, awaited)))
    for line, awaited in lines.values():
        for one in awaited:
            if one not in lines:
                raise line.error("wait_for", one, f"the request_id of a line{hint(one, lines)}")
    return lines


def _earlier_first(lines: _Lines) -> Iterator[tuple[str, tuple[Line, list[str]]]]:
    """Yields request_id, line and wait_for of each line. Lines come in the order of the file, but each after the lines
    that it waits for. Raises TraceError if lines wait in a circle.
    """
    names = list(lines)
    places = {name: i for i, name in enumerate(names)}
    sorter = TopologicalSorter({places[name]: [places[one] for one in lines[name][1]] for name in names})
    try:
        sorter.prepare()
    except CycleError as found:
        circle = [names[place] for place in reversed(found.args[1])]
        line, awaited = lines[circle[0]]
        raise line.error("wait_for", awaited, f"no waiting in a circle: {' waits for '.join(circle)}") from None
    ready: list[int] = []
    while sorter.is_active():
        for place in sorter.get_ready():
            heappush(ready, place)
        place = heappop(ready)
        yield names[place], lines[names[place]]
        sorter.done(place)


@dataclass(frozen=True, kw_only=True)
class BailianTrace(RowTrace):
    """Traces of Alibaba's Bailian service for Qwen: Mooncake's fields, with times in seconds and blocks of 16 tokens.
    Turns do not wait for each other.
    """

    block_tokens: int | None = 16
    """Number of tokens per hash id."""

    unit: ClassVar[str] = "s"


@dataclass(frozen=True, kw_only=True)
class AzureTrace(RowTrace):
    """Azure's LLM inference traces, CSV: TIMESTAMP, ContextTokens, GeneratedTokens. Prompts share nothing."""


@dataclass(frozen=True, kw_only=True)
class BurstGptTrace(RowTrace):
    """BurstGPT's CSV: Timestamp (s), Request tokens, Response tokens.

    Failed requests, which have no response, are left out. Prompts share nothing.
    """


@dataclass(frozen=True, kw_only=True)
class RequestTable(RowTrace):
    """Rows with the numbers of prompt and output tokens, such as arrival_s, in_tokens, out_tokens. Other tools' names
    for these columns are also read. The file is CSV, JSON lines, JSON, or Parquet.

    Shared prefixes are given by prefix_id and prefix_tokens, by hash_ids, or by token ids. The column `class` gives the
    class of a request. Other columns are ignored.
    """


@dataclass(frozen=True, kw_only=True)
class AppliedComputeTrace(Trace):
    """Conversations of agents, one per line: one request for each of num_turns tool calls, and one for the final
    answer.

    Each prompt is the whole conversation so far: a first prompt of input_prompt_length tokens, then for each turn an
    answer (assistant_response_length) and the tool's output (tool_call_output_length), which takes tool_call_latency
    (s). Lines have no arrival times. Conversations share no tokens.
    """

    def specs(self) -> Iterator[RequestSpec]:
        streams, num_before = fresh_streams(), 0
        for line in json_lines(self.path):
            conversation = list(self._conversation(line, num_before, streams))
            yield from conversation
            num_before += len(conversation)

    def _conversation(self, line: Line, first: int, streams: Iterator[int]) -> Iterator[RequestSpec]:
        num_turns = line.count("num_turns", least=0)
        answers = line.counts("assistant_response_length", num_turns)
        answers.append(line.count("final_assistant_response_length"))
        inputs = [line.count("input_prompt_length"), *line.counts("tool_call_output_length", num_turns, least=0)]
        waits_ns = [0.0, *line.times_ns("tool_call_latency", num_turns, 1e9)]
        turns = conversation(Spans(()), zip(inputs, answers, strict=True), streams)
        for turn, ((prompt, output), wait_ns) in enumerate(zip(turns, waits_ns, strict=True)):
            after = (first + turn - 1,) if turn else ()
            yield RequestSpec(first + turn, prompt, output, len(output), after=after, think_ns=round(wait_ns))
