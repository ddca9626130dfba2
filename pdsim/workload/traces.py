"""Public traces, of agents too, ShareGPT conversations and plain request tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path

from pdsim.core.sequence import Spans
from pdsim.system.catalog import hint
from pdsim.workload.hash_ids import HashBlocks
from pdsim.workload.lengths import above_zero
from pdsim.workload.request_spec import RequestSpec, alone, conversation, fresh_streams
from pdsim.workload.trace_file import BlockTrace, Line, TimedTrace, Trace, csv_lines, json_lines, json_records


@dataclass(frozen=True, kw_only=True)
class MooncakeTrace(BlockTrace):
    """Mooncake's JSON lines: timestamp (ms), input_length, output_length, hash_ids.

    Equal leading ids are a shared prefix. Lines of one session_id are turns: each follows the end of the one before by
    delay (ms), or else by the difference of their timestamps.
    """

    def specs(self) -> Iterator[RequestSpec]:
        blocks = HashBlocks(self.block_tokens)
        last_turns: dict[str, RequestSpec] = {}
        for number, line in enumerate(json_lines(self.path)):
            session = line.get("session_id")
            before = None if session is None else last_turns.get(str(session))
            spec = self._turn(blocks, line, number, before)
            if session is not None:
                last_turns[str(session)] = spec
            yield spec

    def _turn(self, blocks: HashBlocks, line: Line, number: int, before: RequestSpec | None) -> RequestSpec:
        """A later turn may have a delay and no timestamp."""
        if line.get("wait_for"):
            raise line.error("wait_for", line.get("wait_for"), "none: agentic_mooncake_trace reads it")
        if before is None:
            return blocks.spec(number, line, line.time_ns("timestamp", 1e6) / self.speedup)
        has_delay = line.get("delay") is not None
        timed = line.get("timestamp") is not None or not has_delay
        arrival_ns = round(line.time_ns("timestamp", 1e6) / self.speedup) if timed else before.arrival_ns
        if arrival_ns < before.arrival_ns:
            raise line.error("timestamp", line.value("timestamp"), "one not before that of the session's turn before")
        spec = blocks.spec(number, line, arrival_ns)
        think_ns = round(line.time_ns("delay", 1e6)) if has_delay else spec.arrival_ns - before.arrival_ns
        return spec._replace(after=(before.request_id,), think_ns=think_ns)


@dataclass(frozen=True, kw_only=True)
class AgenticMooncakeTrace(BlockTrace):
    """DynoSim's agentic_mooncake without a header: Mooncake's fields, request_id, wait_for.

    A line with wait_for is sent delay + tool_wait_ms (ms) after the last of these requests has ended, other lines at
    their timestamp. session_id, branches, prefix_reset and tool_events are not read.
    """

    def specs(self) -> Iterator[RequestSpec]:
        """Requests, each behind those that it waits for: none waits for one that was cut off."""
        blocks = HashBlocks(self.block_tokens)
        made: dict[str, RequestSpec] = {}
        for name, (line, awaited) in _earlier_first(_named_lines(self.path)):
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
"""Lines by request_id, with the ids in wait_for."""


def _named_lines(path: Path) -> _Lines:
    lines: dict[str, tuple[Line, list[str]]] = {}
    for line in json_lines(path):
        name = str(line.value("request_id"))
        if name in lines:
            raise line.error("request_id", name, "one that no line before has")
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
    """Lines as in the file, but each comes behind those that it waits for."""
    names = list(lines)
    places = {name: i for i, name in enumerate(names)}
    sorter = TopologicalSorter({places[name]: [places[one] for one in lines[name][1]] for name in names})
    try:
        sorter.prepare()
    except CycleError as found:
        circle = [names[place] for place in reversed(found.args[1])]
        line, awaited = lines[circle[0]]
        raise line.error("wait_for", awaited, f"no circle: {' waits for '.join(circle)}") from None
    ready: list[int] = []
    while sorter.is_active():
        for place in sorter.get_ready():
            heappush(ready, place)
        place = heappop(ready)
        yield names[place], lines[names[place]]
        sorter.done(place)


@dataclass(frozen=True, kw_only=True)
class BailianTrace(TimedTrace):
    """Qwen's traces of Bailian: Mooncake's fields, seconds, blocks of 16 tokens. Turns do not wait for each other."""

    def specs(self) -> Iterator[RequestSpec]:
        blocks = HashBlocks(block_tokens=16)
        for i, line in enumerate(json_lines(self.path)):
            yield blocks.spec(i, line, line.time_ns("timestamp", 1e9) / self.speedup)


@dataclass(frozen=True, kw_only=True)
class AzureTrace(TimedTrace):
    """Azure's LLM inference traces, CSV: TIMESTAMP, ContextTokens, GeneratedTokens. Prompts share nothing."""

    def specs(self) -> Iterator[RequestSpec]:
        lines = list(islice(csv_lines(self.path), self.num_requests))
        times_ns = [self._time_ns(line) for line in lines]
        start_ns = min(times_ns, default=0)
        for i, (line, at_ns) in enumerate(zip(lines, times_ns, strict=True)):
            num_outputs, num_inputs = line.count("GeneratedTokens"), line.count("ContextTokens")
            yield alone(i, num_inputs, num_outputs, round((at_ns - start_ns) / self.speedup))

    @staticmethod
    def _time_ns(line: Line) -> int:
        """Seven fractional digits, one more than datetime reads; some rows have none."""
        text = str(line.value("TIMESTAMP")).split("+")[0]
        seconds, point, fraction = text.partition(".")
        try:
            at = datetime.fromisoformat(seconds + "+00:00")
        except ValueError:
            at = None
        if at is None or (point and not fraction.isdecimal()):
            raise line.error("TIMESTAMP", text, "a time such as 2023-11-16 18:17:03.9799600")
        return int(at.timestamp()) * 10**9 + int(fraction.ljust(9, "0")[:9])


@dataclass(frozen=True, kw_only=True)
class BurstGptTrace(TimedTrace):
    """BurstGPT's CSV: Timestamp (s), Request tokens, Response tokens.

    Failures, which have no response, are left out. Prompts share nothing.
    """

    def specs(self) -> Iterator[RequestSpec]:
        answered = (line for line in csv_lines(self.path) if line.count("Response tokens", least=0))
        for i, line in enumerate(answered):
            num_outputs, num_inputs = line.count("Response tokens"), line.count("Request tokens")
            yield alone(i, num_inputs, num_outputs, round(line.time_ns("Timestamp", 1e9) / self.speedup))


@dataclass(frozen=True, kw_only=True)
class RequestTable(TimedTrace):
    """CSV (suffix .csv) or JSON lines: arrival_s, in_tokens, out_tokens and, for shared prefixes, prefix_id,
    prefix_tokens.

    A column class, also in traces with hash_ids, names classes of requests. Other columns are ignored.
    """

    def specs(self) -> Iterator[RequestSpec]:
        is_csv = ".csv" in self.path.suffixes
        prefixes: dict[str, int] = {}
        streams = fresh_streams()
        for number, line in enumerate(csv_lines(self.path) if is_csv else json_lines(self.path)):
            num_tokens, num_outputs = line.count("in_tokens"), line.count("out_tokens")
            arrival_ns = round(line.time_ns("arrival_s", 1e9) / self.speedup)
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
            prompt, output = Spans(spans), Spans.of(next(streams), num_outputs)
            yield RequestSpec(number, prompt, output, num_outputs, arrival_ns, request_class=line.request_class)


_LEAST_TOKENS = 2
"""Least tokens of a prompt and of an answer: SGLang's client drops shorter ones."""


@dataclass(frozen=True, kw_only=True)
class ShareGpt(Trace):
    """A JSON list of conversations: the first turn is the prompt, the second its answer.

    Conversations of fewer turns are left out. There is no tokenizer: a length is characters times tokens_per_character.
    There are no arrival times: set the client's.
    """

    tokens_per_character: float = 0.25
    """English has about four characters a token; code and other languages have fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, tokens_per_character=self.tokens_per_character)

    def specs(self) -> Iterator[RequestSpec]:
        lengths = (
            [self._num_tokens(record, turn) for turn in _first_two(record)] for record in json_records(self.path)
        )
        answered = (pair for pair in lengths if len(pair) == 2 and min(pair) >= _LEAST_TOKENS)  # noqa: PLR2004
        for i, (num_inputs, num_outputs) in enumerate(answered):
            yield alone(i, num_inputs, num_outputs)

    def _num_tokens(self, record: Line, turn: object) -> int:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise record.error("conversations", str(turn)[:40], "turns such as {'from': 'human', 'value': 'text'}")
        return round(len(turn["value"]) * self.tokens_per_character)


def _first_two(record: Line) -> list[object]:
    turns = record.value("conversations")
    if not isinstance(turns, list):
        raise record.error("conversations", turns, "a list of turns")
    return turns[:2]


@dataclass(frozen=True, kw_only=True)
class AppliedComputeTrace(Trace):
    """Agents, a conversation a line: a request for each of num_turns calls of a tool and one for the final answer.

    A prompt is the whole conversation before it: a first prompt of input_prompt_length, then for each turn an answer
    (assistant_response_length) and what the tool gave (tool_call_output_length), which took tool_call_latency (s).
    Lines have no times, and share nothing.
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
