"""Where the time of requests went."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord
from pdsim.metrics.summary import ttft_ms

STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": ("arrival_ns", "routed_ns", "passes the front end; attempts that failed"),
    "decode_bootstrap": ("routed_ns", "admitted_ns", "waits for a slot and pages on decode"),
    "prefill_waiting": ("admitted_ns", "prefill_start_ns", "waits for its turn on prefill"),
    "prefill_forward": ("prefill_start_ns", "prefill_end_ns", "is computed, with what its chunks wait for"),
    "prefill_transfer_kv_cache": ("prefill_end_ns", "transfer_end_ns", "transfer that compute does not hide"),
    "decode_transferred": ("transfer_end_ns", "streamed_ns", "waits for decode to notice and merge it"),
    "response": ("streamed_ns", "first_token_ns", "first token passes the gateway"),
    "decode_forward": ("first_token_ns", "end_ns", "decodes"),
}
"""By SGLang's names: from, to, and what happens. They follow each other without a gap."""

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
"""Of a request that was computed before decode granted it pages."""

HIDDEN_BOOTSTRAP_STAGES = {
    **{stage: way for stage, way in STAGES.items() if stage != "decode_bootstrap"},
    "prefill_waiting": _WAITING,
}
"""Of a request that was granted pages while it was computed: it never waited for them."""

AGGREGATED_STAGES: dict[str, tuple[str, str, str]] = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": _WAITING,
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
    slowest_ms: float
    """Mean of the 1 % of the requests, one at least, that waited longest for their first token."""
    share: float


def stages_of(request: RequestRecord) -> dict[str, tuple[str, str, str]]:
    """Of a finished request."""
    if request.is_aggregated:
        return AGGREGATED_STAGES
    granted_ns, start_ns, end_ns = request.admitted_ns or 0, request.prefill_start_ns or 0, request.prefill_end_ns or 0
    if granted_ns <= start_ns:
        return STAGES
    return COMPUTED_FIRST_STAGES if granted_ns > end_ns else HIDDEN_BOOTSTRAP_STAGES


def stage_ms(request: RequestRecord) -> dict[str, float]:
    """Of one finished request."""
    return {stage: _between(request, first, last) for stage, (first, last, _) in stages_of(request).items()}


def stage_times(requests: Iterable[RequestRecord]) -> list[StageTimes]:
    """Of one cluster's requests: all are disaggregated or all aggregated."""
    by_ttft = sorted((r for r in requests if r.outcome == "finished"), key=ttft_ms)
    done = [stage_ms(r) for r in by_ttft]
    slowest = done[-max(1, len(done) // 100) :]
    stages = [stage for stage in STAGES if not done or any(stage in row for row in done)]
    times = {stage: Samples(row.get(stage, 0.0) for row in done) for stage in stages}
    total = sum(samples.mean() for samples in times.values()) or 1.0
    return [
        StageTimes(
            stage,
            STAGES[stage][2],
            samples.mean(),
            samples.percentile(50),
            Samples(row.get(stage, 0.0) for row in slowest).mean(),
            samples.mean() / total,
        )
        for stage, samples in times.items()
    ]


def _between(request: RequestRecord, first: str, last: str) -> float:
    begin: int = getattr(request, first)
    end: int = getattr(request, last)
    return (end - begin) / 1e6
