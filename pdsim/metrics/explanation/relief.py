"""Scarce resources, and the fields of a scenario that increase each of them."""

_CACHE = "; decode.radix_cache if prefixes are shared"

RELIEF = {
    "prefill compute": "prefill.instances, prefill.tp, a faster prefill.gpu",
    "decode steps": "decode.instances, decode.tp, a faster decode.gpu" + _CACHE,
    "messages": "network.message_latency",
    "prefill KV": "prefill.mem_fraction, prefill.tp, prefill.instances",
    "prefill slots": "prefill.max_running_requests",
    "decode KV": "decode.mem_fraction, decode.tp, decode.instances" + _CACHE,
    "decode slots": "decode.max_running_requests",
    "link": "network.bandwidth",
    "descriptor cost": "equal tp or network.staging where tensor-parallel sizes differ, else page_size",
    "transfer set-up": "network.transport",
    "staging ring": "network.staging.ring",
    "prefill host memory": "prefill.host_cache",
    "decode host memory": "decode.host_cache",
    "host link": "GPUs with a faster host_bandwidth",
    "storage": "storage.drives, storage.client_bandwidth",
    "encoding": "encode.instances, a faster encode.gpu",
    "embedding link": "encode.transport",
}
"""For each resource of a disaggregated cluster: the fields of a scenario that give more of it."""

AGGREGATED_RELIEF = {
    "prefill compute": "aggregated.instances, aggregated.tp, a faster aggregated.gpu",
    "decode steps": "aggregated.instances, aggregated.tp, a faster aggregated.gpu",
    "messages": RELIEF["messages"],
    "aggregated KV": "aggregated.mem_fraction, aggregated.tp, aggregated.instances",
    "aggregated slots": "aggregated.max_running_requests",
    "aggregated host memory": "aggregated.host_cache",
    "host link": RELIEF["host link"],
    "storage": RELIEF["storage"],
    "encoding": RELIEF["encoding"],
    "embedding link": RELIEF["embedding link"],
}
"""For each resource of an aggregated cluster: the fields of a scenario that give more of it."""


def reliefs(*, aggregated: bool, has_decode_cache: bool) -> dict[str, str]:
    """For each resource: the scenario fields that give more of it. aggregated: True: for aggregated clusters.
    has_decode_cache: True: decode already has a radix cache, so that a radix cache is not among the fields.
    """
    found = AGGREGATED_RELIEF if aggregated else RELIEF
    return {name: fields.removesuffix(_CACHE) if has_decode_cache else fields for name, fields in found.items()}


def relief_of(resource: str, *, aggregated: bool) -> str:
    """Fields of a scenario that give more of the resource. Empty: no such resource. aggregated: True: for aggregated
    clusters.
    """
    return (AGGREGATED_RELIEF if aggregated else RELIEF).get(resource, "")
