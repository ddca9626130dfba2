"""Stages of a load's requests, in the histograms of SGLang's and vLLM's metrics: their growth while the load ran."""

import re
from collections.abc import Mapping

from pdsim.metrics.explain import STAGES

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
"""SGLang's and vLLM's histograms, and what they time here."""

Totals = Mapping[tuple[str, str], float]
"""Sums in s and counts, by stage."""


def totals(metrics: str) -> Totals:
    """Sums over all instances in Prometheus text."""
    found: dict[tuple[str, str], float] = {}
    for name, part, labels, value in _SAMPLE.findall(metrics):
        told = _STAGE.search(labels) if name == "per_stage_req_latency" else None
        stage = told[1] if told and told[1] in STAGES else _NAMES.get(name)
        if stage is not None:
            found[stage, part] = found.get((stage, part), 0.0) + float(value)
    return found


def mean_stages_ms(before: Totals, after: Totals, num_requests: int) -> dict[str, float]:
    """Means as a summary's fields. Stages that counted another number of requests had others, and are left out."""

    def growth(stage: str, part: str) -> float:
        return after.get((stage, part), 0.0) - before.get((stage, part), 0.0)

    stages = dict.fromkeys(stage for stage, _ in after)
    seconds = {stage: growth(stage, "sum") for stage in stages if growth(stage, "count") == num_requests}
    if seconds.keys() >= {"server_ttft", "server_e2e_latency"}:
        seconds.setdefault("decode_forward", seconds["server_e2e_latency"] - seconds["server_ttft"])
    return {f"mean_{stage}_ms": 1e3 * total / num_requests for stage, total in seconds.items()}
