"""The stages of a request from its arrival to its end."""

from collections import Counter
from collections.abc import Iterable

from pdsim.metrics.records import RequestRecord

Stages = dict[str, tuple[str, str, str]]
"""Stages by name. A stage that SGLang has, too, has SGLang's name. Each stage has three values: the fields of
RequestRecord with the stage's begin and end, and a description. A stage begins where the stage before it ends.
"""

STAGES: Stages = {
    "front_end": ("arrival_ns", "routed_ns", "front end, failed attempts"),
    "decode_bootstrap": ("routed_ns", "admitted_ns", "waits for decode memory"),
    "prefill_waiting": ("admitted_ns", "prefill_start_ns", "waits for prefill"),
    "prefill_forward": ("prefill_start_ns", "prefill_end_ns", "prefill computes it"),
    "prefill_transfer_kv_cache": ("prefill_end_ns", "transfer_end_ns", "rest of its KV is sent"),
    "decode_transferred": ("transfer_end_ns", "streamed_ns", "waits to join the batch"),
    "response": ("streamed_ns", "first_token_ns", "gateway, first token"),
    "decode_forward": ("first_token_ns", "end_ns", "decodes"),
}
"""Stages of a request to which decode granted pages before prefill computed its prompt."""

ENCODE_STAGES: Stages = {
    "encode_waiting": (
        "routed_ns",
        "encode_start_ns",
        "the request's media wait for an encode instance",
    ),
    "encode_forward": ("encode_start_ns", "encode_end_ns", "an encode instance encodes them"),
    "embedding_transfer": ("encode_end_ns", "embeddings_ns", "their embeddings are sent"),
}
"""Stages in which a request's media are encoded; these stages follow the stage of the front end. If several embeddings
arrive, the stages have the times of the last ones.
"""

_WAITING = ("routed_ns", "prefill_start_ns", STAGES["prefill_waiting"][2])

COMPUTED_FIRST_STAGES: Stages = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": _WAITING,
    "prefill_forward": STAGES["prefill_forward"],
    "decode_bootstrap": ("prefill_end_ns", "admitted_ns", STAGES["decode_bootstrap"][2]),
    "prefill_transfer_kv_cache": ("admitted_ns", "transfer_end_ns", STAGES["prefill_transfer_kv_cache"][2]),
    "decode_transferred": STAGES["decode_transferred"],
    "response": STAGES["response"],
    "decode_forward": STAGES["decode_forward"],
}
"""Stages of a request whose prompt was computed before decode granted pages."""

HIDDEN_BOOTSTRAP_STAGES = {
    **{stage: way for stage, way in STAGES.items() if stage != "decode_bootstrap"},
    "prefill_waiting": _WAITING,
}
"""Stages of a request to which decode granted pages while prefill computed its prompt. The request did not wait for the
grant.
"""

AGGREGATED_STAGES: Stages = {
    "front_end": STAGES["front_end"],
    "prefill_waiting": _WAITING,
    "prefill_forward": ("prefill_start_ns", "streamed_ns", STAGES["prefill_forward"][2]),
    "response": STAGES["response"],
    "decode_forward": STAGES["decode_forward"],
}
"""Stages of a request on an aggregated instance."""


ALL_STAGES: Stages = {"front_end": STAGES["front_end"], **ENCODE_STAGES, **STAGES}
"""All stages of disaggregated requests, in the order of a request's life: the front end, the encoding of media, then
the other stages of STAGES. Aggregated requests have some of these stages.
"""


def after_encoding(stages: Stages) -> Stages:
    """Returns the stages of a request with encoded media: `stages`, with ENCODE_STAGES after the front end. The stage
    that began when the request was routed begins when the embeddings have arrived. stages: the stages of a request
    without images and audio clips.
    """
    front_end, *others = stages.items()
    later = {stage: ("embeddings_ns" if first == "routed_ns" else first, *way) for stage, (first, *way) in others}
    return {front_end[0]: front_end[1], **ENCODE_STAGES, **later}  # type: ignore[dict-item]


def stages_of(request: RequestRecord) -> Stages:
    if request.embeddings_ns is None:
        return _without_media(request)
    is_granted_before = not request.is_aggregated and (request.admitted_ns or 0) <= request.embeddings_ns
    return after_encoding(HIDDEN_BOOTSTRAP_STAGES if is_granted_before else _without_media(request))


def _without_media(request: RequestRecord) -> Stages:
    if request.is_aggregated:
        return AGGREGATED_STAGES
    granted_ns, start_ns, end_ns = request.admitted_ns or 0, request.prefill_start_ns or 0, request.prefill_end_ns or 0
    if granted_ns <= start_ns:
        return STAGES
    return COMPUTED_FIRST_STAGES if granted_ns > end_ns else HIDDEN_BOOTSTRAP_STAGES


def stage_spans(request: RequestRecord) -> dict[str, tuple[int, int]]:
    """Begin and end in ns of each stage of a finished request, by stage."""
    stages = stages_of(request).items()
    return {stage: (getattr(request, first), getattr(request, last)) for stage, (first, last, _) in stages}


def stage_ms(request: RequestRecord) -> dict[str, float]:
    """Time in ms of each stage of a finished request, by stage."""
    return {stage: (end_ns - begin_ns) / 1e6 for stage, (begin_ns, end_ns) in stage_spans(request).items()}


def stage_shares(requests: Iterable[RequestRecord]) -> dict[str, float]:
    """Share of each stage in the summed latencies of `requests`. Stages that no request has are left out. requests:
    must be finished.

    NumPy is not used, because its import takes longer than summing the times of a thousand requests.
    """
    spent_ns: Counter[str] = Counter()
    for request in requests:
        for stage, (first, last, _) in stages_of(request).items():
            spent_ns[stage] += getattr(request, last) - getattr(request, first)
    total_ns = spent_ns.total() or 1
    return {stage: spent_ns[stage] / total_ns for stage in ALL_STAGES if stage in spent_ns}
