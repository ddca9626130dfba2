"""HTTP server, tokenizer and gateway in simulated time: what a request passes on its way in, and its answer back."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pdsim.scenario.network import FrontEndSettings
from pdsim.sim.timeline import Timeline
from pdsim.workload.request_spec import RequestSpec

STALL_WITHIN_NS = 40_000_000
"""Connections stall that were used less than this before: Linux delays an acknowledgement by so long."""


@dataclass(slots=True)
class _Passing:
    """A request between its arrival and its answer."""

    stalls: bool
    prefill_answered: bool = False
    streamed: bool = False
    ended: Callable[[], None] | None = None
    answered_ns: int | None = None
    """Time when its first token reaches the client."""


class FrontEnd:
    """Delays requests and answers. The client keeps its connections in a row and takes the one that idles longest."""

    def __init__(
        self,
        timeline: Timeline,
        settings: FrontEndSettings,
        *,
        on_arrival: Callable[[RequestSpec], None],
        route: Callable[[RequestSpec], None],
        on_first_token: Callable[[int], None],
    ) -> None:
        """on_arrival: called as a client gets to send a request, at once if the front end does not hold it."""
        self._timeline = timeline
        self._settings = settings
        self._on_arrival = on_arrival
        self._route = route
        self._on_first_token = on_first_token
        self._free_ns = 0
        self._idle: deque[int] = deque([0])
        """Times of the last answers on idle connections; a benchmark's warm-up leaves one."""
        self._passing: dict[int, _Passing] = {}
        self._turns: deque[Callable[[], None]] = deque()
        """Work of the client in the thread that serves, in order; the first is under way, or waits for the thread."""
        self._in_turn = False

    def send(self, spec: RequestSpec) -> None:
        """The next request of a client that has just seen an end is sent in the same turn."""
        if self._in_turn:
            self._send(spec)
        else:
            self._take_turn(partial(self._send, spec))

    def _send(self, spec: RequestSpec) -> None:
        self._on_arrival(spec)
        settings, now_ns = self._settings, self._timeline.now_ns
        used_ns = self._idle.popleft() if self._idle else None
        stalls = settings.stall > 0 and used_ns is not None and now_ns - used_ns < STALL_WITHIN_NS
        self._passing[spec.request_id] = _Passing(stalls)
        num_tokens = len(spec.prompt)
        self._free_ns = max(self._free_ns, now_ns) + settings.service + round(settings.service_per_token * num_tokens)
        there_ns = self._free_ns + settings.latency_in
        self._timeline.after(there_ns - now_ns, self._route, spec)

    def on_prefill_answer(self, request_id: int) -> None:
        passing = self._passing.get(request_id)
        if passing is not None:
            passing.prefill_answered = True
            self._forward(request_id, passing)

    def on_streamed(self, request_id: int) -> None:
        """Decode has streamed the first token."""
        passing = self._passing[request_id]
        passing.streamed = True
        self._forward(request_id, passing)

    def on_retry(self, request_id: int) -> None:
        """Another prefill instance has to answer."""
        self._passing[request_id].prefill_answered = False

    def on_end(self, request_id: int, ended: Callable[[], None], *, failed: bool) -> None:
        """Decode, or whoever failed the request, is done with it: `ended` is called as the client sees that."""
        passing = self._passing[request_id]
        passing.ended = ended
        if failed or passing.answered_ns is not None or not passing.streamed:
            self._finish(request_id, passing)

    def _forward(self, request_id: int, passing: _Passing) -> None:
        """The first token, when nothing holds it back; and what ended meanwhile."""
        if not passing.streamed or passing.answered_ns is not None:
            return
        if self._settings.waits_for_prefill and not passing.prefill_answered:
            return
        delay_ns = self._settings.latency_out + (self._settings.stall if passing.stalls else 0)
        passing.answered_ns = self._timeline.now_ns + delay_ns
        self._timeline.after(delay_ns, self._take_turn, partial(self._on_first_token, request_id))
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
        """Run it at once, unless the thread that serves is the client's, too, and busy."""
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
