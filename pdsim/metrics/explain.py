"""Where the time of requests went, and what limits each instance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord, RunRecords

STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": ("arrival_ns", "routed_ns", "passes HTTP server, tokenizer and gateway"),
    "decode_bootstrap": ("routed_ns", "admitted_ns", "waits for a slot and pages on decode"),
    "prefill_waiting": ("admitted_ns", "prefill_start_ns", "waits for its turn on prefill"),
    "prefill_forward": ("prefill_start_ns", "prefill_end_ns", "is computed, with what its chunks wait for"),
    "prefill_transfer_kv_cache": ("prefill_end_ns", "transfer_end_ns", "transfer that compute does not hide"),
    "decode_transferred": ("transfer_end_ns", "streamed_ns", "waits for decode to notice and merge it"),
    "response": ("streamed_ns", "first_token_ns", "first token passes the gateway, which may hold it back"),
    "decode_forward": ("first_token_ns", "end_ns", "decodes"),
}
"""By SGLang's names: from, to, and what happens. They follow each other without a gap."""

AGGREGATED_STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": ("routed_ns", "prefill_start_ns", STAGES["prefill_waiting"][2]),
    "prefill_forward": ("prefill_start_ns", "streamed_ns", STAGES["prefill_forward"][2]),
    "response": STAGES["response"],
    "decode_forward": STAGES["decode_forward"],
}
"""Of a request that one instance prefills and decodes."""


@dataclass(frozen=True)
class StageTimes:
    """One stage over all finished requests, in ms; `share` is of the mean latency."""

    stage: str
    meaning: str
    mean_ms: float
    median_ms: float
    p99_ms: float
    share: float


@dataclass(frozen=True)
class InstanceLimits:
    """What one instance was doing, as fractions of the time from its first to its last step."""

    instance_id: str
    busy: float
    """In a forward."""
    blocked_by_pages: float
    """The head of its queue lacks pages."""
    blocked_by_slots: float
    mean_pages_used: float
    """Of the pool, held by requests."""
    mean_running: float
    link_busy: float
    """A transfer from or to it was under way."""
    limit: str


def stages_of(request: RequestRecord) -> dict[str, tuple[str, str, str]]:
    return AGGREGATED_STAGES if request.is_aggregated else STAGES


def stage_ms(request: RequestRecord) -> dict[str, float]:
    """Of one finished request."""
    return {stage: _between(request, first, last) for stage, (first, last, _) in stages_of(request).items()}


def stage_times(requests: Iterable[RequestRecord]) -> list[StageTimes]:
    """Of one cluster's requests: all are disaggregated or all aggregated."""
    done = [stage_ms(r) for r in requests if r.outcome == "finished"]
    times = {stage: Samples(row[stage] for row in done) for stage in (done[0] if done else STAGES)}
    total = sum(samples.mean() for samples in times.values()) or 1.0
    return [
        StageTimes(
            stage,
            STAGES[stage][2],
            samples.mean(),
            samples.percentile(50),
            samples.percentile(99),
            samples.mean() / total,
        )
        for stage, samples in times.items()
    ]


def instance_limits(records: RunRecords) -> list[InstanceLimits]:
    """Needs recorded levels."""
    names = sorted({step.instance_id for step in records.steps} | {level.instance_id for level in records.levels})
    return [_limits(records, name) for name in names]


def _limits(records: RunRecords, name: str) -> InstanceLimits:
    steps = [step for step in records.steps if step.instance_id == name]
    start = min((step.start_ns for step in steps), default=0)
    end = max((step.start_ns + step.duration_ns for step in steps), default=0)
    span = max(1, end - start)
    busy = sum(step.duration_ns for step in steps) / span
    shares = _level_shares(records, name, start, end)
    intervals = [(t.start_ns, t.end_ns) for t in records.transfers if name in {t.source, t.target}]
    link_busy = min(1.0, _covered(intervals) / span)
    prefill_ns = sum(step.duration_ns for step in steps if step.kind == "prefill")
    work = "compute" if 2 * prefill_ns > busy * span else "decode steps"
    return InstanceLimits(
        name,
        busy,
        shares["pages"],
        shares["slots"],
        shares["used"],
        shares["running"],
        link_busy,
        _verdict(work, busy, shares, link_busy),
    )


_MOST = 0.5
_FULL = 0.9


def _verdict(work: str, busy: float, shares: Mapping[str, float], link_busy: float) -> str:
    """A first reading: what its requests wait for most of the time. work: what its steps mostly do."""
    if shares["pages"] >= _MOST:
        return "KV pages"
    if shares["slots"] >= _MOST:
        return "request slots"
    if link_busy >= _FULL:
        return "link"
    if busy >= _FULL:
        return work
    return "load"


def _level_shares(records: RunRecords, name: str, start: int, end: int) -> dict[str, float]:
    """Time averages between start and end."""
    sums = dict.fromkeys(("pages", "slots", "used", "running"), 0.0)
    levels = [level for level in records.levels if level.instance_id == name and level.time_ns <= end]
    for level, until in zip(levels, [*(later.time_ns for later in levels[1:]), end], strict=True):
        duration = max(0, until - max(level.time_ns, start))
        now = level.levels
        total = now.num_used_pages + now.num_evictable_pages + now.num_free_pages
        sums["used"] += duration * now.num_used_pages / total
        sums["running"] += duration * now.num_running
        if now.blocked_by:
            sums[now.blocked_by] += duration
    return {key: value / max(1, end - start) for key, value in sums.items()}


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union."""
    covered = reached = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _between(request: RequestRecord, first: str, last: str) -> float:
    begin: int = getattr(request, first)
    end: int = getattr(request, last)
    return (end - begin) / 1e6
