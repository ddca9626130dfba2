"""Clients. An open loop sends requests at arrival times. A closed loop sends a request when another has ended."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import sqrt
from random import Random
from typing import Any, Protocol

from pdsim.dataclass import dataclass
from pdsim.workload.request_spec import RequestSpec, Streams


class Arrivals(Protocol):
    """A process of arrival times in ns, for open loops. The times never decrease and never end."""

    def times_ns(self, random: Random) -> Iterator[int]: ...


@dataclass(frozen=True)
class Gamma:
    """Arrivals with gamma-distributed times between them."""

    rate_per_s: float
    """Mean rate in requests per second."""
    burstiness: float = 1.0
    """Shape of the gamma distribution, as in vLLM's and SGLang's clients. 1: Poisson arrivals. Below 1: more bursts.
    Above 1: more regular."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0 or self.burstiness <= 0:
            raise ValueError(f"gamma arrivals need rate > 0 and burstiness > 0, found {self}")

    def times_ns(self, random: Random) -> Iterator[int]:
        now_s = 0.0
        while True:
            now_s += random.gammavariate(self.burstiness, 1 / (self.rate_per_s * self.burstiness))
            yield round(now_s * 1e9)


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals: requests arrive independently of each other."""

    rate_per_s: float
    """Mean rate in requests per second."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0:
            raise ValueError(f"Poisson arrivals need a rate above 0, found {self.rate_per_s:g}/s")

    def times_ns(self, random: Random) -> Iterator[int]:
        now_s = 0.0
        while True:
            now_s += random.expovariate(self.rate_per_s)
            yield round(now_s * 1e9)


@dataclass(frozen=True)
class Constant:
    """Arrivals at equal intervals."""

    rate_per_s: float
    """Rate in requests per second."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0:
            raise ValueError(f"constant arrivals need a rate above 0, found {self.rate_per_s:g}/s")

    def times_ns(self, random: Random) -> Iterator[int]:
        del random
        n = 0
        while True:
            yield round(n / self.rate_per_s * 1e9)
            n += 1


@dataclass(frozen=True)
class Bursts:
    """Arrivals in bursts: two Poisson rates that alternate (a Markov-modulated Poisson process). The lengths of bursts
    and of the times between bursts are exponentially distributed.
    """

    rate_per_s: float
    """Mean rate in requests per second, including the times between bursts."""
    burst_factor: float = 5.0
    """Rate during a burst, divided by the mean rate."""
    burst_share: float = 0.1
    """Share of the time that bursts take."""
    burst_ns: int = 5_000_000_000
    """Mean length of a burst."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0 or self.burst_ns <= 0 or not 0 < self.burst_share < 1 or self.burst_factor < 0:
            raise ValueError(
                f"bursts need rate > 0, burst > 0, 0 < burst_share < 1 and burst_factor >= 0, found {self}"
            )
        if self.burst_factor * self.burst_share > 1:
            raise ValueError(
                f"bursts of {self.burst_factor:g} times the rate in {self.burst_share:g} of the time exceed "
                f"the mean rate: burst_factor of at most {1 / self.burst_share:g}"
            )

    def times_ns(self, random: Random) -> Iterator[int]:
        burst_s = self.burst_ns / 1e9
        between_s = burst_s * (1 - self.burst_share) / self.burst_share
        between_factor = (1 - self.burst_factor * self.burst_share) / (1 - self.burst_share)
        phases = ((burst_s, self.burst_factor), (between_s, between_factor))
        which = 0 if random.random() < self.burst_share else 1
        begin_s = 0.0
        while True:
            mean_s, factor = phases[which]
            end_s = begin_s + random.expovariate(1 / mean_s)
            now_s = begin_s
            while factor and (now_s := now_s + random.expovariate(self.rate_per_s * factor)) < end_s:
                yield round(now_s * 1e9)
            begin_s, which = end_s, 1 - which


@dataclass(frozen=True)
class Profile:
    """Poisson arrivals whose rate follows a list of levels, such as load stages or the hours of a day. The list is
    repeated.
    """

    levels: tuple[float, ...]
    """Rates in requests per second, such as [1, 4, 2]. If rate_per_s is given, only the ratios of the levels count."""
    level_ns: int | tuple[int, ...]
    """Duration of each level: `1 h` for all levels, or one duration per level, [30 s, 10 s, 60 s]."""
    rate_per_s: float | None = None
    """Mean rate in requests per second. None: the mean of the levels."""
    smooth: bool = False
    """True: the rate changes linearly from one level to the next. False: the rate changes at once."""

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 0 or not sum(self.levels):
            raise ValueError(
                f"a profile needs levels, none below 0 and at least one above 0, found {list(self.levels)}"
            )
        if len(self._lengths_s) != len(self.levels):
            raise ValueError(f"a profile of {len(self.levels)} levels has {len(self._lengths_s)} durations of levels")
        if self.rate_per_s is None:
            object.__setattr__(self, "rate_per_s", self._mean_level)
        if self.rate_per_s <= 0 or min(self._lengths_s) <= 0:  # type: ignore[operator]  # it was None
            raise ValueError(f"a profile needs rate > 0 and level > 0, found {self}")

    def times_ns(self, random: Random) -> Iterator[int]:
        """Yields arrival times in ns. Each is the time at which the expected number of arrivals reaches the next event
        of a Poisson process of rate 1.
        """
        assert self.rate_per_s is not None
        scale = self.rate_per_s / self._mean_level
        expected, begin_s = random.expovariate(1.0), 0.0
        cycle_s = sum(self._lengths_s)
        while True:
            if (num_skipped := int(expected / (self.rate_per_s * cycle_s))) > 1:  # a low rate's cycles without arrivals
                expected -= (num_skipped - 1) * self.rate_per_s * cycle_s
                begin_s += (num_skipped - 1) * cycle_s
            for length_s, level, end in self._stages():
                area = (level + end) / 2 * scale * length_s
                growth = (end - level) * scale / length_s
                while expected < area:
                    yield round((begin_s + _reached(expected, level * scale, growth)) * 1e9)
                    expected += random.expovariate(1.0)
                expected -= area
                begin_s += length_s

    def _stages(self) -> Iterator[tuple[float, float, float]]:
        """Yields for each level: its duration in s, and the values of `levels` at its beginning and at its end."""
        ends = (*self.levels[1:], self.levels[0]) if self.smooth else self.levels
        return zip(self._lengths_s, self.levels, ends, strict=True)

    @property
    def _lengths_s(self) -> tuple[float, ...]:
        if isinstance(self.level_ns, int):
            return (self.level_ns / 1e9,) * len(self.levels)
        return tuple(level_ns / 1e9 for level_ns in self.level_ns)

    @property
    def _mean_level(self) -> float:
        return sum(length_s * (level + end) / 2 for length_s, level, end in self._stages()) / sum(self._lengths_s)


def _reached(area: float, rate: float, growth: float) -> float:
    """Returns the time in s until `area` requests are expected to have arrived, counted from a moment with the given
    rate. rate: requests per second at this moment. growth: change of the rate per second, in requests per s^2; may be
    0.
    """
    return area and 2 * area / (rate + sqrt(max(0.0, rate * rate + 2 * growth * area)))


@dataclass(frozen=True)
class OpenLoop:
    """Open loop: sends each request at its arrival time. A request that follows others is sent when the last of them
    has ended and a pause is over. Priming requests, which a trace with `lanes` has, are sent before all others. Arrival
    times then count from the end of the last priming request.
    """

    arrivals: Arrivals | None = None
    """Process of arrival times. None: the times in the trace. Generated workloads have no times, so all their requests
    are sent at once."""


@dataclass(frozen=True)
class ClosedLoop:
    """Closed loop: keeps a fixed number of sessions in flight. These sessions start together, or one after another over
    a ramp. Whenever a session ends, another starts.

    A request's latency starts when the request is sent, as in SGLang's client. Waiting in the client is not included.
    """

    concurrency: int
    """Number of sessions in flight. Requests that follow each other form one session; a single request is also a
    session."""
    warm_up_requests: int | None = None
    """Number of first requests that metrics and SLOs leave out, at most half of all requests. None: the concurrency,
    because these requests are sent at once and wait for each other. None also means 0 if the concurrency is 1, or if
    the load has less than twice the concurrency in requests.

    Defaults of other clients: AIPerf 0.13.0 warms up only with --warmup-request-count
    (config/flags/_converter_warmup.py), SGLang 0.5.23 with one request (benchmark/serving.py, --warmup-requests), vLLM
    0.33.0 with none (benchmarks/serve.py, --num-warmups). Each of these clients waits for the end of its warm-up, sends
    all first requests at once, and counts them."""
    duration_ns: int | None = None
    """Time after which no request is sent, counted from the first request. Priming requests, which a trace with `lanes`
    sends first to fill caches, come before this time. None: all requests are sent.
    """
    ramp_ns: int | None = None
    """Time in which the number of sessions in flight rises from 1 to the concurrency, in steps of 1. None: all sessions
    start together. This is AIPerf's --concurrency-ramp-duration (0.13.0, timing/phase/runner.py, and LinearStrategy of
    timing/ramping.py). Metrics include requests of the ramp, except warm-up requests."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"a closed loop needs concurrency >= 1, found {self.concurrency}")
        if self.warm_up_requests is not None and self.warm_up_requests < 0:
            raise ValueError(f"a closed loop needs warm_up_requests >= 0, found {self.warm_up_requests}")
        if self.duration_ns is not None and self.duration_ns <= 0:
            raise ValueError(f"a closed loop needs duration > 0, found {self.duration_ns} ns")
        if self.ramp_ns is not None and self.ramp_ns <= 0:
            raise ValueError(f"a closed loop needs ramp > 0, found {self.ramp_ns} ns")


Client = OpenLoop | ClosedLoop


def warm_up_requests(client: Client, num_requests: int, num_primes: int = 0) -> int:
    """Returns the number of first requests that metrics leave out: num_primes if above 0, otherwise the number of
    warm-up requests of a closed loop, or 0 for an open loop. num_primes: number of requests that a closed loop sends
    first to fill caches (priming requests). num_requests: number of all requests.
    """
    if num_primes or not isinstance(client, ClosedLoop):
        return num_primes
    if client.warm_up_requests is not None:
        return min(client.warm_up_requests, num_requests // 2)
    has_second_round = num_requests >= 2 * client.concurrency
    return client.concurrency if client.concurrency > 1 and has_second_round else 0


class Clock(Protocol):
    """A client's clock, in simulated or in real time."""

    @property
    def now_ns(self) -> int: ...

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> Any:
        """Calls the callback once, after delay_ns. The callback must ignore its argument."""


class ClientDriver:
    """Sends the requests of a workload as the scenario's client does, an open or a closed loop. A closed loop counts
    sessions, not single requests. timeline: the clock of the run. streams: random generators. send: called with each
    request when it is sent.
    """

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
        self._primes = [spec for spec in requests if spec.primes]
        self._priming = {spec.request_id for spec in self._primes}
        self._begin_ns = 0
        """Time in ns from which an open loop counts arrival times."""
        self._end_ns: int | None = None
        others = [spec for spec in requests if not spec.primes]
        if isinstance(client, ClosedLoop):
            sessions = sessions_of(others)
            self._sessions = iter(sessions)
            self._session_of = {spec.request_id: i for i, session in enumerate(sessions) for spec in session}
            self._num_unfinished = [len(session) for session in sessions]
        else:
            first = [spec for spec in others if not spec.after]
            self._times = None
            if client.arrivals is None:
                first.sort(key=lambda spec: spec.arrival_ns)
            else:
                self._times = client.arrivals.times_ns(streams.named("arrivals"))
            self._first = deque(first)

    def start(self) -> None:
        if self._primes or isinstance(self._client, ClosedLoop):
            self._timeline.after(0, lambda _: self._begin(self._primes) if self._primes else self._open())
        else:
            self._schedule_next()

    def on_end(self, request_id: int) -> None:
        if request_id in self._priming:
            self._priming.remove(request_id)
            if not self._priming:
                self._open()
            return
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
        self._timeline.after(spec.think_ns, lambda _: self._send_in_time(spec))

    def _send_in_time(self, spec: RequestSpec) -> None:
        if self._end_ns is None or self._timeline.now_ns < self._end_ns:
            self._send(spec)

    def _open(self) -> None:
        """Begins to send an open loop's requests, or begins the first sessions of a closed loop, as many as its
        concurrency: at once or, if ramp_ns is set, one after another within ramp_ns. Its duration_ns begins now.
        """
        client = self._client
        if isinstance(client, OpenLoop):
            self._begin_ns = self._timeline.now_ns
            self._schedule_next()
            return
        if client.duration_ns is not None:
            self._end_ns = self._timeline.now_ns + client.duration_ns
        if client.ramp_ns is None:
            for session in islice(self._sessions, client.concurrency):
                self._begin(session)
            return
        self._begin(next(self._sessions, ()))
        for i in range(1, client.concurrency):
            begin_ns = round(i * client.ramp_ns / (client.concurrency - 1))
            self._timeline.after(begin_ns, lambda _: self._begin(next(self._sessions, ())))

    def _begin(self, session: Iterable[RequestSpec]) -> None:
        for spec in session:
            if spec.think_ns and not spec.after:
                self._send_after_pause(spec)
            elif not spec.after:
                self._send_in_time(spec)

    def _schedule_next(self) -> None:
        if self._first:
            at_ns = self._first[0].arrival_ns if self._times is None else next(self._times)
            self._timeline.after(self._begin_ns + at_ns - self._timeline.now_ns, self._on_time)

    def _on_time(self, _: None) -> None:
        self._send(self._first.popleft())
        self._schedule_next()


def sessions_of(requests: Iterable[RequestSpec]) -> list[list[RequestSpec]]:
    """Groups requests into sessions, in the order of their first requests. A session consists of requests that wait for
    one another (RequestSpec.after), directly or through further requests, and of requests for which a trace records the
    same session. Any other request is a session of its own.
    """
    requests = list(requests)
    leaders = {spec.request_id: spec.request_id for spec in requests}

    def leader_of(request_id: int) -> int:
        while leaders[request_id] != request_id:
            leaders[request_id] = leaders[leaders[request_id]]
            request_id = leaders[request_id]
        return request_id

    recorded: dict[int, int] = {}
    for spec in requests:
        for earlier in spec.after:
            leaders[leader_of(spec.request_id)] = leader_of(earlier)
        if spec.session >= 0:
            leaders[leader_of(spec.request_id)] = leader_of(recorded.setdefault(spec.session, spec.request_id))
    sessions: dict[int, list[RequestSpec]] = {}
    for spec in requests:
        sessions.setdefault(leader_of(spec.request_id), []).append(spec)
    return list(sessions.values())
