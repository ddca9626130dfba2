"""Probes of a server, planned in rounds until a budget of requests is used up, and loads against which a fit is
tested.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from pdsim.calibration.observe.server_client import Completion, ServerClient
from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.stages import STAGES

SHORTEST_TOKENS = 32
STEPS_TIMED = 32
"""Number of decode steps that a probe times for each batch size."""
LONGEST_OUTPUT = 1024
"""Number of output tokens that the client requests for each stream. The client ends a stream as soon as enough steps
are timed.
"""
ROUND_TRIPS = 5
SETUP_REQUESTS = 4
"""Maximum number of completions that pdsim requests before the first probe, to learn the token counts of prompts and
the fields that the server refuses.
"""
LOAD_REQUESTS_PER_SLOT = 20
LOAD_SHARE = 0.25
"""Share of an observation's time, and maximum share of its requests, that probes leave to `loads`, which run last."""
LOAD_OUTPUT_TOKENS = (16, 64)


class Probe(NamedTuple):
    """One measurement of a server: requests that are sent together, or, for `prefix`, one after another. kind: kind of
    the measured rows, or `prefix` (rows of kind `ttft`). what: text on what the probe measures.
    """

    kind: str
    num_requests: int
    prompt_tokens: int
    """Number of tokens of each prompt. For `stall`: of the prompt that is sent while streams run."""
    output_tokens: int
    """Maximum number of output tokens of each request."""
    what: str


@dataclass(frozen=True)
class ObservationBudget:
    num_minutes: float = 10.0
    """Time in minutes after which no probe begins, and loads send no request. Requests in flight then end normally."""
    num_requests: int = 600
    """Maximum number of completions that are requested in total."""
    concurrency: int = 16
    """Maximum number of requests that are in flight at a time."""
    longest_prompt: int = 4096
    """Maximum length of a prompt in tokens."""


def one_round(budget: ObservationBudget) -> list[Probe]:
    """Returns one probe for each combination of kind and size. Probes that a fit needs most come first."""
    lengths = _lengths(budget.longest_prompt)
    batches = _powers(1, budget.concurrency, 2)
    contexts = _powers(SHORTEST_TOKENS * 2, budget.longest_prompt // 4, 4)
    probes = [Probe("ttft", 1, tokens, 2, "a single prompt: TTFT") for tokens in lengths]
    probes += [
        Probe("decode", batch, tokens, LONGEST_OUTPUT, f"ITL of equal streams over {STEPS_TIMED} steps")
        for tokens in contexts
        for batch in batches
    ]
    if budget.concurrency > 1:
        streams = min(2, budget.concurrency - 1)
        probes += [
            Probe("stall", 1 + streams, tokens, LONGEST_OUTPUT, "a prompt while streams run: how long the streams wait")
            for tokens in _every_other(lengths)
        ]
        probes += [
            Probe("burst", size, SHORTEST_TOKENS * 2, 2, "several prompts at once: the TTFT of the last")
            for size in sorted({max(2, budget.concurrency // 2), budget.concurrency})
        ]
    probes += [
        Probe("prefix", 3, tokens, 2, "a prompt again, with a new last quarter and with a new end: how much is cached?")
        for tokens in _every_other(lengths)
    ]
    return probes


def planned(budget: ObservationBudget) -> Iterator[Probe]:
    """Yields the probes to send, round by round, as long as the budget has requests for them. The requests of set-up
    and of the loads against which the fit is tested are kept back. A probe that needs more requests than are left is
    skipped.
    """
    left = budget.num_requests - SETUP_REQUESTS - sum(len(load.lengths) for load in loads(budget))
    for number in count():
        sent = 0
        for probe in one_round(budget):
            if probe.num_requests <= left:
                left -= probe.num_requests
                sent += 1
                yield probe
        if not sent or number > budget.num_requests:
            return


@dataclass(frozen=True)
class Load:
    """A load with a fixed number of requests in flight. Its prompts share no prefix."""

    name: str
    """Name of the load, such as c16 for 16 requests in flight."""
    concurrency: int
    """Number of requests in flight."""
    lengths: tuple[tuple[int, int], ...]
    """Number of prompt tokens and of output tokens of each request."""


def loads(budget: ObservationBudget) -> tuple[Load, ...]:
    """Two loads: one with half the maximum concurrency, and one with the maximum concurrency. Only the second if the
    maximum is 1. The budget limits their requests.
    """
    sizes = sorted({max(1, budget.concurrency // 2), budget.concurrency})
    return tuple(Load(f"c{size}", size, tuple(_drawn(size, budget))) for size in sizes)


def _drawn(size: int, budget: ObservationBudget) -> Iterator[tuple[int, int]]:
    rng = Random(size)
    for _ in range(min(LOAD_REQUESTS_PER_SLOT * size, int(budget.num_requests * LOAD_SHARE / 2))):
        ratio = budget.longest_prompt / 2 / SHORTEST_TOKENS
        yield round(SHORTEST_TOKENS * ratio ** rng.random()), rng.randint(*LOAD_OUTPUT_TOKENS)


def _lengths(longest: int) -> list[int]:
    """Prompt lengths up to the longest, two per doubling, because a fit counts closer lengths as one shape. None is a
    multiple of 64: kernels are fastest at multiples of 64 (experiments/sglang-llama), which users' prompts rarely have.
    """
    found, tokens = [], SHORTEST_TOKENS * 2**0.25
    while tokens <= longest:
        length = round(tokens)
        found.append(length if length % 64 else length - 1)
        tokens *= 2**0.5
    return found or [longest]


def _powers(first: int, last: int, factor: int) -> list[int]:
    """The numbers first, first x factor, first x factor^2, ... below `last`, and `last`."""
    found = [min(first, last)]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return sorted({*found, last})


def _every_other(lengths: list[int]) -> list[int]:
    """Every second length, beginning with the third shortest. Of fewer than three lengths: the longest."""
    return lengths[2::2] or lengths[-1:]


_SETTLE_S = 0.2
"""Time in s to wait between the end of a load and reading the server's metrics, because a server counts a request only
after it has sent the last token.
"""
Row = dict[str, float | str]

_CACHED = 0.7
"""If a server does not report cached tokens: a later prompt counts as cached if its TTFT is below this share of the
first prompt's TTFT.
"""
_WARM_STEPS = 8
"""Minimum number of events of a stream before another prompt is sent, which delays the stream."""


def round_trips(server: ServerClient) -> Iterator[Row]:
    for _ in range(ROUND_TRIPS):
        yield {"kind": "round_trip", "time_us": server.round_trip_ns() / 1e3}


def observe(server: ServerClient, probe: Probe) -> Iterator[Row]:
    """Sends the requests of one probe, and yields its rows. Yields none if streams that should overlap did not. Raises
    ServerError if a request fails.
    """
    yield from _PROBES[probe.kind](server, probe)


def _ttft(server: ServerClient, probe: Probe) -> Iterator[Row]:
    yield _prompt_row(server.complete(server.text(probe.prompt_tokens), probe.output_tokens))


def _prefix(server: ServerClient, probe: Probe) -> Iterator[Row]:
    """Sends three prompts one after another, and yields rows of kind `ttft` for the second and the third, which show
    how much of a prefix the server caches. The second prompt differs from the first in its last quarter, the third only
    in its last few tokens.
    """
    quarter, end = probe.prompt_tokens // 4, min(SHORTEST_TOKENS, probe.prompt_tokens // 8)
    head, middle = server.text(probe.prompt_tokens - quarter), server.text(quarter - end)
    first = server.complete(f"{head} {middle} {server.text(end)}", probe.output_tokens)
    for begin, num_new in ((head, quarter), (f"{head} {middle}", end)):
        again = server.complete(f"{begin} {server.text(num_new)}", probe.output_tokens)
        if again.cached_tokens is None and again.ttft_ns < _CACHED * first.ttft_ns:
            again.cached_tokens = again.prompt_tokens - num_new
        yield _prompt_row(again)


def _prompt_row(completion: Completion) -> Row:
    cached = completion.cached_tokens or 0
    sizes = {"new_tokens": completion.prompt_tokens - cached, "context_tokens": cached}
    return {"kind": "ttft", **sizes, "time_us": completion.ttft_ns / 1e3}


def _burst(server: ServerClient, probe: Probe) -> Iterator[Row]:
    done = _together(server, probe)
    last_ns = max(one.event_ns[0] for one in done) - min(one.sent_ns for one in done)
    new = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in done)
    yield {"kind": "burst", "prompts": len(done), "new_tokens": new, "time_us": last_ns / 1e3}


def _decode(server: ServerClient, probe: Probe) -> Iterator[Row]:
    """A row with the mean decode step while all streams of the probe decode. No row: they overlapped too briefly."""
    enough = Enough(probe.num_requests, STEPS_TIMED)
    done = _together(server, probe, enough)
    begin_ns = max(one.event_ns[0] for one in done)
    end_ns = min(one.event_ns[-1] for one in done)
    times_ns = [[at for at in one.event_ns if begin_ns <= at <= end_ns] for one in done]
    counted = [(one, times) for one, times in zip(done, times_ns, strict=True) if len(times) > STEPS_TIMED // 2]
    if len(counted) < len(done):
        return
    step_ns = fmean((times[-1] - times[0]) / ((len(times) - 1) * one.tokens_per_event) for one, times in counted)
    context = sum(one.prompt_tokens + _tokens_before(one, (begin_ns + end_ns) / 2) for one in done)
    yield {"kind": "decode", "batch": len(done), "context_tokens": round(context), "time_us": step_ns / 1e3}


def _tokens_before(completion: Completion, time_ns: float) -> float:
    return sum(at <= time_ns for at in completion.event_ns) * completion.tokens_per_event


class Enough:
    """Callback for the events of several streamed completions at once (OnEvent). Counts events from the time when every
    completion has its first event. When each completion has more than num_events counted events, ends all.
    """

    def __init__(self, num_streams: int, num_events: int) -> None:
        self._lock = threading.Lock()
        self._waiting = num_streams
        self._num_streams = num_streams
        self._num_events = num_events
        self._seen: dict[int, int] = {}
        self._is_over = False

    def __call__(self, completion: Completion) -> bool:
        with self._lock:
            key = id(completion)
            if len(completion.event_ns) == 1:
                self._waiting -= 1
            if self._waiting <= 0:
                self._seen[key] = self._seen.get(key, 0) + 1
                ready = sum(seen > self._num_events for seen in self._seen.values())
                self._is_over = self._is_over or ready >= self._num_streams
            return not self._is_over


def _together(
    server: ServerClient, probe: Probe, on_event: Callable[[Completion], bool] | None = None
) -> list[Completion]:
    """Sends prompts of equal length at once, one thread each, and returns the completions. on_event: called with a
    completion at each of its events; returns False to end it (OnEvent). If a completion fails, raises its error,
    and not the errors of completions that waited for the failed one's connection.
    """
    prompts = [server.text(probe.prompt_tokens) for _ in range(probe.num_requests)]
    barrier = threading.Barrier(len(prompts))

    def one(prompt: str) -> Completion:
        try:
            return server.complete(prompt, probe.output_tokens, ready=barrier.wait, on_event=on_event)
        except BaseException:  # whatever it is, the others must not wait for this one
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(prompts)) as pool:
        sent = [pool.submit(one, prompt) for prompt in prompts]
        failures = [wrong for future in sent if (wrong := future.exception()) is not None]
    for wrong in failures:
        if not isinstance(wrong, threading.BrokenBarrierError):
            raise wrong
    return [future.result() for future in sent]


def _stall(server: ServerClient, probe: Probe) -> Iterator[Row]:
    """A row with the time for which a prompt makes running streams wait, as the mean over the streams: the time from a
    stream's last event before the prompt was sent to its first event after the prompt's first token, less the usual
    length of as many gaps between events. No row: no stream ran before and after the prompt.
    """
    over = threading.Event()
    warm = [threading.Event() for _ in range(probe.num_requests - 1)]

    def stream(is_warm: threading.Event) -> Completion:
        num_after = 0

        def on_event(completion: Completion) -> bool:
            nonlocal num_after
            if len(completion.event_ns) > _WARM_STEPS:
                is_warm.set()
            num_after += over.is_set()
            return num_after <= 1

        try:
            return server.complete(server.text(64), probe.output_tokens, on_event=on_event)
        finally:
            is_warm.set()

    with ThreadPoolExecutor(len(warm)) as pool:
        streams = [pool.submit(stream, is_warm) for is_warm in warm]
        try:
            for is_warm in warm:
                is_warm.wait()
            disturbing = server.complete(server.text(probe.prompt_tokens), 2)
        finally:
            over.set()
        waits_ns = [wait for one in streams if (wait := _waited_ns(one.result(), disturbing)) is not None]
    if waits_ns:
        new = disturbing.prompt_tokens - (disturbing.cached_tokens or 0)
        yield {"kind": "stall", "new_tokens": new, "time_us": max(1.0, fmean(waits_ns) / 1e3)}


def _waited_ns(stream: Completion, disturbing: Completion) -> float | None:
    """By how much in ns a prompt (`disturbing`) made a stream wait. None: the stream had ended, or had hardly begun."""
    before = [at for at in stream.event_ns if at <= disturbing.sent_ns]
    after = [at for at in stream.event_ns if at > disturbing.sent_ns]
    num_during = sum(at <= disturbing.event_ns[0] for at in after)
    if len(before) < _WARM_STEPS or len(after) <= num_during + 1:
        return None
    usual_ns = (before[-1] - before[1]) / (len(before) - 2)
    return after[num_during] - before[-1] - (num_during + 1) * usual_ns


_PROBES: dict[str, Callable[[ServerClient, Probe], Iterator[Row]]] = {
    "ttft": _ttft,
    "prefix": _prefix,
    "burst": _burst,
    "decode": _decode,
    "stall": _stall,
}


def play(server: ServerClient, load: Load, end_s: float) -> dict[str, Any]:
    """Sends a load to a server, with a fixed number of requests in flight. Returns the run as JSON: for each request
    its numbers of tokens and its times in s since the first request was sent; and mean times of stages, if the server
    reports them. Sends no request after `end_s`, in s of the monotonic clock; if none was sent, the run has no request
    and no stage. Raises ServerError if a request fails.
    """
    before = totals(server.metrics())
    lengths, lock = list(load.lengths), threading.Lock()
    done: list[Completion] = []

    def client() -> None:
        while True:
            with lock:
                if not lengths or time.monotonic() > end_s:
                    return
                prompt_tokens, output_tokens = lengths.pop(0)
            completion = server.complete(server.text(prompt_tokens), output_tokens)
            with lock:
                done.append(completion)

    with ThreadPoolExecutor(load.concurrency) as pool:
        try:
            for worker in [pool.submit(client) for _ in range(load.concurrency)]:
                worker.result()
        finally:
            lengths.clear()  # the others send no more, also where this is interrupted
    stages = {}
    if before and done:
        time.sleep(_SETTLE_S)
        stages = mean_stages_ms(before, totals(server.metrics()), len(done))
    return {"name": load.name, "concurrency": load.concurrency, "stages": stages, "requests": _requests(done)}


def _requests(done: Sequence[Completion]) -> list[dict[str, Any]]:
    ordered = sorted(done, key=lambda one: one.sent_ns)
    start_ns = ordered[0].sent_ns if ordered else 0
    return [
        {
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens or 0,
            "output_tokens": one.output_tokens,
            "sent_s": (one.sent_ns - start_ns) / 1e9,
            "event_s": [round((at - start_ns) / 1e9, 6) for at in one.event_ns],
        }
        for one in ordered
    ]


# Stages of a load's requests, in the histograms of SGLang's and vLLM's metrics: their growth while the load ran.

_SAMPLE = re.compile(r"^\w+:(\w+)_seconds_(sum|count)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_STAGE = re.compile(r'(?:^|,)stage="(\w+)"')
_NAMES = {
    "time_to_first_token": "server_ttft",
    "e2e_request_latency": "server_e2e_latency",
    "queue_time": "prefill_waiting",
    "request_queue_time": "prefill_waiting",
    "request_prefill_time": "prefill_forward",
    "request_decode_time": "decode_forward",
}
"""Histograms among the metrics of SGLang and vLLM, with the stage that each of them measures."""

Totals = Mapping[tuple[str, str], float]
"""Totals of each stage: (stage, "sum") is the sum of its times in s, (stage, "count") the number of requests."""


def totals(metrics: str) -> Totals:
    """Reads the totals of stages from a server's metrics (Prometheus text), summed over all its instances."""
    found: dict[tuple[str, str], float] = {}
    for name, part, labels, value in _SAMPLE.findall(metrics):
        match = _STAGE.search(labels) if name == "per_stage_req_latency" else None
        stage = match[1] if match and match[1] in STAGES else _NAMES.get(name)
        if stage is not None:
            found[stage, part] = found.get((stage, part), 0.0) + float(value)
    return found


def mean_stages_ms(before: Totals, after: Totals, num_requests: int) -> dict[str, float]:
    """Mean time in ms of each stage between two readings of the server's metrics, as fields of a summary. num_requests:
    number of requests that were sent between the readings. A stage that counted another number of requests is left
    out, because its sum may include requests of other clients.
    """

    def growth(stage: str, part: str) -> float:
        return after.get((stage, part), 0.0) - before.get((stage, part), 0.0)

    stages = dict.fromkeys(stage for stage, _ in after)
    seconds = {stage: growth(stage, "sum") for stage in stages if growth(stage, "count") == num_requests}
    if seconds.keys() >= {"server_ttft", "server_e2e_latency"}:
        seconds.setdefault("decode_forward", seconds["server_e2e_latency"] - seconds["server_ttft"])
    return {f"mean_{stage}_ms": 1e3 * total / num_requests for stage, total in seconds.items()}
