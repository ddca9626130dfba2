"""Stages of requests and their times, and critical paths, which are finer: what each request waited for."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord, RunRecords, TransferRecord
from pdsim.metrics.summary import ttft_ms

STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": ("arrival_ns", "routed_ns", "front end, failed attempts"),
    "decode_bootstrap": ("routed_ns", "admitted_ns", "waits for decode memory"),
    "prefill_waiting": ("admitted_ns", "prefill_start_ns", "waits for prefill"),
    "prefill_forward": ("prefill_start_ns", "prefill_end_ns", "prefill computes it"),
    "prefill_transfer_kv_cache": ("prefill_end_ns", "transfer_end_ns", "rest of its KV is sent"),
    "decode_transferred": ("transfer_end_ns", "streamed_ns", "waits to join the batch"),
    "response": ("streamed_ns", "first_token_ns", "gateway, first token"),
    "decode_forward": ("first_token_ns", "end_ns", "decodes"),
}
"""Stages by SGLang's names: from, to, and what happens. They follow each other without a gap."""

_WAITING = ("routed_ns", "prefill_start_ns", STAGES["prefill_waiting"][2])

COMPUTED_FIRST_STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": _WAITING,
    "prefill_forward": STAGES["prefill_forward"],
    "decode_bootstrap": ("prefill_end_ns", "admitted_ns", STAGES["decode_bootstrap"][2]),
    "prefill_transfer_kv_cache": ("admitted_ns", "transfer_end_ns", STAGES["prefill_transfer_kv_cache"][2]),
    "decode_transferred": STAGES["decode_transferred"],
    "response": STAGES["response"],
    "decode_forward": STAGES["decode_forward"],
}
"""Stages of a request that was computed before decode granted it pages."""

HIDDEN_BOOTSTRAP_STAGES = {
    **{stage: way for stage, way in STAGES.items() if stage != "decode_bootstrap"},
    "prefill_waiting": _WAITING,
}
"""Stages of a request that got its pages while prefill computed it, so that it did not wait for the grant."""

AGGREGATED_STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": _WAITING,
    "prefill_forward": ("prefill_start_ns", "streamed_ns", STAGES["prefill_forward"][2]),
    "response": STAGES["response"],
    "decode_forward": STAGES["decode_forward"],
}
"""Stages of a request that one instance prefills and decodes."""

_TABLES = (STAGES, COMPUTED_FIRST_STAGES, HIDDEN_BOOTSTRAP_STAGES, AGGREGATED_STAGES)


@dataclass(frozen=True)
class StageTimes:
    """A stage over all finished requests, in ms; `share` is of the mean latency."""

    stage: str
    meaning: str
    mean_ms: float
    median_ms: float
    slowest_ms: float
    """Mean of the 1 % of the requests, one at least, that waited longest for their first token."""
    share: float


def stages_of(request: RequestRecord) -> dict[str, tuple[str, str, str]]:
    if request.is_aggregated:
        return AGGREGATED_STAGES
    granted_ns, start_ns, end_ns = request.admitted_ns or 0, request.prefill_start_ns or 0, request.prefill_end_ns or 0
    if granted_ns <= start_ns:
        return STAGES
    return COMPUTED_FIRST_STAGES if granted_ns > end_ns else HIDDEN_BOOTSTRAP_STAGES


def stage_spans(request: RequestRecord) -> dict[str, tuple[int, int]]:
    """Begin and end of each stage of a finished request, in ns."""
    stages = stages_of(request).items()
    return {stage: (getattr(request, first), getattr(request, last)) for stage, (first, last, _) in stages}


def stage_ms(request: RequestRecord) -> dict[str, float]:
    """Time of each stage of a finished request."""
    return {stage: (end_ns - begin_ns) / 1e6 for stage, (begin_ns, end_ns) in stage_spans(request).items()}


def stage_times(requests: Iterable[RequestRecord]) -> list[StageTimes]:
    """Stage times of one cluster's requests: all are disaggregated or all aggregated."""
    by_ttft = sorted((r for r in requests if r.outcome == "finished"), key=ttft_ms)
    slowest = [stage_ms(r) for r in by_ttft[-max(1, len(by_ttft) // 100) :]]
    times = _samples_by_stage(by_ttft)
    means = mean_stage_ms(by_ttft)
    total = sum(means.values()) or 1.0
    return [
        StageTimes(
            stage,
            STAGES[stage][2],
            means[stage],
            samples.percentile(50),
            Samples(row.get(stage, 0.0) for row in slowest).mean(),
            means[stage] / total,
        )
        for stage, samples in times.items()
    ]


def mean_stage_ms(requests: Iterable[RequestRecord]) -> dict[str, float]:
    """The means of stage_times alone, by sums of moments."""
    finished = [r for r in requests if r.outcome == "finished"]
    groups = _groups(finished)
    total_ns = {stage: 0 for stage in STAGES if any(stage in table for table, _ in groups)}
    for table, group in groups:
        moments = {moment for first, last, _ in table.values() for moment in (first, last)}
        sums_ns = {moment: sum(map(attrgetter(moment), group)) for moment in moments}
        for stage, (first, last, _) in table.items():
            total_ns[stage] += sums_ns[last] - sums_ns[first]
    return {stage: ns / 1e6 / max(1, len(finished)) for stage, ns in total_ns.items()}


def _samples_by_stage(requests: Sequence[RequestRecord]) -> dict[str, Samples]:
    """Times of each stage that a request of these has; 0 for requests without the stage."""
    groups = _groups(requests)
    found: dict[str, list[float]] = {stage: [] for stage in STAGES if any(stage in table for table, _ in groups)}
    for table, group in groups:
        for stage, (first, last, _) in table.items():
            moments = zip(map(attrgetter(first), group), map(attrgetter(last), group), strict=True)
            found[stage] += [(end - begin) / 1e6 for begin, end in moments]
    return {stage: Samples(ms + [0.0] * (len(requests) - len(ms))) for stage, ms in found.items()}


def _groups(requests: Sequence[RequestRecord]) -> list[tuple[dict[str, tuple[str, str, str]], list[RequestRecord]]]:
    """Requests by their stages."""
    of_each = list(map(stages_of, requests))
    tables = [table for table in _TABLES if any(one is table for one in of_each)] or [STAGES]
    return [
        (table, [request for request, one in zip(requests, of_each, strict=True) if one is table]) for table in tables
    ]


PARTS = {
    "front end": "front end, failed attempts",
    "handshake": "messages between router, decode and prefill, with nothing missing",
    "admission wait": "the head of decode's queue lacks a slot or pages",
    "prefill queue": "prefill computes or is full, and it is not its turn",
    "prefill compute": "a forward runs on prefill while it is computed",
    "transfer queue": "its KV waits for a transfer worker",
    "ring wait": "its KV waits for room in the staging ring",
    "transfer set-up": "the engine's time for a batch, and the gather of what is staged",
    "transfer line": "behind other transfers of an engine that serves one at a time",
    "descriptors": "descriptors are posted",
    "transfer": "bytes move that nothing holds up but links",
    "merge wait": "decode has not noticed, scattered and merged it",
    "response": "the first token passes the gateway",
    "decode compute": "a step runs on decode",
    "decode wait": "between decode steps: retracted, prompts of others, host work",
}
"""Parts of a request's time in their order, with what happens in each."""


class CriticalPaths:
    """Critical paths of one run's finished requests. Without levels, waiting for admission counts as handshake."""

    def __init__(self, records: RunRecords) -> None:
        self._computing = _busy(records, "prefill")
        self._decoding = _busy(records, "decode")
        self._blocked = blocked(records)
        self._last_units = {unit.request_id: unit for unit in records.transfers if unit.is_last}

    def of(self, request: RequestRecord) -> dict[str, int]:
        """Nanoseconds by part, of a finished request; what takes no time is left out."""
        parts = dict.fromkeys(PARTS, 0)
        for stage, (begin_ns, end_ns) in stage_spans(request).items():
            for part, duration_ns in self._split(stage, request, begin_ns, end_ns).items():
                parts[part] += duration_ns
        return {part: duration_ns for part, duration_ns in parts.items() if duration_ns}

    def _split(self, stage: str, request: RequestRecord, begin_ns: int, end_ns: int) -> dict[str, int]:
        whole = end_ns - begin_ns
        prefill, decode = request.prefill_id, request.decode_id
        match stage:
            case "decode_bootstrap":
                blocked = self._blocked[decode].within(begin_ns, end_ns)
                return {"admission wait": blocked, "handshake": whole - blocked}
            case "prefill_waiting":
                queued = self._computing[prefill].or_within(self._blocked[prefill], begin_ns, end_ns)
                return {"prefill queue": queued, "handshake": whole - queued}
            case "prefill_forward":
                computed = self._computing[prefill].within(begin_ns, end_ns)
                return {"prefill compute": computed, "prefill queue": whole - computed}
            case "prefill_transfer_kv_cache":
                return _transfer(self._last_units.get(request.request_id), begin_ns, end_ns)
            case "decode_forward":
                decoded = self._decoding[decode].within(begin_ns, end_ns)
                return {"decode compute": decoded, "decode wait": whole - decoded}
        return {{"front_end": "front end", "decode_transferred": "merge wait"}.get(stage, stage): whole}


def mean_parts_ms(records: RunRecords) -> dict[str, float]:
    """Means over finished requests, in the order of PARTS; parts that no request has are left out."""
    paths = CriticalPaths(records)
    done = [request for request in records.requests if request.outcome == "finished"]
    sums: dict[str, int] = defaultdict(int)
    for request in done:
        for part, duration_ns in paths.of(request).items():
            sums[part] += duration_ns
    return {part: sums[part] / 1e6 / len(done) for part in PARTS if sums[part]}


def _transfer(unit: TransferRecord | None, begin_ns: int, end_ns: int) -> dict[str, int]:
    """Parts of the last unit's transfer between two times. Before it was planned, it waited for a worker, too."""
    if unit is None:
        return {"transfer": end_ns - begin_ns}
    moments = [unit.start_ns]
    for duration_ns in (unit.setup_ns, unit.line_ns, unit.posting_ns):
        moments.append(moments[-1] + duration_ns)
    parts = ("transfer set-up", "transfer line", "descriptors", "transfer")
    waits = "ring wait" if unit.needs == "ring" else "transfer queue"
    cuts = [begin_ns, *(min(max(moment, begin_ns), end_ns) for moment in (unit.queued_ns, *moments)), end_ns]
    split: dict[str, int] = defaultdict(int)
    for part, (start, end) in zip(("transfer queue", waits, *parts), pairwise(cuts), strict=True):
        split[part] += end - start
    return split


class TimeSpans:
    """Non-overlapping spans of time, and the time of them between two moments."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.spans: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if self.spans and start <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((start, end))
        self._starts = [start for start, _ in self.spans]
        self._before = [0, *accumulate(end - start for start, end in self.spans)]

    def within(self, begin_ns: int, end_ns: int) -> int:
        return self._until(end_ns) - self._until(begin_ns)

    def or_within(self, other: "TimeSpans", begin_ns: int, end_ns: int) -> int:
        """Covered by one of the two."""
        near = [*self._near(begin_ns, end_ns), *other._near(begin_ns, end_ns)]  # noqa: SLF001
        return TimeSpans(near).within(begin_ns, end_ns)

    def _near(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        first = max(0, bisect_right(self._starts, begin_ns) - 1)
        return self.spans[first : bisect_right(self._starts, end_ns)]

    def _until(self, moment_ns: int) -> int:
        index = bisect_right(self._starts, moment_ns) - 1
        if index < 0:
            return 0
        start, end = self.spans[index]
        return self._before[index] + min(moment_ns, end) - start


def _busy(records: RunRecords, kind: str) -> Mapping[str, TimeSpans]:
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in records.steps:
        if step.kind == kind:
            spans[step.instance_id].append((step.start_ns, step.start_ns + step.duration_ns))
    return defaultdict(TimeSpans, {name: TimeSpans(found) for name, found in spans.items()})


def blocked(records: RunRecords, kind: str = "") -> Mapping[str, TimeSpans]:
    """Times when the first request of an instance's queue lacked pages or slots (or the given kind), by instance."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    since: dict[str, int] = {}
    for level in records.levels:
        began_ns = since.pop(level.instance_id, None)
        if began_ns is not None:
            spans[level.instance_id].append((began_ns, level.time_ns))
        if level.levels.blocked_by and kind in ("", level.levels.blocked_by):
            since[level.instance_id] = level.time_ns
    return defaultdict(TimeSpans, {name: TimeSpans(found) for name, found in spans.items()})
