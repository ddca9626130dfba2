"""Builds the KV caches of instances."""

from copy import deepcopy
from functools import partial
from typing import Any

from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.hisparse_cache import DeviceBuffers, HiSparseCache
from pdsim.core.memory.host_cache import HostCache, Prefetcher, PrefetchLimits
from pdsim.core.memory.hybrid_cache import HybridKvCache, StateLimits
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.kvbm_cache import KvbmCache
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.memory.vllm_hybrid_cache import VllmHybridCache
from pdsim.scenario.building.sizing import layout_of, num_host_pages, slots_of_request, state_rule, strategy_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import DecodeSettings, ServerSettings
from pdsim.system import memory
from pdsim.system.states import CACHED_SLOTS, TRACK_TOKENS, grid_tokens, interval_tokens

PREFETCH_SHARE = 0.8
"""A new prefetch from storage begins only while the KV of prefetches under way is below a limit. The limit is this
share of the difference in size between the host cache and the GPU's pool (SGLang 0.5.12, cache_controller.py).
"""


def kv_cache(scenario: Scenario, role: memory.Role, *, keeps_replaced: bool = False) -> KvCache:
    """A new KV cache for one instance of this role. The scenario must be resolved. keeps_replaced: when SGLang frees
    pages whose tokens the prefix cache already has. True: when the request that computed the pages ends. False: when
    the request offers the pages to the prefix cache. With vLLM keeps_replaced has no effect.
    """
    settings: ServerSettings = getattr(scenario, role)
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    page = scenario.page_tokens(role)
    pool = PagePool(settings.capacity_tokens // page)
    if isinstance(settings, DecodeSettings) and settings.hisparse is not None:
        assert settings.hisparse.device_buffer_tokens is not None
        buffers = DeviceBuffers(settings.pool_tokens // page, page, settings.hisparse.device_buffer_tokens)
        return HiSparseCache(pool, page, buffers)
    tree = states = None
    if settings.radix_cache:
        states = _state_limits(scenario, settings, role)
        has_drafts = scenario.num_draft_layers > 0 and states is None
        make_tree = BlockCache if scenario.engine == "vllm" else RadixCache
        tree = make_tree(pool, page, deepcopy(settings.eviction), has_drafts=has_drafts)
    rules = scenario.engine_rules
    counts_every_insert = rules.counts_every_insert
    if tree is not None and states is not None:
        own = {"keeps_replaced": keeps_replaced, "counts_every_insert": counts_every_insert}
        return HybridKvCache(pool, page, tree, states, **own)
    if scenario.engine == "vllm" and layout_of(scenario, role).state_bytes:
        return _vllm_hybrid_cache(scenario, role, pool, tree)
    make = partial(
        KvCache,
        pool,
        page,
        tree,
        keeps_replaced=keeps_replaced,
        counts_every_insert=counts_every_insert,
        splits_at_prompt=rules.splits_at_prompt,
    )
    if settings.host_cache is None:
        return make()
    if scenario.engine == "vllm":
        return make(**_connected(scenario, role))
    assert tree is not None, "the scenario is not checked"
    host_pool = PagePool(num_host_pages(scenario, role))
    storage = scenario.storage
    write = settings.host_cache_write
    host = HostCache(host_pool, tree, deepcopy(settings.eviction), write, stores=storage is not None)
    prefetcher = None
    if storage is not None and role != "decode":
        more_pages = max(0, host_pool.num_pages - pool.num_pages)
        limits = PrefetchLimits(
            policy=storage.prefetch,
            least_tokens=storage.prefetch_threshold,
            max_tokens=int(PREFETCH_SHARE * more_pages * page),
        )
        prefetcher = Prefetcher(host, page, limits)
    return make(host=host, prefetcher=prefetcher)


def stored_page_tokens(scenario: Scenario) -> int:
    """Number of tokens of one page in storage: a page of the host caches or, with LMCache, a chunk."""
    found = [servers for servers in scenario.roles.values() if servers.host_cache is not None]
    return found[0].host_cache_chunk_tokens if found and scenario.engine == "vllm" else scenario.page_size


def _connected(scenario: Scenario, role: memory.Role, pages_per_state: int = 0) -> dict[str, Any]:
    """The host cache of a vLLM instance, as one argument of KvCache or VllmHybridCache: {"chunks": cache} with LMCache,
    {"offload": cache} with KVBM or OffloadingConnector. pages_per_state: number of pages of one state of
    linear-attention layers; 0: the host cache keeps no states.
    """
    settings: ServerSettings = getattr(scenario, role)
    num_pages, page = num_host_pages(scenario, role), scenario.page_tokens(role)
    if settings.host_cache_connector == "lmcache":
        chunk_tokens = settings.host_cache_chunk_tokens
        pool = PagePool(num_pages * page // chunk_tokens)
        own = {"is_layerwise": settings.host_cache_layerwise, "stores": scenario.storage is not None}
        return {"chunks": ChunkCache(pool, page, chunk_tokens, **own)}
    pool = PagePool(num_pages)
    if settings.host_cache_connector == "kvbm":
        return {"offload": KvbmCache(pool, page)}
    return {"offload": OffloadCache(pool, page, pages_per_state, shares_loads=settings.radix_cache)}


def _vllm_hybrid_cache(scenario: Scenario, role: memory.Role, pool: PagePool, tree: RadixCache | None) -> KvCache:
    """The cache of a vLLM instance whose states of linear-attention layers take pages. On decode instances, with
    LMCache, and if decode returns KV to prefill, pdsim lets a request continue from any page of a cached prefix, also
    from pages without a state. pool: the pages of the GPU. tree: the prefix cache; None: the instance has none.
    """
    settings: ServerSettings = getattr(scenario, role)
    has_host = tree is not None and settings.host_cache is not None
    returns_kv = scenario.decode is not None and scenario.decode.returns_kv
    has_chunks = has_host and settings.host_cache_connector == "lmcache"
    computes = role != "decode" and not has_chunks and not returns_kv
    pages_per_state = layout_of(scenario, role).state_blocks.pages_per_state
    connected = _connected(scenario, role, pages_per_state if computes else 0) if has_host else {}
    return VllmHybridCache(pool, scenario.page_size, tree, pages_per_state, computes=computes, **connected)


def _state_limits(scenario: Scenario, settings: ServerSettings, role: memory.Role) -> StateLimits | None:
    """Limits of the linear-attention states on an instance of SGLang: number of slots, in all and per request, and the
    tokens after which its prefix cache keeps a state. None: the engine is vLLM, the model has no such layers, or pdsim
    keeps no states in the prefix cache and lets a request continue from any page of a cached prefix (with a host cache,
    or if decode returns KV to prefill).
    """
    layout = layout_of(scenario, role)
    returns_kv = scenario.decode is not None and scenario.decode.returns_kv
    if scenario.engine != "sglang" or not layout.state_bytes or settings.host_cache is not None or returns_kv:
        return None
    assert settings.mem_fraction is not None
    slots = slots_of_request(scenario, settings)
    own_slots = slots - CACHED_SLOTS + 1
    num_places = settings.resolved_max_running
    if isinstance(settings, DecodeSettings):
        num_places += settings.extra_slots or 0
    num_slots = layout.states(settings.mem_fraction, state_rule(scenario, settings, layout, role)).num_slots
    has_buffer = strategy_of(scenario, settings) == "extra_buffer"
    assert layout.model.state is not None
    chunk = layout.model.state.chunk_tokens
    return StateLimits(
        num_slots=max(num_slots, num_places * own_slots),
        slots_per_request=own_slots,
        chunk_tokens=grid_tokens(chunk, scenario.page_size),
        interval_tokens=interval_tokens(chunk, scenario.page_size, settings.mamba_track_interval or TRACK_TOKENS),
        has_buffer=has_buffer,
        computes_prompts=role != "decode",
    )
