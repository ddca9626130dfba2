"""Handles messages about copies between GPU and host memory, alike for vLLM's prefill and decode instances."""

from pdsim.core import messages as m
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.prefill.forward_builder import RequestT
from pdsim.core.vllm.vllm_forward_builder import VllmForwardBuilder


def on_copied(message: m.Message, builder: VllmForwardBuilder[RequestT], cache: KvCache) -> bool:
    """Handles a message about copies from or to host memory, or about embeddings, and returns True. Returns False for
    other messages.
    """
    if builder.reads is not None and builder.reads.on_message(message):
        return True
    if cache.chunks is not None and isinstance(message, m.Prefetched):
        cache.chunks.on_prefetched(message)
    elif cache.offload is not None and isinstance(message, m.LoadedBack):
        builder.on_loaded(message.request_id)
    elif cache.offload is not None and isinstance(message, m.Offloaded):
        cache.offload.on_stored(message.store)
    else:
        return False
    return True
