"""Open and closed loops: send the requests of a workload at their times, or as earlier ones end."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from pdsim.workload.arrivals import Arrivals
from pdsim.workload.request_spec import RequestSpec, Streams


@dataclass(frozen=True)
class OpenLoop:
    """Sends each request at its time, and one that waits for others after the last of them."""

    arrivals: Arrivals | None = None
    """Arrivals. None: the trace's times; generated workloads are sent all at once."""


@dataclass(frozen=True)
class ClosedLoop:
    """Keeps so many requests in flight: all at once at the start, then one for each that ends.

    A request's latency counts from when it is sent, so waiting in the client is not in it (as in SGLang's client).
    """

    concurrency: int
    """Sessions in flight; requests that wait for each other are one session."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"a closed loop needs concurrency >= 1, found {self.concurrency}")


Client = OpenLoop | ClosedLoop


class Clock(Protocol):
    """Simulated time, or the real one."""

    @property
    def now_ns(self) -> int: ...

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> Any:
        """Call back once, with anything."""


class ClientDriver:
    """Later requests of a session follow earlier ones; a closed loop counts sessions, not requests."""

    def __init__(
        self,
        timeline: Clock,
        client: Client,
        requests: Sequence[RequestSpec],
        *,
        streams: Streams,
        send: Callable[[RequestSpec], None],
    ) -> None:
        self._timeline = timeline
        self._client = client
        self._send = send
        self._num_awaited = {spec.request_id: len(spec.after) for spec in requests if spec.after}
        self._followers: defaultdict[int, list[RequestSpec]] = defaultdict(list)
        for spec in requests:
            for earlier in spec.after:
                self._followers[earlier].append(spec)
        if isinstance(client, ClosedLoop):
            sessions = sessions_of(requests)
            self._sessions = iter(sessions)
            self._session_of = {spec.request_id: i for i, session in enumerate(sessions) for spec in session}
            self._num_unfinished = [len(session) for session in sessions]
        else:
            first = [spec for spec in requests if not spec.after]
            self._times = None
            if client.arrivals is None:
                first.sort(key=lambda spec: spec.arrival_ns)
            else:
                self._times = client.arrivals.times_ns(streams.named("arrivals"))
            self._first = deque(first)

    def start(self) -> None:
        if isinstance(self._client, ClosedLoop):
            concurrency = self._client.concurrency
            self._timeline.after(0, lambda _: self._burst(concurrency))
        else:
            self._schedule_next()

    def on_end(self, request_id: int) -> None:
        for spec in self._followers.pop(request_id, ()):
            self._num_awaited[spec.request_id] -= 1
            if not self._num_awaited[spec.request_id]:
                self._send_after_pause(spec)
        if isinstance(self._client, ClosedLoop):
            session = self._session_of[request_id]
            self._num_unfinished[session] -= 1
            if not self._num_unfinished[session]:
                self._begin(next(self._sessions, ()))

    def _send_after_pause(self, spec: RequestSpec) -> None:
        self._timeline.after(spec.think_ns, lambda _: self._send(spec))

    def _burst(self, num_sessions: int) -> None:
        for session in islice(self._sessions, num_sessions):
            self._begin(session)

    def _begin(self, session: Iterable[RequestSpec]) -> None:
        for spec in session:
            if not spec.after:
                self._send(spec)

    def _schedule_next(self) -> None:
        if self._first:
            at_ns = self._first[0].arrival_ns if self._times is None else next(self._times)
            self._timeline.after(at_ns - self._timeline.now_ns, self._on_time)

    def _on_time(self, _: None) -> None:
        self._send(self._first.popleft())
        self._schedule_next()


def sessions_of(requests: Iterable[RequestSpec]) -> list[list[RequestSpec]]:
    """Requests that follow each other, directly or not. Sessions, and requests within one, stay in order."""
    requests = list(requests)
    leaders = {spec.request_id: spec.request_id for spec in requests}

    def leader_of(request_id: int) -> int:
        while leaders[request_id] != request_id:
            leaders[request_id] = leaders[leaders[request_id]]
            request_id = leaders[request_id]
        return request_id

    for spec in requests:
        for earlier in spec.after:
            leaders[leader_of(spec.request_id)] = leader_of(earlier)
    sessions: dict[int, list[RequestSpec]] = {}
    for spec in requests:
        sessions.setdefault(leader_of(spec.request_id), []).append(spec)
    return list(sessions.values())
