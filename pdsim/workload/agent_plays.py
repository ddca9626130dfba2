"""Recorded sessions of agents and their sub-agents, one JSON object per session, in Weka's format, which AgentX
replays.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from random import Random
from typing import NamedTuple

from pdsim.core.sequence import Spans
from pdsim.dataclass import dataclass
from pdsim.workload.hash_ids import HashBlocks
from pdsim.workload.lengths import positive
from pdsim.workload.request_spec import RequestSpec, Streams, fresh_streams
from pdsim.workload.trace_file import Line, Trace, TraceError, records

_SUBAGENT = "subagent"
_BLOCK_TOKENS = 64
"""Number of tokens per block if a recording has no block size."""
_INT = frozenset({int})


class Call(NamedTuple):
    """One recorded request of a session."""

    prompt: Spans
    """The tokens of the prompt."""
    num_outputs: int
    """Number of output tokens."""
    start_ns: int
    """Recorded start in ns since the session's start."""
    end_ns: int
    """Recorded end in ns since the session's start."""
    agent: int
    """Number of the agent that made the call. 0: the session's own agent. Each sub-agent has another number."""


class Interval(NamedTuple):
    """Recorded time of one call. A sub-agent with all its calls counts as one interval among its parent's calls."""

    start_ns: int
    """Start in ns since the session's start."""
    end_ns: int
    """End in ns since the session's start."""
    calls: tuple[int, ...]
    """Indices into Session.calls: the recorded call of which this is the time. For a sub-agent: its last call, and its
    calls that still ran when the last call began. Empty: the sub-agent has no calls.
    """


@dataclass(frozen=True, kw_only=True)
class WekaTrace(Trace):
    """Recorded sessions of agents in Weka's format, which AgentX replays: requests with t (start in s), in, out,
    hash_ids, api_time (duration in s); sub-agents.

    A request waits for requests that had ended before it in the recording, and then for the time that the recording has
    between the last of these ends and the request (AIPerf's interval order). Requests of the session's own agent, and
    first requests of a sub-agent, wait for own requests and for whole sub-agents. Later requests of a sub-agent wait
    for requests of the same sub-agent only.

    The file is JSON lines, one JSON object, or a folder of such files. Sessions share no prompts and have no start
    times; a closed loop sets the number of sessions in flight.
    """

    num_sessions: int | None = None
    """Number of sessions. After the last recorded session the first is used again, with new prompts that share nothing
    with earlier sessions. None: each recorded session once."""
    lanes: int | None = None
    """Number of sessions, from the first, that start at a random moment of their recording, as in AgentX. To fill
    caches, the last prompt before this moment is sent first, with one output token, for each agent that has later
    requests (priming requests). Later requests begin when all priming requests have ended. Set the closed loop's
    concurrency to the same number. None: all sessions start at their beginning.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, num_sessions=self.num_sessions, lanes=self.lanes)

    def requests(self, rng: Streams) -> Sequence[RequestSpec]:
        """Returns the requests of all sessions, one session after another."""
        random, streams = rng.named("lanes"), fresh_streams()
        specs: list[RequestSpec] = []
        for number, line in enumerate(self._sessions()):
            session = Session(line, streams)
            is_cut = self.lanes is not None and number < self.lanes
            specs += session.specs(number, len(specs), session.moment_ns(random) if is_cut else None)
            if self.num_requests is not None and len(specs) >= self.num_requests:
                break
        if not specs:
            raise TraceError(f"{self.path}: no requests in it")
        return specs[: self.num_requests]

    def _sessions(self) -> Iterator[Line]:
        if self.num_sessions is None:
            yield from self._lines()
            return
        lines = list(islice(self._lines(), self.num_sessions))
        if not lines:
            raise TraceError(f"{self.path}: no sessions in it")
        yield from (lines[i % len(lines)] for i in range(self.num_sessions))

    def _lines(self) -> Iterator[Line]:
        is_folder = self.path.is_dir()
        paths = sorted(self.path.iterdir()) if is_folder else [self.path]
        for path in paths:
            if not is_folder or path.suffix in (".json", ".jsonl"):
                yield from records(path)


class Session:
    """The calls of one recorded session and, for each call, the calls that must end before it is sent."""

    def __init__(self, line: Line, streams: Iterator[int]) -> None:
        """line: the recorded session. streams: yields numbers of unused token streams, for outputs and for new blocks
        of prompt tokens.
        """
        if line.get("hash_id_scope") not in (None, "local"):
            raise line.error("hash_id_scope", line.get("hash_id_scope"), "local: ids of one session")
        self._block_tokens = line.count("block_size") if line.get("block_size") is not None else _BLOCK_TOKENS
        self._blocks = HashBlocks(self._block_tokens, streams)
        self._streams = streams
        self.calls: list[Call] = []
        self._num_agents = 0
        self._after: dict[int, tuple[int, ...]] = {}
        self._read(line)

    def moment_ns(self, random: Random) -> int:
        """Returns a random time in ns between the starts of the session's first and last call."""
        starts = [call.start_ns for call in self.calls]
        return round(random.uniform(min(starts), max(starts)))

    def specs(self, session: int, first: int, moment_ns: int | None) -> list[RequestSpec]:
        """Returns the session's requests. Each has the ids of the requests that must end before it is sent. Ids count
        from `first`. session: number of the session.

        moment_ns: returns only requests whose recorded start is this time or later. They are preceded, for each agent
        with such requests, by the agent's last earlier prompt, which fills caches. None: all requests.
        """
        places = sorted(range(len(self.calls)), key=lambda i: (self.calls[i].start_ns, i))
        from_ns = min((call.start_ns for call in self.calls), default=0) if moment_ns is None else moment_ns
        goes_on = [place for place in places if self.calls[place].start_ns >= from_ns]
        primes = self._last_before(places, goes_on)
        made = [self._spec(place, first + i, session)._replace(primes=True) for i, place in enumerate(primes)]
        made = [spec._replace(output=spec.output.first(1), max_output_tokens=1) for spec in made]
        numbers = {place: first + len(made) + i for i, place in enumerate(goes_on)}
        for place, number in numbers.items():
            call = self.calls[place]
            after = [one for one in self._after.get(place, ()) if one in numbers]
            begin_ns = max((self.calls[one].end_ns for one in after), default=from_ns)
            spec = self._spec(place, number, session)
            ids = tuple(sorted(numbers[one] for one in after))
            made.append(spec._replace(after=ids, think_ns=max(0, call.start_ns - begin_ns)))
        return made

    def _last_before(self, places: Sequence[int], goes_on: Sequence[int]) -> list[int]:
        """Returns, for each agent that makes a call in goes_on, the index of its last call before goes_on. Agents
        without such a call are left out. places: indices into `calls` of all calls, ordered by start. goes_on: the last
        part of `places`.
        """
        agents = {self.calls[place].agent for place in goes_on}
        return list(
            {
                self.calls[i].agent: i for i in places[: len(places) - len(goes_on)] if self.calls[i].agent in agents
            }.values()
        )

    def _spec(self, place: int, number: int, session: int) -> RequestSpec:
        call = self.calls[place]
        output = Spans.of(next(self._streams), call.num_outputs)
        return RequestSpec(
            number, call.prompt, output, call.num_outputs, call.start_ns, session=session, agent=call.agent
        )

    def _read(self, line: Line) -> None:
        own, subagents = [], []
        for entry in _entries(line):
            if entry.get("type") == _SUBAGENT:
                subagents.append(self._subagent(entry))
            else:
                own.append(self._call(entry, 0, 0))
        ends = [interval for interval, _ in subagents if interval.calls]
        begins = [(call, interval) for interval, calls in subagents for call in calls]
        self._after |= frontiers([*own, *ends], own)
        first = [call for call, _ in begins if not self._after.get(call.calls[0])]
        self._after |= frontiers([*own, *ends], first)

    def _subagent(self, entry: Line) -> tuple[Interval, list[Interval]]:
        """Reads a sub-agent. Returns (one interval for the whole sub-agent, a list with one interval for each of its
        calls). The field `calls` of the first has the sub-agent's last call, and calls that still ran when the last
        call began. Call times count from the session's start. A call time before the sub-agent's start counts from the
        sub-agent's start, as in older files. A sub-agent whose recorded end is not after the start of its last call
        ends just after this start, because no call can wait for its own end.
        """
        self._num_agents += 1
        start_ns = round(entry.time_ns("t", 1e9))
        calls = [self._call(one, start_ns, self._num_agents) for one in _entries(entry)]
        self._after |= frontiers(calls, calls)
        end_ns = max((call.end_ns for call in calls), default=start_ns)
        if entry.get("duration_ms") is not None:
            end_ns = start_ns + round(entry.time_ns("duration_ms", 1e6))
        last_ns = max((call.start_ns for call in calls), default=start_ns)
        end_ns = max(end_ns, last_ns + 1)
        last = tuple(call.calls[0] for call in calls if call.end_ns > last_ns or call.start_ns == last_ns)
        return Interval(start_ns, end_ns, last), calls

    def _call(self, entry: Line, spawned_ns: int, agent: int) -> Interval:
        start_ns = round(entry.time_ns("t", 1e9))
        start_ns += spawned_ns if start_ns < spawned_ns else 0
        took_ns = 0 if entry.get("api_time") is None else round(entry.time_ns("api_time", 1e9))
        num_tokens, ids = entry.count("in"), entry.get("hash_ids") or []
        if not isinstance(ids, list) or not _INT.issuperset(map(type, ids)):
            raise entry.error("hash_ids", ids, "a list of whole numbers")
        prompt = self._blocks.of_ids(ids[: -(-num_tokens // self._block_tokens)], num_tokens)
        call = Call(prompt, max(1, entry.count("out", least=0)), start_ns, start_ns + took_ns, agent)
        self.calls.append(call)
        return Interval(call.start_ns, call.end_ns, (len(self.calls) - 1,))


def _entries(line: Line) -> Iterator[Line]:
    found = line.value("requests")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise line.error("requests", found, "a list of requests")
    yield from (Line(f"{line.where}, requests[{i}]", one) for i, one in enumerate(found))


def frontiers(intervals: Sequence[Interval], waiting: Sequence[Interval]) -> Mapping[int, tuple[int, ...]]:
    """Returns, for each waiting call, the calls that must end before it is sent. Keys and values are indices into
    Session.calls. intervals: calls that others may wait for. waiting: calls that wait, which need not be in
    `intervals`.

    A call waits for the calls that had ended when it started. Of these, calls that ended before another of these
    started are left out, because this other call already waits for them. A call that ends at the moment when another
    starts counts as ended. Calls with equal starts are independent (AIPerf's `infer_cross_stream_predecessors`).
    """
    after: dict[int, tuple[int, ...]] = {}
    running: list[tuple[int, int]] = []
    frontier: list[Interval] = []
    begun = sorted(range(len(intervals)), key=lambda i: intervals[i].start_ns)
    at = 0
    for target in sorted(waiting):
        while at < len(begun) and intervals[begun[at]].start_ns < target.start_ns:
            heappush(running, (intervals[begun[at]].end_ns, begun[at]))
            at += 1
        ended = []
        while running and running[0][0] <= target.start_ns:
            ended.append(intervals[heappop(running)[1]])
        if ended:
            frontier += ended
            last_ns = max(one.start_ns for one in frontier)
            frontier = [one for one in frontier if one.end_ns > last_ns or one.start_ns == last_ns]
        after[target.calls[0]] = tuple(call for one in frontier for call in one.calls)
    return after
