"""Sizes of instances (SGLang's defaults where the scenario is silent), of requests, and of runs.

Programs refuse a run that would not fit this machine, but for `--yes`; in Python nothing is refused.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from pdsim.core.kv_cache import KvCache
from pdsim.core.page_pool import PagePool
from pdsim.core.radix_cache import RadixCache
from pdsim.policy.protocols import EvictionPolicy
from pdsim.scenario.schema import ComputingSettings, Scenario, ServerSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import UnknownNameError, load_gpu, load_model
from pdsim.system.memory import Layout, LayoutError, Role, default_max_running, default_mem_fraction, memory_tier
from pdsim.workload.request_spec import RequestSpec
from pdsim.workload.trace_file import InputWarning

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


class _Size(NamedTuple):
    """Tokens of a request."""

    request_id: int
    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


def check_requests(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    """Each request alone must fit the model's context, and the pools of the instances."""
    sizes = [_Size(spec.request_id, len(spec.prompt), len(spec.output)) for spec in requests]
    largest = max(sizes, key=lambda size: size[1] + size[2])
    _check_context(scenario, largest)
    page = scenario.page_size
    if (aggregated := scenario.aggregated) is not None:
        # as SGLang counts: whole pages of the prompt, the output, a page, and a step's tokens
        tokens, request_id = max((-(-prompt // page) * page + output, -i) for i, prompt, output in sizes)
        room = (aggregated.pool_tokens or 0) - page - aggregated.num_ahead_tokens
        _require_room(
            -request_id, f"grows to {tokens} tokens", tokens, f"an aggregated instance has room for {room}", room
        )
        return
    prefill, decode = scenario.pair
    longest = max(sizes, key=lambda size: size[1])
    room = (prefill.pool_tokens or 0) - 1 - page
    what = f"has a prompt of {longest.prompt} tokens"
    _require_room(longest.request_id, what, longest.prompt, f"a prefill instance has room for {room}", room)
    tokens, pool = largest.total - 2 + decode.num_ahead_tokens, decode.pool_tokens or 0
    _require_room(largest.request_id, f"grows to {tokens} tokens", tokens, f"a decode instance holds {pool}", pool)


def _require_room(request_id: int, what: str, num_tokens: int, where: str, room: int) -> None:
    if num_tokens > room:
        raise ConfigError(
            f"request {request_id} {what}; {where}: give it a larger GPU, tp or mem_fraction, or leave the request out"
        )


def _check_context(scenario: Scenario, largest: _Size) -> None:
    role: Role = "prefill" if scenario.aggregated is None else "aggregated"
    context, model = layout_of(scenario, role).model.max_context_tokens, scenario.model
    if largest.total > context:
        server = "refuses its prompt" if largest.prompt >= context else "ends its answer there"
        raise ConfigError(
            f"request {largest.request_id} has a prompt of {largest.prompt} tokens and an output of {largest.output}; "
            f"{model} has a context of {context}, and a server {server}: leave such requests out, or say with "
            "context_tokens how far the context is extended"
        )


# How large a run is: memory and time, estimated before they are spent.

_LIMITED: ContextVar[bool] = ContextVar("extent_limited", default=False)

# Measured on one core, of small models and short answers: longer ones take more.
_REQUEST_BYTES, _REQUEST_S = 7_000, 200e-6
_INSTANCE_BYTES, _INSTANCE_S = 13_000, 200e-6
_PAIR_BYTES = 50
"""Of a prefill and a decode instance: what each keeps of the other."""
POINT_BYTES, POINT_S = 6_000, 2e-3
"""Of a sweep's point and seed, before its run."""
_LONG_S = 60
_COUNTS = ("num_requests", "num_sessions", "num_groups", "prompts_per_group")
"""Fields of generated workloads whose product is the least number of requests."""


@contextmanager
def limited(is_limited: bool, /) -> Iterator[None]:
    """Whether what does not fit this machine is refused, for as long as this lasts."""
    token = _LIMITED.set(is_limited)
    try:
        yield
    finally:
        _LIMITED.reset(token)


def require_room_for_run(scenario: Scenario) -> None:
    """Raises ConfigError for more instances or requests than fit; of a trace its file has the requests."""
    roles = (scenario.prefill, scenario.decode, scenario.aggregated)
    counts = [servers.instances * servers.dp for servers in roles if servers is not None]
    workload = scenario.workload
    requests = 0 if hasattr(workload, "path") else prod(getattr(workload, name, 1) for name in _COUNTS)
    num_bytes = sum(counts) * _INSTANCE_BYTES + requests * _REQUEST_BYTES
    num_bytes += prod(counts) * _PAIR_BYTES if len(counts) > 1 else 0
    time_s = sum(counts) * _INSTANCE_S + requests * _REQUEST_S
    require_room(f"{scenario.name}: {sum(counts):,} instances, {requests:,} requests", num_bytes, time_s)


def require_room(what: str, num_bytes: float, time_s: float) -> None:
    """Raises ConfigError if it does not fit this machine, and warns if it takes long."""
    if not _LIMITED.get():
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    estimate = f"{what}: about {num_bytes / 1e9:,.1f} GB and {_shown(time_s)} at least"
    if num_bytes > memory_bytes:
        raise ConfigError(f"{estimate}; this machine has {memory_bytes / 1e9:,.1f} GB: --yes begins all the same")
    if time_s > _LONG_S:
        warnings.warn(estimate, InputWarning, stacklevel=2)


def _shown(time_s: float) -> str:
    unit_s, unit = next(one for one in ((86400, "days"), (3600, "hours"), (60, "minutes"), (0, "")) if time_s > one[0])
    return f"{time_s / unit_s:,.1f} {unit}" if unit else "less than a minute"
