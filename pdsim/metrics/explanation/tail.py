"""The slowest requests of a run, grouped by the reason why they were slower than the median request."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from pdsim.dataclass import dataclass
from pdsim.metrics.distribution import Samples
from pdsim.metrics.explanation.explain import PARTS, CriticalPaths, blocked
from pdsim.metrics.explanation.stages import stage_spans
from pdsim.metrics.records import Records, RequestRecord, StepRecord
from pdsim.metrics.summary import TailMetric, e2e_ms, tpot_ms, ttft_ms

METRICS: dict[TailMetric, Callable[[RequestRecord], float]] = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}
"""Metrics by which requests are ranked, each with a function that gives a request's value in ms."""

_DECODING = ("decode compute", "decode wait")
_PARTS: dict[TailMetric, tuple[str, ...]] = {
    "ttft": tuple(part for part in PARTS if part not in _DECODING),
    "tpot": _DECODING,
    "e2e": tuple(PARTS),
}
"""Parts of a critical path whose times add up to the metric."""
_ON_PREFILL = ("prefill queue", "compile", "prefill compute")
_ON_DECODE = ("admission wait", "merge wait", *_DECODING)
_ON_LINK = ("transfer queue", "ring wait", "transfer set-up", "transfer line", "descriptors", "transfer")
_MOST = 0.9
"""A group's time window is the shortest that holds this share of the group's requests."""


class Cause(NamedTuple):
    """Why a request was slow: the part of its critical path that took longer than usual, and the scarce resource."""

    text: str
    """Description of the cause, for users."""
    part: str
    """Part of the critical path, a key of PARTS."""
    resource: str = ""
    """Name of the scarce resource, a key of RELIEF or AGGREGATED_RELIEF in relief.py. Empty: none was scarce."""


@dataclass(frozen=True)
class TailGroup:
    """The slowest requests that have one cause."""

    cause: str
    """Description of the cause, for users."""
    part: str
    """Part of the critical path, a key of PARTS. In each request of the group, this part exceeds its median over all
    finished requests by more than the metric's other parts do.
    """
    resource: str
    """Name of the scarce resource. Empty: no resource was scarce."""
    num_requests: int
    share: float
    """Share of the slowest requests that belong to the group."""
    median_ms: float
    """Median time of the group's requests in `part`: in ms; for TPOT, in ms per output token after the first."""
    all_median_ms: float
    """Median time in `part` over all finished requests for which the metric is defined, in the unit of median_ms."""
    instances: dict[str, int]
    """Number of the group's requests by the instance on which `part` happens, the largest number first. If `part` is of
    the transfer: by pair, such as "prefill-0 -> decode-1". Empty: `part` happens on no prefill or decode instance.
    """
    first_s: float
    """Begin in s of the shortest time window in which 90 % of the group's requests arrived."""
    last_s: float
    """End in s of the time window that begins at first_s."""
    window_share: float
    """Length of the time window from first_s to last_s, as a share of the time in which all finished requests arrived.
    1: they arrived at once.
    """
    load: float | None
    """Arrival rate at one instance while its queue grew, relative to the instance's mean arrival rate. The instance is
    the first of `instances` (of a pair: the prefill instance); if `instances` is empty, the whole cluster counts. None:
    all requests at the instance arrived at once, or the queue had no time to grow.
    """
    tokens: float | None
    """Median number of tokens of the group's requests, if the cause is a long prompt (tokens that prefill computed) or
    a long output (output tokens). None: any other cause.
    """
    all_tokens: float | None
    """Median number of the same kind of tokens over all finished requests for which the metric is defined. None:
    `tokens` is None.
    """
    example: int
    """Id of the slowest request in the group."""


@dataclass(frozen=True)
class Tail:
    """The slowest requests of a run by one metric, grouped by cause. The largest group comes first."""

    metric: TailMetric
    percent: float
    """Share of the finished requests, in %, that counts as slowest."""
    num_requests: int
    """Number of requests that count as slowest."""
    num_all: int
    """Number of finished requests for which the metric is defined."""
    from_ms: float
    """Smallest value of the metric in ms among the slowest requests."""
    median_ms: float
    """Median of the metric in ms over all finished requests for which the metric is defined."""
    is_aggregated: bool
    """True: for every finished request, one instance computed the prompt and decoded. False also without requests."""
    groups: list[TailGroup]


def tail(records: Records, metric: TailMetric = "ttft", *, percent: float = 1.0) -> Tail:
    """Groups the slowest `percent` of the finished requests, at least one request, by cause. Raises ValueError for an
    unknown metric, or if `percent` is not above 0 and at most 100.

    The cause is the part of a request's critical path that exceeds the median of all requests by most. If the run did
    not record the instances' queues and pools, waiting for admission counts as part of `handshake`.
    """
    if metric not in METRICS or not 0 < percent <= 100:  # noqa: PLR2004
        raise ValueError(f"tail({metric!r}, percent={percent:g}): a metric of {', '.join(METRICS)}, and above 0 to 100")
    value = METRICS[metric]
    done = [r for r in records.requests if r.outcome == "finished" and (metric != "tpot" or r.num_output_tokens > 1)]
    if not done:
        return Tail(metric, percent, 0, 0, 0.0, 0.0, is_aggregated=False, groups=[])
    done.sort(key=lambda r: (value(r), r.request_id))
    causes = _Causes(records, done, metric)
    groups: dict[Cause, list[RequestRecord]] = defaultdict(list)
    slowest = done[-max(1, int(len(done) * percent / 100)) :]
    for request in slowest:
        groups[causes.cause(request)].append(request)
    return Tail(
        metric,
        percent,
        len(slowest),
        len(done),
        value(slowest[0]),
        Samples(map(value, done)).percentile(50),
        all(request.is_aggregated for request in done),
        [causes.group(*item, len(slowest)) for item in sorted(groups.items(), key=lambda item: -len(item[1]))],
    )


class _Causes:
    """Finds out why requests are slower than the median request by `metric`. done: all finished requests for which the
    metric is defined.
    """

    def __init__(self, records: Records, done: Sequence[RequestRecord], metric: TailMetric) -> None:
        self._done = done
        self._metric: TailMetric = metric
        paths = CriticalPaths(records)
        self._parts = {r.request_id: part_times_ms(paths, r, metric) for r in done}
        self._median_ms = {
            part: Samples(times.get(part, 0.0) for times in self._parts.values()).percentile(50)
            for part in _PARTS[metric]
        }
        self._output_tokens = _median(r.num_output_tokens for r in done)
        self._computed_tokens = _median(map(_computed_tokens, done))
        self._tpot_ms = _median(tpot_ms(r) for r in done if r.num_output_tokens > 1)
        self._lacks = {kind: blocked(records, kind) for kind in ("pages", "slots")}
        self._forwards: dict[str, list[StepRecord]] = defaultdict(list)
        for step in records.steps:
            if step.kind == "prefill":
                self._forwards[step.instance_id].append(step)
        self._arrivals: dict[str, list[int]] = defaultdict(list)
        for request in sorted(done, key=lambda r: r.arrival_ns):
            for name in {request.prefill_id, request.decode_id, ""}:
                self._arrivals[name].append(request.arrival_ns)

    def cause(self, request: RequestRecord) -> Cause:
        times = self._parts[request.request_id]
        part = max(
            _PARTS[self._metric],
            key=lambda part: (times.get(part, 0.0) - self._median_ms[part], times.get(part, 0.0)),
        )
        role = "aggregated" if request.is_aggregated else "decode" if part in _ON_DECODE else "prefill"
        match part:
            case "admission wait" | "prefill queue":
                return self._queued(request, part, role)
            case "prefill compute":
                own = 2 * _computed_tokens(request) >= self._forward_tokens(request)
                text = "its own prompt" if own else "computed together with other prompts"
                return Cause(text, part, "prefill compute")
            case "decode compute" | "decode wait" if request.num_retractions:
                return Cause("retracted: lost its KV pages while decoding", part, f"{role} KV")
            case "decode wait" if request.is_aggregated:
                return Cause("decode steps wait for prompts of others", part, "prefill compute")
            case "decode compute":
                longer = request.num_output_tokens / self._output_tokens
                own = self._metric == "e2e" and longer * self._tpot_ms >= tpot_ms(request)
                return Cause("its own output" if own else "slow decode steps", part, "decode steps")
            case "front end" if request.num_retries:
                return Cause("failed attempts before this one", part)
        text, resource = _OTHER[part]
        return Cause(text, part, resource)

    def _queued(self, request: RequestRecord, part: str, role: str) -> Cause:
        """The cause of a long wait in a queue: other requests were computed, or pages or slots were missing. part: the
        part of the critical path. role: role of the instance, for the text of the cause.
        """
        instance_id = request.prefill_id if part == "prefill queue" else request.decode_id
        stage = "prefill_waiting" if part == "prefill queue" else "decode_bootstrap"
        begin_ns, end_ns = stage_spans(request)[stage]
        lacked = {kind: lacks[instance_id].between(begin_ns, end_ns) for kind, lacks in self._lacks.items()}
        kind = max(lacked, key=lambda kind: lacked[kind])
        if part == "prefill queue" and 2 * lacked[kind] <= end_ns - begin_ns:
            return Cause("queued for prefill behind others", part, "prefill compute")
        if kind == "pages":
            wait = "waited for a grant" if role == "decode" else "waited for pages"
            return Cause(f"{role} pool full: {wait}", part, f"{role} KV")
        return Cause(f"no {role} slot: max_running_requests reached", part, f"{role} slots")

    def _forward_tokens(self, request: RequestRecord) -> int:
        """Number of tokens, of all requests, in the forwards that began while prefill computed this request."""
        begin_ns, end_ns = request.prefill_start_ns or 0, request.prefill_end_ns or 0
        forwards = self._forwards[request.prefill_id]
        start = bisect_left(forwards, begin_ns, key=lambda step: step.start_ns)
        end = bisect_left(forwards, end_ns, key=lambda step: step.start_ns)
        return sum(forward.num_tokens for forward in forwards[start:end])

    def group(self, cause: Cause, requests: Sequence[RequestRecord], num_tail: int) -> TailGroup:
        """Describes the slow requests that have one cause. requests: the slow requests with this cause, sorted by the
        metric, the slowest last. num_tail: number of slow requests with any cause.
        """
        places = Counter(_place(request, cause.part) for request in requests)
        instances = dict(sorted(places.items(), key=lambda item: (-item[1], item[0])))
        first_ns, last_ns = _window([r.arrival_ns for r in requests])
        everybody = self._arrivals[""]
        span_ns = everybody[-1] - everybody[0]
        tokens: Mapping[str, tuple[float, float]] = {
            "its own prompt": (_median(map(_computed_tokens, requests)), self._computed_tokens),
            "its own output": (_median(r.num_output_tokens for r in requests), self._output_tokens),
        }
        own, all_ = tokens.get(cause.text, (None, None))
        return TailGroup(
            cause=cause.text,
            part=cause.part,
            resource=cause.resource,
            num_requests=len(requests),
            share=len(requests) / num_tail,
            median_ms=_median(self._parts[r.request_id].get(cause.part, 0.0) for r in requests),
            all_median_ms=self._median_ms[cause.part],
            instances={name: count for name, count in instances.items() if name},
            first_s=first_ns / 1e9,
            last_s=last_ns / 1e9,
            window_share=(last_ns - first_ns) / span_ns if span_ns else 1.0,
            load=self._load(next(iter(instances)), requests, cause.part, first_ns, last_ns),
            tokens=own,
            all_tokens=all_,
            example=requests[-1].request_id,
        )

    def _load(
        self, place: str, requests: Sequence[RequestRecord], part: str, first_ns: int, last_ns: int
    ) -> float | None:
        """Arrival rate at an instance while its queue grew, relative to the instance's mean rate. None: all requests at
        the instance arrived at once, or the queue had no time to grow. place: the instance, or a pair whose first
        instance counts; empty: the whole cluster. requests: the group's requests. part: their slow part of the critical
        path.

        first_ns, last_ns: the time window of the group's arrivals. The queue grows until last_ns. It begins to grow
        before first_ns, by the median time that the requests spent in the part, but not before the first arrival.
        """
        arrivals = self._arrivals[place.partition(" ")[0]]
        waited_ms = _median(
            self._parts[r.request_id].get(part, 0.0) * (r.num_output_tokens - 1 if self._metric == "tpot" else 1)
            for r in requests
        )
        begin_ns = max(arrivals[0], first_ns - round(waited_ms * 1e6))
        span_ns, built_ns = arrivals[-1] - arrivals[0], last_ns - begin_ns
        if not span_ns or not built_ns:
            return None
        count = bisect_right(arrivals, last_ns) - bisect_left(arrivals, begin_ns)
        return count / len(arrivals) * span_ns / built_ns


_OTHER: dict[str, tuple[str, str]] = {
    "front end": ("front end", ""),
    "handshake": ("messages between router and instances", "messages"),
    "encode queue": ("queued for encoding behind others", "encoding"),
    "encode": ("encoding of its images or audio", "encoding"),
    "embedding transfer": ("transfer of its embeddings", "embedding link"),
    "compile": ("compiling on a cold server", ""),
    "transfer queue": ("KV queued behind earlier transfers", "link"),
    "ring wait": ("staging ring full", "staging ring"),
    "transfer set-up": ("set-up of its transfer", "transfer set-up"),
    "transfer line": ("transfer engine busy with other transfers", "transfer set-up"),
    "descriptors": ("posting of descriptors", "descriptor cost"),
    "transfer": ("transfer over the link", "link"),
    "merge wait": ("waited for decode to merge it", "decode steps"),
    "response": ("response through the front end", ""),
    "decode wait": ("decode loop paused between steps", ""),
}
"""Text and scarce resource by part of a critical path, for requests to which no case in _Causes.cause applies."""


def part_times_ms(paths: CriticalPaths, request: RequestRecord, metric: TailMetric) -> dict[str, float]:
    """Times in ms of the parts of a request's critical path that add up to the metric. For TPOT: per output token after
    the first.
    """
    divisor = 1e6 * (request.num_output_tokens - 1 if metric == "tpot" else 1)
    return {part: ns / divisor for part, ns in paths.of(request).items() if part in _PARTS[metric]}


def _place(request: RequestRecord, part: str) -> str:
    if part in _ON_LINK:
        return f"{request.prefill_id} -> {request.decode_id}"
    return request.prefill_id if part in _ON_PREFILL else request.decode_id if part in _ON_DECODE else ""


def _computed_tokens(request: RequestRecord) -> int:
    return request.num_prompt_tokens - request.num_prefill_cached_tokens


def _median(values: Iterable[float]) -> float:
    return Samples(values).percentile(50)


def _window(arrivals_ns: Sequence[int]) -> tuple[int, int]:
    """Begin and end in ns of the shortest time window that holds the share _MOST of the arrivals."""
    ordered = sorted(arrivals_ns)
    most = ceil(_MOST * len(ordered))
    spans = [(ordered[i], ordered[i + most - 1]) for i in range(len(ordered) - most + 1)]
    return min(spans, key=lambda span: (span[1] - span[0], span[0]))
