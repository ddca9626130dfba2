"""How full the instances are, under the names that SGLang's servers show it by."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdsim.core.instance import Levels

_ENGINE_TYPES = {"prefill": "prefill", "decode": "decode", "aggregated": "unified"}
"""SGLang's words for the roles."""
_REQUESTS: Mapping[str, Mapping[str, str]] = {
    "prefill": {
        "num_queue_reqs": "num_queued",
        "num_running_reqs": "num_running",
        "num_prefill_inflight_queue_reqs": "num_transferring",
    },
    "decode": {
        "num_queue_reqs": "num_ready",
        "num_running_reqs": "num_running",
        "num_decode_prealloc_queue_reqs": "num_queued",
        "num_decode_transfer_queue_reqs": "num_transferring",
        "num_retracted_reqs": "num_retracted",
    },
    "aggregated": {
        "num_queue_reqs": "num_queued",
        "num_running_reqs": "num_running",
        "num_retracted_reqs": "num_retracted",
    },
}
"""By role, SGLang's name of a level of ours."""


class Gauge(NamedTuple):
    name: str
    instance_id: str
    engine_type: str
    value: float


def gauges(load: Mapping[str, Levels], page_size: int) -> Iterator[Gauge]:
    """Of each instance that answers."""
    for instance_id, levels in load.items():
        role = instance_id.rpartition("-")[0]
        pages = levels.num_used_pages, levels.num_evictable_pages, levels.num_free_pages
        values: dict[str, float] = {name: getattr(levels, ours) for name, ours in _REQUESTS[role].items()}
        values["kv_used_tokens"], values["kv_evictable_tokens"], values["kv_available_tokens"] = (
            page_size * num_pages for num_pages in pages
        )
        values["token_usage"] = levels.num_used_pages / sum(pages)
        for name, value in values.items():
            yield Gauge(name, instance_id, _ENGINE_TYPES[role], value)
