"""Sends the requests of a workload: at their times, or as earlier ones end."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pdsim.workload.clients import Client, ClosedLoop
from pdsim.workload.request_spec import RequestSpec, Streams


class Timeline(Protocol):
    """Simulated time, or the real one."""

    @property
    def now_ns(self) -> int: ...

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> Any:
        """Call back once, with anything."""
        ...


class ClientDriver:
    """Later turns of a session follow the earlier ones; a closed loop counts sessions, not turns."""

    def __init__(
        self,
        timeline: Timeline,
        client: Client,
        requests: Sequence[RequestSpec],
        *,
        streams: Streams,
        send: Callable[[RequestSpec], None],
    ) -> None:
        self._timeline = timeline
        self._client = client
        self._send = send
        self._next_turn = {spec.after: spec for spec in requests if spec.after is not None}
        first_turns = [spec for spec in requests if spec.after is None]
        self._times = None
        if not isinstance(client, ClosedLoop):
            if client.arrivals is None:
                first_turns.sort(key=lambda spec: spec.arrival_ns)
            else:
                self._times = client.arrivals.times_ns(streams.named("arrivals"))
        self._first_turns = deque(first_turns)

    def start(self) -> None:
        if isinstance(self._client, ClosedLoop):
            num_first = min(self._client.concurrency, len(self._first_turns))
            self._timeline.after(0, lambda _: self._burst(num_first))
        else:
            self._schedule_next()

    def on_end(self, request_id: int) -> None:
        turn = self._next_turn.pop(request_id, None)
        if turn is not None:
            self._timeline.after(turn.think_ns, lambda _: self._send(turn))
        elif isinstance(self._client, ClosedLoop) and self._first_turns:
            self._send(self._first_turns.popleft())

    def _burst(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self._send(self._first_turns.popleft())

    def _schedule_next(self) -> None:
        if self._first_turns:
            at_ns = self._first_turns[0].arrival_ns if self._times is None else next(self._times)
            self._timeline.after(at_ns - self._timeline.now_ns, self._on_time)

    def _on_time(self, _: None) -> None:
        self._send(self._first_turns.popleft())
        self._schedule_next()
