"""Clients, front end and router of a run. They handle a request from its arrival to the end that its client sees."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pdsim.core import messages as m
from pdsim.core.routing.router import num_retries, request_of
from pdsim.dataclass import dataclass
from pdsim.metrics.records import RequestRecord
from pdsim.policy.views import TokenSequence
from pdsim.scenario.building.encoding import encoded_modalities
from pdsim.scenario.sections.front_end import FrontEndSettings
from pdsim.sim.bus import Bus, Timeline
from pdsim.workload.client import ClientDriver, sessions_of
from pdsim.workload.request_spec import RequestSpec, Streams

STALL_WITHIN_NS = 40_000_000
"""A connection stalls if it was idle for less than this time in ns: Linux delays acknowledgements by 40 ms on recently
used connections."""


@dataclass(slots=True)
class _Passing:
    """State of a request in the front end, between its arrival and its end.

    stalls: its connection delays the first token (STALL_WITHIN_NS). prefill_answered: prefill has answered the present
    attempt. streamed: the first token was streamed. ended: function to call when the client sees the end; None: the
    request has not ended.
    """

    stalls: bool
    prefill_answered: bool = False
    streamed: bool = False
    ended: Callable[[], None] | None = None
    answered_ns: int | None = None
    """Time in ns at which the first token reaches the client. None: the first token was not forwarded yet."""


class FrontEnd:
    """Models HTTP server, tokenizer and gateway, which delay requests and answers.

    A client sends each request on the connection that has been idle longest.
    """

    def __init__(self, timeline: Timeline, settings: FrontEndSettings, clients: "Clients") -> None:
        self._timeline = timeline
        self._settings = settings
        self._clients = clients
        self._free_ns = 0
        self._idle: deque[int] = deque([0])
        """Times in ns at which the idle connections sent their last answers. A benchmark's warm-up leaves one idle
        connection."""
        self._passing: dict[int, _Passing] = {}
        self._turns: deque[Callable[[], None]] = deque()
        """Calls of client work that wait for the thread that clients share with the server, in order. The first call
        runs or waits."""
        self._in_turn = False

    def send(self, spec: RequestSpec) -> None:
        """Sends a client's request. If client and server share a busy thread, the request waits for the thread. A
        request that the client sends while it handles the end of another request does not wait, because the client then
        runs on the thread.
        """
        if self._in_turn:
            self._send(spec)
        else:
            self._take_turn(partial(self._send, spec))

    def _send(self, spec: RequestSpec) -> None:
        self._clients.arrive(spec)
        settings, now_ns = self._settings, self._timeline.now_ns
        used_ns = self._idle.popleft() if self._idle else None
        stalls = settings.stall > 0 and used_ns is not None and now_ns - used_ns < STALL_WITHIN_NS
        self._passing[spec.request_id] = _Passing(stalls)
        num_tokens = len(spec.prompt)
        self._free_ns = max(self._free_ns, now_ns) + settings.service + round(settings.service_per_token * num_tokens)
        there_ns = self._free_ns + settings.latency_in
        self._timeline.after(there_ns - now_ns, self._clients.route, spec)

    def on_prefill_answer(self, request_id: int) -> None:
        passing = self._passing.get(request_id)
        if passing is not None:
            passing.prefill_answered = True
            self._forward(request_id, passing)

    def on_streamed(self, request_id: int) -> None:
        """Notes that an instance has streamed the request's first token. Forwards the token to the client, unless the
        front end must wait for an answer of prefill.
        """
        passing = self._passing[request_id]
        passing.streamed = True
        self._forward(request_id, passing)

    def on_retry(self, request_id: int) -> None:
        """Handles a retry. The front end waits again for an answer of prefill before it forwards the first token."""
        self._passing[request_id].prefill_answered = False

    def on_end(self, request_id: int, ended: Callable[[], None], *, failed: bool) -> None:
        """Handles the end of a request. ended: function to call when the client sees the end. failed: True: the client
        sees the end without waiting for a first token.
        """
        passing = self._passing[request_id]
        passing.ended = ended
        if failed or passing.answered_ns is not None or not passing.streamed:
            self._finish(request_id, passing)

    def _forward(self, request_id: int, passing: _Passing) -> None:
        """Forwards the first token, if it was streamed and not forwarded yet. With waits_for_prefill, prefill must have
        answered, too. If the request's end has waited for the first token, also forwards the end.
        """
        if not passing.streamed or passing.answered_ns is not None:
            return
        if self._settings.waits_for_prefill and not passing.prefill_answered:
            return
        delay_ns = self._settings.latency_out + (self._settings.stall if passing.stalls else 0)
        passing.answered_ns = self._timeline.now_ns + delay_ns
        self._timeline.after(delay_ns, self._take_turn, partial(self._clients.see_first_token, request_id))
        if passing.ended is not None:
            self._finish(request_id, passing)

    def _finish(self, request_id: int, passing: _Passing) -> None:
        assert passing.ended is not None
        del self._passing[request_id]
        end_ns = max(self._timeline.now_ns + self._settings.latency_out, passing.answered_ns or 0)
        self._timeline.after(end_ns - self._timeline.now_ns, self._take_turn, partial(self._close, passing.ended))

    def _close(self, ended: Callable[[], None]) -> None:
        now_ns = self._timeline.now_ns
        self._idle.append(now_ns)
        if self._settings.holds_client:
            self._free_ns = max(self._free_ns, now_ns) + self._settings.ending
        ended()

    # The client's turns.

    def _take_turn(self, turn: Callable[[], None]) -> None:
        """Calls `turn`, a piece of the client's work. With holds_client the call waits until the front end's thread
        works on no request. Otherwise `turn` is called at once.
        """
        if not self._settings.holds_client:
            turn()
            return
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._wait_for_thread()

    def _wait_for_thread(self) -> None:
        self._timeline.after(max(0, self._free_ns - self._timeline.now_ns), self._take_first_turn)

    def _take_first_turn(self, _: None) -> None:
        self._in_turn = True
        self._turns[0]()
        self._in_turn = False
        self._turns.popleft()
        if self._turns:
            self._wait_for_thread()


class Clients:
    def __init__(
        self,
        bus: Bus,
        progress: Callable[[int], None] | None,
        ended: Callable[[RequestRecord], None] | None,
    ) -> None:
        cluster = bus.cluster
        self.num_ended = 0
        self.local: set[int] = set()
        """Ids of attempts whose prompts a decode or aggregated instance of vLLM computes. Removed when the prompt is
        computed. Empty with pipeline stages, whose executor does not read the ids.
        """
        self.on_sent: Callable[[int], None] | None = None
        """Function to call with the id of each request that a client sends. None: the scenario has neither
        faults nor health."""
        self.on_ended: Callable[[RequestRecord], None] | None = None
        """Function to call with each ended request. None: the cluster has no autoscaler."""
        self.cached: Callable[[TokenSequence], tuple[m.CachedTokens, ...]] | None = None
        """Function that returns how many tokens of a prompt each instance has cached. None: the router does not ask."""
        self.commands: dict[type, Callable[[Any], None]] = {
            m.FirstToken: self._on_first_token,
            m.PrefillDone: self._on_prefill_done,
            m.Finished: self._on_finished,
            m.Failed: self.tell_router,
        }
        """Handlers of instances' commands that concern clients, by type."""
        self._bus = bus
        self._timeline = bus.timeline
        self._recorder = bus.recorder
        self._recorded_router = bus.recorded(cluster.router)
        self._router = cluster.router
        self._progress = progress
        self._ended = ended
        self._num_requests = len(cluster.requests)
        self._is_disaggregated = cluster.interconnect is not None
        self._encoded = encoded_modalities(cluster.scenario)
        """Modalities that encode instances or vLLM's servers encode. Instances see other media as tokens only."""
        aggregated = cluster.scenario.aggregated
        self._keeps_local = cluster.scenario.engine == "vllm" and (aggregated is None or aggregated.pp == 1)
        self._priorities = cluster.scenario.priorities
        self._ignore_eos = cluster.scenario.ignore_eos
        self._sessions: dict[int, int] = {}
        """Session of each request, by request id. Empty unless the router reads sessions."""
        if cluster.router.reads_sessions:
            sessions = enumerate(sessions_of(cluster.requests))
            self._sessions = {spec.request_id: number for number, session in sessions for spec in session}
        self._waiting: set[int] = set()
        """Ids of unfinished requests."""
        has_front_end = not cluster.front_end.is_none
        self._front_end = FrontEnd(self._timeline, cluster.front_end, self) if has_front_end else None
        streams = Streams(cluster.scenario.seed)
        self._driver = ClientDriver(
            self._timeline, cluster.client, cluster.requests, streams=streams, send=self._send_request
        )

    def start(self) -> None:
        self._driver.start()

    def abort(self, request_id: int) -> None:
        """Aborts a request for its client, also while the front end still delays the request."""
        if request_id not in self._waiting:
            return
        reason = "aborted by the client"
        self.tell_router(m.Cancel(request_id, reason))
        if request_id in self._waiting:
            self._end(m.Failed(request_id, reason))

    def _send_request(self, spec: RequestSpec) -> None:
        if self._front_end is None:
            self.arrive(spec)
            self.route(spec)
        else:
            self._front_end.send(spec)

    def arrive(self, spec: RequestSpec) -> None:
        """Records that a client has sent a request."""
        num_prompt_tokens, num_output_tokens, now_ns = len(spec.prompt), len(spec.output), self._timeline.now_ns
        self._recorder.on_arrival(spec.request_id, num_prompt_tokens, num_output_tokens, now_ns, spec.request_class)
        if spec.media:
            self._recorder.on_media(spec.request_id, spec.num_media_tokens("image"), spec.num_media_tokens("audio"))
        self._waiting.add(spec.request_id)
        if self.on_sent is not None:
            self.on_sent(spec.request_id)

    def route(self, spec: RequestSpec) -> None:
        if spec.request_id in self._waiting:
            priority = self._priorities.get(spec.request_class, 0)
            ignores_eos = self._ignore_eos and spec.max_output_tokens == len(spec.output)
            session = self._sessions.get(spec.request_id, -1)
            media = tuple([item for item in spec.media if item.modality in self._encoded])
            cached = () if self.cached is None else self.cached(spec.prompt)
            self.tell_router(
                m.Arrival(
                    spec.request_id,
                    spec.prompt,
                    spec.max_output_tokens,
                    priority,
                    ignores_eos,
                    session,
                    media,
                    spec.agent,
                    cached,
                )
            )

    # The router and the attempts under way.

    def tell_router(self, message: m.Message) -> None:
        """Gives the router a message, and carries out the commands that it returns. Records the router's choices."""
        sends: list[m.Send] = []
        for command in self._recorded_router.on_message(message, self._timeline.now_ns):
            if isinstance(command, m.Send):
                sends.append(command)
                new = command.message
                if isinstance(new, m.NewRequest) and command.to == new.decode_id:
                    self._on_attempt(new)
            elif isinstance(command, m.Failed):
                self._end(command)
            elif isinstance(command, m.PrefillDone):
                self._answer_of_prefill(command.request_id)
            else:
                self._bus.wake_at(command)
        if sends:
            self._bus.send_together(sends)

    def _on_attempt(self, new: m.NewRequest) -> None:
        attempt = new.request_id
        if num_retries(attempt):
            outputs = self._bus.outputs
            outputs[attempt] = outputs[request_of(attempt)]
            self._recorder.on_retry(attempt)
            if self._front_end is not None:
                self._front_end.on_retry(request_of(attempt))
        self._recorder.on_routed(attempt, new.prefill_id, new.decode_id, self._timeline.now_ns)
        if new.prefill_id == new.decode_id:
            if self._keeps_local:
                self.local.add(attempt)
            if self._is_disaggregated:
                self._answer_of_prefill(request_of(attempt))

    def _on_prefill_done(self, done: m.PrefillDone) -> None:
        request_id = self._router.client_of(done.request_id)
        self.tell_router(done)
        if request_id is not None:
            self._answer_of_prefill(request_id)

    def _answer_of_prefill(self, request_id: int) -> None:
        if self._front_end is not None:
            self._front_end.on_prefill_answer(request_id)

    def _on_first_token(self, token: m.FirstToken) -> None:
        now_ns = self._timeline.now_ns
        request_id = self._router.client_of(token.request_id)
        if self._router.hears_first_tokens:
            self.tell_router(token)
        self._recorder.on_streamed(token.request_id, now_ns)
        if request_id is None:
            return
        if self._front_end is None:
            self.see_first_token(request_id)
        else:
            self._front_end.on_streamed(request_id)

    def see_first_token(self, request_id: int) -> None:
        self._recorder.on_first_token(request_id, self._timeline.now_ns)

    def _on_finished(self, finished: m.Finished) -> None:
        request_id = self._router.client_of(finished.request_id)
        self.tell_router(finished)
        if request_id is not None:
            self._end(m.Finished(request_id))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        """Ends a request that no instance serves any more. The front end shows the end to the client."""
        self._waiting.discard(outcome.request_id)
        if self._front_end is None:
            self._on_end(outcome)
        else:
            failed = isinstance(outcome, m.Failed)
            self._front_end.on_end(outcome.request_id, partial(self._on_end, outcome), failed=failed)

    def _on_end(self, outcome: m.Finished | m.Failed) -> None:
        self.num_ended += 1
        record = self._recorder.on_end(outcome, self._timeline.now_ns)
        if self.on_ended is not None:
            self.on_ended(record)
        self._driver.on_end(outcome.request_id)
        if self._progress is not None and (self.num_ended % 32 == 0 or self.num_ended == self._num_requests):
            self._progress(self.num_ended)
        if self._ended is not None:
            self._ended(record)
