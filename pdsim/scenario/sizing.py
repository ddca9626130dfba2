"""How large the instances of a role are: layout, pool, slots, chunk; SGLang's defaults where the scenario is silent."""

from copy import deepcopy
from dataclasses import replace

from pdsim.core.kv_cache import KvCache
from pdsim.core.page_pool import PagePool
from pdsim.core.radix_cache import RadixCache
from pdsim.policy.protocols import EvictionPolicy
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, PrefillSettings, Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import UnknownNameError, load_gpu, load_model
from pdsim.system.memory import Layout, LayoutError, Role, default_max_running, memory_tier

RoleSettings = PrefillSettings | DecodeSettings | AggregatedSettings

STATES_PER_REQUEST = 3
"""Of linear-attention layers, where a prefix cache keeps some of them (SGLang 0.5.23)."""


def instance_ids(settings: RoleSettings, role: Role) -> list[str]:
    """One for each server, or for each data-parallel rank of each."""
    if settings.dp == 1:
        return [f"{role}-{i}" for i in range(settings.instances)]
    return [f"{role}-{i}.dp{rank}" for i in range(settings.instances) for rank in range(settings.dp)]


def layout_of(scenario: Scenario, role: Role) -> Layout:
    settings: RoleSettings = getattr(scenario, role)
    if settings.tp % settings.dp:
        raise ConfigError(f"{role}: dp {settings.dp} does not divide tp {settings.tp}")
    try:
        model = load_model(scenario.model.name)
        gpu = load_gpu(settings.gpu)
        if scenario.model.weight_dtype is not None:
            model = replace(model, weight_dtype=scenario.model.weight_dtype)
        return Layout(
            model=model,
            gpu=gpu,
            tp=settings.tp // settings.dp,
            dp=settings.dp,
            kv_dtype=scenario.model.kv_dtype,
            state_dtype=scenario.model.state_dtype,
        )
    except (UnknownNameError, LayoutError) as wrong:
        raise ConfigError(f"{role}: {wrong}") from None


def chunk_tokens(scenario: Scenario, settings: PrefillSettings | AggregatedSettings, layout: Layout, role: Role) -> int:
    """Of one forward; 0: no chunking."""
    chunk = settings.chunked_prefill_tokens
    if chunk is None:
        chunk = memory_tier(layout.gpu, layout.tp).chunked_prefill_tokens
    chunk = max(chunk, 0)
    if 0 < chunk < scenario.page_size:
        raise ConfigError(f"{role}: chunked_prefill_tokens {chunk} is less than a page of {scenario.page_size} tokens")
    return chunk


def pool_tokens(scenario: Scenario, settings: RoleSettings, layout: Layout, fraction: float, role: Role) -> int:
    page = scenario.page_size
    if settings.pool_tokens is not None:
        pool = settings.pool_tokens // page * page
        if not pool:
            raise ConfigError(f"{role}: pool_tokens {settings.pool_tokens} is less than a page of {page} tokens")
        return pool
    try:
        return layout.pool_tokens(fraction, page)
    except LayoutError as wrong:
        raise ConfigError(f"{role}: {wrong}") from None


def max_running(settings: RoleSettings, layout: Layout, num_pool_tokens: int, fraction: float) -> int:
    """Of one data-parallel rank; no more than there are states of linear-attention layers."""
    given = settings.max_running_requests
    running = default_max_running(num_pool_tokens, layout.model.max_context_tokens)
    if given is not None:
        running = max(1, given // settings.dp)
    states = layout.max_states(fraction)
    if states is None:
        return running
    return max(1, min(running, states // (STATES_PER_REQUEST if settings.radix_cache else 1)))


def kv_cache(scenario: Scenario, settings: RoleSettings) -> KvCache:
    """A fresh one, of resolved settings."""
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    pool = PagePool(settings.pool_tokens // scenario.page_size)
    eviction: EvictionPolicy = deepcopy(settings.eviction)
    tree = RadixCache(pool, scenario.page_size, eviction) if settings.radix_cache else None
    sends_layers = isinstance(settings, PrefillSettings) and settings.layer_groups > 0
    return KvCache(pool, scenario.page_size, tree, keeps_replaced=sends_layers)
