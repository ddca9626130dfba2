"""Where the time of requests went."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdsim.metrics.distribution import Samples
from pdsim.metrics.records import RequestRecord

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


def _between(request: RequestRecord, first: str, last: str) -> float:
    begin: int = getattr(request, first)
    end: int = getattr(request, last)
    return (end - begin) / 1e6
