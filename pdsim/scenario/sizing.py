"""How large the instances of a role are: layout, pool, slots, chunk; SGLang's defaults where the scenario is silent."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from pdsim.core.kv_cache import KvCache
from pdsim.core.page_pool import PagePool
from pdsim.core.radix_cache import RadixCache
from pdsim.policy.protocols import EvictionPolicy
from pdsim.scenario.schema import ComputingSettings, Scenario, ServerSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import UnknownNameError, load_gpu, load_model
from pdsim.system.memory import Layout, LayoutError, Role, default_max_running, default_mem_fraction, memory_tier

STATES_PER_REQUEST = 3
"""Of linear-attention layers, where a prefix cache keeps some of them (SGLang 0.5.23)."""


def instance_ids(settings: ServerSettings, role: Role) -> list[str]:
    """One for each server, or for each data-parallel rank of each."""
    if settings.dp == 1:
        return [f"{role}-{i}" for i in range(settings.instances)]
    return [f"{role}-{i}.dp{rank}" for i in range(settings.instances) for rank in range(settings.dp)]


def layout_of(scenario: Scenario, role: Role) -> Layout:
    settings: ServerSettings = getattr(scenario, role)
    if settings.tp % settings.dp:
        raise ConfigError(f"{role}: dp {settings.dp} does not divide tp {settings.tp}")
    try:
        model = load_model(scenario.model)
        gpu = load_gpu(settings.gpu)
        if scenario.weight_dtype is not None:
            model = replace(model, weight_dtype=scenario.weight_dtype)
        if scenario.context_tokens is not None:
            model = replace(model, max_context_tokens=scenario.context_tokens)
        return Layout(
            model=model,
            gpu=gpu,
            tp=settings.tp // settings.dp,
            dp=settings.dp,
            kv_dtype=scenario.kv_dtype,
            state_dtype=scenario.state_dtype,
        )
    except (UnknownNameError, LayoutError) as wrong:
        raise ConfigError(f"{role}: {wrong}") from None


def resolved_computing(scenario: Scenario, settings: ComputingSettings, role: Role) -> dict[str, Any]:
    """Fields of servers that compute prompts, with every default that follows from model and GPU."""
    layout = layout_of(scenario, role)
    chunk = chunk_tokens(scenario, settings, layout, role)
    fraction = settings.mem_fraction or default_mem_fraction(layout.gpu, settings.tp, role, chunk or None, None)
    return {**resolved_memory(scenario, settings, layout, fraction, role), "chunked_prefill_tokens": chunk}


def resolved_memory(
    scenario: Scenario, settings: ServerSettings, layout: Layout, fraction: float, role: Role
) -> dict[str, Any]:
    """Fields of servers of every kind that say how much fits."""
    pool = pool_tokens(scenario, settings, layout, fraction, role)
    running = max_running(settings, layout, pool, fraction)
    return {"mem_fraction": fraction, "pool_tokens": pool, "max_running_requests": running}


def chunk_tokens(scenario: Scenario, settings: ComputingSettings, layout: Layout, role: Role) -> int:
    """Of one forward of a server; 0: no chunking."""
    chunk = settings.chunked_prefill_tokens
    if chunk is None:
        chunk = memory_tier(layout.gpu, layout.tp).chunked_prefill_tokens
    chunk = max(chunk, 0)
    if 0 < chunk < scenario.page_size * settings.dp:
        of = "a page" if settings.dp == 1 else f"{settings.dp} ranks, each of a page"
        raise ConfigError(f"{role}: chunked_prefill_tokens {chunk} is less than {of} of {scenario.page_size} tokens")
    return chunk


def pool_tokens(scenario: Scenario, settings: ServerSettings, layout: Layout, fraction: float, role: Role) -> int:
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


def max_running(settings: ServerSettings, layout: Layout, num_pool_tokens: int, fraction: float) -> int:
    """Of one data-parallel rank; no more than there are states of linear-attention layers."""
    given = settings.max_running_requests
    running = default_max_running(num_pool_tokens, layout.model.max_context_tokens)
    if given is not None:
        running = max(1, given // settings.dp)
    states = layout.max_states(fraction)
    if states is None:
        return running
    return max(1, min(running, states // (STATES_PER_REQUEST if settings.radix_cache else 1)))


def kv_cache(scenario: Scenario, settings: ServerSettings, *, keeps_replaced: bool = False) -> KvCache:
    """A fresh one, of resolved settings."""
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    pool = PagePool(settings.pool_tokens // scenario.page_size)
    eviction: EvictionPolicy = deepcopy(settings.eviction)
    tree = RadixCache(pool, scenario.page_size, eviction) if settings.radix_cache else None
    return KvCache(pool, scenario.page_size, tree, keeps_replaced=keeps_replaced)
