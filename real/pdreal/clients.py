"""Clients of a real run: send a workload's requests as the scenario says, and receive their tokens."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdreal.control.clock import Timeline
from pdreal.control.requests import NO_DRAFTS, Request, Sampling
from pdreal.launcher import Launcher
from pdreal.settings.model import model_config
from pdreal.settings.options import Options
from pdsim.core.sequence import Spans, StreamSpan, TokenIds
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import ClientAbort, ClientAborts, Kill
from pdsim.workload.client import ClientDriver
from pdsim.workload.request_spec import RequestSpec, Streams

_MASK = (1 << 64) - 1
_STEP = 0xD1B54A32D192ED03


def tokens_at(span: StreamSpan, vocab_size: int) -> NDArray[np.int32]:
    """Returns the token ids of a span, which is a contiguous piece of one token stream. SplitMix64's finalizer maps the
    number of the stream and each offset to an id, so a span always has the same ids, and ids are spread over the
    vocabulary. vocab_size: number of different ids.
    """
    stream, offset, length = span
    begin = (stream * 0x9E3779B97F4A7C15 + offset * _STEP + 0x8CB92BA72F3D8DD7) & _MASK
    z = np.uint64(begin) + np.arange(length, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab_size)).astype(np.int32)


class Tokens:
    """Token ids of a workload's spans. After the model has generated an output, the span of the output has the
    generated tokens instead of the workload's, because a session's next prompt repeats them.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._said: dict[int, list[tuple[int, NDArray[np.int32]]]] = {}
        """Generated tokens by token stream. Each pair: offset in the stream of the first token, ids of all tokens."""

    def ids(self, spans: Spans) -> TokenIds:
        return TokenIds(data=b"".join(self._tokens(span).tobytes() for span in spans.spans))

    def learn(self, output: Spans, ids: Sequence[int]) -> None:
        """Keeps the generated tokens of an output. Later prompts that repeat this output contain the generated tokens.
        output: spans of the output in the workload. ids: generated tokens, in the order of the spans.
        """
        begin = 0
        for stream, offset, length in output.spans:
            said = np.array(ids[begin : begin + length], np.int32)
            self._said.setdefault(stream, []).append((offset, said))
            begin += length

    def _tokens(self, span: StreamSpan) -> NDArray[np.int32]:
        tokens = tokens_at(span, self._vocab_size)
        stream, begin, length = span
        for offset, said in self._said.get(stream, ()):
            first, stop = max(offset, begin), min(offset + len(said), begin + length)
            if first < stop:
                tokens[first - begin : stop - begin] = said[first - offset : stop - offset]
        return tokens


_EARLY_NS = 2_000_000
"""An alarm wakes this time in ns before it is due, because event loops usually call timers late by up to this time."""


class PunctualTimeline:
    """A timeline that calls back at the right time. late_ns: for each callback that sends requests, the time in ns from
    the moment at which it was due until it had the first request ready to send.

    The event loop's timer is set _EARLY_NS early. From then on, the event loop looks in each turn whether the callback
    is due; other work of the loop goes on.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._due_ns: int | None = None
        self.late_ns: list[int] = []

    def sends(self) -> None:
        """Notes that a request is ready and is sent now: if it is the first one of the callback that runs, adds the
        lateness of this callback to late_ns.
        """
        if self._due_ns is not None:
            self.late_ns.append(self.now_ns - self._due_ns)
            self._due_ns = None

    @property
    def now_ns(self) -> int:
        return self._timeline.now_ns

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> Any:
        due_ns = self.now_ns + delay_ns

        def awake(argument: Any) -> None:
            if self.now_ns < due_ns:
                self._timeline.loop.call_soon(awake, argument)
                return
            self._due_ns = due_ns
            callback(argument)
            self._due_ns = None

        return self._timeline.after(delay_ns - _EARLY_NS, awake)


class Clients:
    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[RequestSpec],
        options: Options,
        *,
        progress: Callable[[int], Any],
        reference: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """progress: called with the number of ended requests when one ends. reference: output token ids that each
        request has without drafts, by request id. Empty: not known.
        """
        self._scenario = scenario
        self._requests = requests
        self._tokens = Tokens(model_config(options, scenario.model).vocab_size)
        self._progress = progress
        self._reference = reference
        self._has_next_turn = {earlier for spec in requests for earlier in spec.after}
        self._specs = {spec.request_id: spec for spec in requests}
        self._draws = Streams(scenario.seed).named("client aborts")
        self._done = asyncio.Event()
        self.drafted = NO_DRAFTS
        """Numbers of accepted drafts, summed over all ended requests."""
        self.outputs: dict[int, list[int]] = {}
        """Output token ids of ended requests, by request id."""
        self.late_ns: list[int] = []
        """Lateness in ns of each scheduled call of the client: sending a request of an open loop or a turn after a
        pause, or beginning sessions of a closed loop."""
        self.stopped = False
        """True if the clients were stopped before all requests had ended."""

    async def serve(self, launcher: Launcher) -> None:
        """Sends requests until all have ended, the run is stopped, or the cluster cannot continue."""
        self._launcher = launcher
        streams = Streams(self._scenario.seed)
        self._timeline = timeline = PunctualTimeline(launcher.timeline)
        self.late_ns = timeline.late_ns
        self._driver = ClientDriver(timeline, self._scenario.client, self._requests, streams=streams, send=self._send)
        self._driver.start()
        self._start_faults()
        await self._done.wait()

    def stop(self) -> None:
        self.stopped = True
        self._done.set()

    def on_end(self, request: Request) -> None:
        spec = self._specs[request.request_id]
        self.outputs[spec.request_id] = request.tokens
        self.drafted = self.drafted.plus(request.drafted)
        if spec.request_id in self._has_next_turn:
            self._tokens.learn(spec.output, request.tokens)
        self._progress(len(self.outputs))
        if len(self.outputs) == len(self._requests) or self._launcher.failure is not None:
            self._done.set()
        elif not self.stopped:
            self._driver.on_end(spec.request_id)

    def _send(self, spec: RequestSpec) -> None:
        if self.stopped:
            return
        sampling = Sampling(
            spec.max_output_tokens,
            stop_after_tokens=len(spec.output),
            ignore_eos=True,
            reference=tuple(self._reference.get(spec.request_id, ())),
        )
        priority = self._scenario.priorities.get(spec.request_class, 0)
        prompt = self._tokens.ids(spec.prompt)
        self._timeline.sends()
        self._launcher.submit(prompt, sampling, request_id=spec.request_id, priority=priority)
        for fault in self._scenario.faults:
            if isinstance(fault, ClientAborts):
                gives_up, share = self._draws.random() < fault.abort_fraction, self._draws.random()
                if gives_up:
                    self._abort_after(round(share * fault.within_ns), spec.request_id)

    # What goes wrong.

    def _start_faults(self) -> None:
        timeline = self._launcher.timeline
        for fault in self._scenario.faults:
            if isinstance(fault, Kill):
                timeline.after(fault.at_ns, partial(self._kill, fault))
            elif isinstance(fault, ClientAbort):
                self._abort_after(fault.at_ns, fault.abort)

    def _kill(self, fault: Kill, _: None) -> None:
        restart_s = None if fault.restart_after_ns is None else fault.restart_after_ns / 1e9
        self._launcher.kill(fault.kill, restart_after_s=restart_s)

    def _abort_after(self, delay_ns: int, request_id: int) -> None:
        self._launcher.timeline.after(delay_ns, lambda _: self._launcher.abort(request_id))
