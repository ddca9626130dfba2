"""From a scenario to the pure objects it describes: instances, router, cost models, requests."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdsim.core.decode_instance import DecodeInstance, DecodeLimits
from pdsim.core.health import HealthMonitor
from pdsim.core.instance import Instance
from pdsim.core.journal import TakesMessages
from pdsim.core.kv_cache import KvCache
from pdsim.core.names import receiver_of
from pdsim.core.page_pool import PagePool
from pdsim.core.prefill_instance import PrefillInstance, PrefillLimits
from pdsim.core.radix_cache import RadixCache
from pdsim.core.receiver import Receiver
from pdsim.core.retrying_router import RetryingRouter
from pdsim.core.router import RoleRouter, Router
from pdsim.core.sender import Sender
from pdsim.core.staging_ring import StagingRing
from pdsim.core.wire import Wire
from pdsim.cost.front_end import FrontEndCosts
from pdsim.cost.host import HostCosts
from pdsim.cost.model import CostModel
from pdsim.cost.staging import StagingCost
from pdsim.policy.protocols import EvictionPolicy, RoutingPolicy
from pdsim.scenario import wiring
from pdsim.scenario.faults import HealthSettings, check_faults
from pdsim.scenario.schema import DecodeSettings, PrefillSettings, Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import UnknownNameError, load_gpu, load_model
from pdsim.system.memory import Layout, LayoutError, default_max_running, default_mem_fraction, memory_tier
from pdsim.system.topology import Topology
from pdsim.system.transport import Transport
from pdsim.workload.clients import Client
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.traces import TraceError

Role = Literal["prefill", "decode"]

STATES_PER_REQUEST = 3
"""Of linear-attention layers, where a prefix cache keeps some of them (SGLang 0.5.23)."""

_SMALL_BATCH = 32
"""Up to this max_running_requests a decode instance gets two extra slots for each."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a driver needs. Instances are fresh: each build makes new ones."""

    scenario: Scenario
    """Resolved."""
    instances: Sequence[PrefillInstance | DecodeInstance]
    agents: Sequence[Sender | Receiver]
    router: Router | RetryingRouter
    monitor: HealthMonitor | None
    """Who watches the instances, if anybody does."""
    costs: Mapping[str, CostModel]
    hosts: Mapping[str, HostCosts]
    """Of the loops of prefill instances."""
    front_end: FrontEndCosts
    wire: Wire
    transport: Transport
    topology: Topology
    staging: StagingCost | None
    message_latency_ns: int
    requests: Sequence[RequestSpec]
    client: Client


def build(scenario: Scenario) -> Cluster:
    """Raises ConfigError for what no cluster can be: a layout, a trace, a request larger than the pool, a fault."""
    scenario = resolve(scenario)
    try:
        requests = scenario.workload.requests(Streams(scenario.seed))
    except TraceError as wrong:
        raise ConfigError(f"workload: {wrong}") from None
    _check_requests(scenario, requests)
    _check_faults(scenario, len(requests))
    prefill, decode = _layout(scenario, "prefill"), _layout(scenario, "decode")
    wire = wiring.wire_of(scenario, prefill, decode)
    transport, staging = wiring.transport(scenario.network), scenario.network.staging
    sides = {"prefill": (instance_ids(scenario.prefill, "prefill"), prefill)}
    sides |= {"decode": (instance_ids(scenario.decode, "decode"), decode)}
    costs = {i: scenario.cost.prefill.model(prefill) for i in instance_ids(scenario.prefill, "prefill")}
    costs |= {i: scenario.cost.decode.model(decode) for i in instance_ids(scenario.decode, "decode")}
    return Cluster(
        scenario=scenario,
        instances=build_instances(scenario),
        agents=build_agents(scenario),
        wire=wire,
        router=build_router(scenario),
        monitor=None if scenario.health is None else build_monitor(scenario, scenario.health),
        costs=costs,
        hosts=dict.fromkeys(instance_ids(scenario.prefill, "prefill"), scenario.cost.host.costs()),
        front_end=scenario.front_end.costs(),
        transport=transport,
        topology=wiring.topology(scenario.network, transport, sides, wire.num_writers),
        staging=None if staging is None else wiring.staging_cost(staging, prefill, decode, wire.num_writers),
        message_latency_ns=scenario.network.message_latency,
        requests=requests,
        client=scenario.client,
    )


def state_machines(scenario: Scenario) -> dict[str, Instance | TakesMessages]:
    """Of a resolved scenario, fresh, by name: what its journal replays on."""
    machines: dict[str, Instance | TakesMessages] = {i.instance_id: i for i in build_instances(scenario)}
    machines |= {a.instance_id: a for a in build_agents(scenario)} | {"router": build_router(scenario)}
    if scenario.health is not None:
        machines[HealthMonitor.instance_id] = build_monitor(scenario, scenario.health)
    return machines


def restarted(scenario: Scenario, instance_id: str) -> Any:
    """One state machine of a resolved scenario, as it is after a restart: with nothing in its memory."""
    machines: list[Any] = [*build_instances(scenario), *build_agents(scenario, have_restarted=True)]
    return next(machine for machine in machines if machine.instance_id == instance_id)


def resolve(scenario: Scenario) -> Scenario:
    """Fill in every default that follows from model and GPU."""
    return scenario.model_copy(
        update={
            "prefill": _resolve_prefill(scenario, _layout(scenario, "prefill")),
            "decode": _resolve_decode(scenario, _layout(scenario, "decode")),
            "network": scenario.network,
            "health": HealthSettings() if scenario.faults and scenario.health is None else scenario.health,
        }
    )


def build_instances(scenario: Scenario) -> list[PrefillInstance | DecodeInstance]:
    """Fresh instances of a resolved scenario. Each has its own copy of its policies: they may keep state."""
    prefill, decode = scenario.prefill, scenario.decode
    layouts = _layout(scenario, "prefill"), _layout(scenario, "decode")
    made: list[PrefillInstance | DecodeInstance] = [
        PrefillInstance(
            instance_id,
            cache=_cache(scenario, prefill),
            limits=_prefill_limits(prefill, scenario.health),
            policy=deepcopy(prefill.policy),
            planner=wiring.planner(scenario, instance_id, *layouts),
        )
        for instance_id in instance_ids(prefill, "prefill")
    ]
    made += [
        DecodeInstance(
            instance_id,
            cache=_cache(scenario, decode),
            limits=_decode_limits(decode, scenario.health),
            admission_policy=deepcopy(decode.admission),
            preemption_policy=deepcopy(decode.preemption),
            staged=scenario.network.staging is not None,
        )
        for instance_id in instance_ids(decode, "decode")
    ]
    return made


def build_agents(scenario: Scenario, *, have_restarted: bool = False) -> list[Sender | Receiver]:
    """What works beside the loops of the instances."""
    prefill_ids, decode_ids = instance_ids(scenario.prefill, "prefill"), instance_ids(scenario.decode, "decode")
    transport, staging = wiring.transport(scenario.network), scenario.network.staging
    agents: list[Sender | Receiver] = [
        Sender(
            prefill_id,
            decode_ids,
            num_queues=transport.num_queues,
            by_request=transport.queue_by == "request",
            staged=staging is not None,
        )
        for prefill_id in prefill_ids
    ]
    if staging is not None:
        rings = {i: StagingRing(staging.ring) for i in decode_ids}
        agents += [Receiver(i, prefill_ids, ring, has_restarted=have_restarted) for i, ring in rings.items()]
    return agents


def build_monitor(scenario: Scenario, health: HealthSettings) -> HealthMonitor:
    """It tells the router, the instances of the other role and, of prefill, the receivers."""
    prefill_ids, decode_ids = instance_ids(scenario.prefill, "prefill"), instance_ids(scenario.decode, "decode")
    receivers = [] if scenario.network.staging is None else [receiver_of(i) for i in decode_ids]
    peers = {i: [*decode_ids, *receivers, Router.instance_id] for i in prefill_ids}
    peers |= {i: [*prefill_ids, Router.instance_id] for i in decode_ids}
    return HealthMonitor(peers, max_failures=health.heartbeat_failures)


def build_router(scenario: Scenario) -> Router | RetryingRouter:
    settings = scenario.router

    def role(ids: Sequence[str], policy: RoutingPolicy) -> RoleRouter:
        return RoleRouter(
            ids,
            deepcopy(policy),
            snapshot_interval_ns=settings.snapshot_interval,
            memory_tokens=settings.memory_tokens,
        )

    router = Router(
        prefill=role(instance_ids(scenario.prefill, "prefill"), settings.prefill),
        decode=role(instance_ids(scenario.decode, "decode"), settings.decode),
    )
    health = scenario.health
    return router if health is None else RetryingRouter(router, health.retry_limits(scenario.seed))


def instance_ids(settings: PrefillSettings | DecodeSettings, role: Role) -> list[str]:
    """One for each server, or for each data-parallel rank of each."""
    if settings.dp == 1:
        return [f"{role}-{i}" for i in range(settings.instances)]
    return [f"{role}-{i}.dp{rank}" for i in range(settings.instances) for rank in range(settings.dp)]


def _layout(scenario: Scenario, role: Role) -> Layout:
    settings = getattr(scenario, role)
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


def _resolve_prefill(scenario: Scenario, layout: Layout) -> PrefillSettings:
    settings = scenario.prefill
    chunk = settings.chunked_prefill_tokens
    if chunk is None:
        chunk = memory_tier(layout.gpu, layout.tp).chunked_prefill_tokens
    chunk = max(chunk, 0)
    if 0 < chunk < scenario.page_size:
        raise ConfigError(f"prefill: chunked_prefill_tokens {chunk} is less than a page of {scenario.page_size} tokens")
    fraction = settings.mem_fraction or default_mem_fraction(layout.gpu, layout.tp, "prefill", chunk or None, None)
    pool = _pool_tokens(scenario, settings, layout, fraction, "prefill")
    running = _max_running(settings, layout, pool, fraction)
    update = {
        "mem_fraction": fraction,
        "pool_tokens": pool,
        "max_running_requests": running,
        "chunked_prefill_tokens": chunk,
    }
    return settings.model_copy(update=update)


def _resolve_decode(scenario: Scenario, layout: Layout) -> DecodeSettings:
    settings = scenario.decode
    given = settings.max_running_requests
    fraction = settings.mem_fraction or default_mem_fraction(layout.gpu, layout.tp, "decode", None, given)
    pool = _pool_tokens(scenario, settings, layout, fraction, "decode")
    extra = settings.extra_slots
    if extra is None:
        extra = 2 * given if given is not None and given <= _SMALL_BATCH else 0
    update = {
        "mem_fraction": fraction,
        "pool_tokens": pool,
        "max_running_requests": _max_running(settings, layout, pool, fraction),
        "extra_slots": extra,
    }
    return settings.model_copy(update=update)


def _max_running(settings: PrefillSettings | DecodeSettings, layout: Layout, pool_tokens: int, fraction: float) -> int:
    """Of one data-parallel rank; no more than there are states of linear-attention layers."""
    given = settings.max_running_requests
    running = default_max_running(pool_tokens, layout.model.max_context_tokens)
    if given is not None:
        running = max(1, given // settings.dp)
    states = layout.max_states(fraction)
    if states is None:
        return running
    return max(1, min(running, states // (STATES_PER_REQUEST if settings.radix_cache else 1)))


def _pool_tokens(
    scenario: Scenario, settings: PrefillSettings | DecodeSettings, layout: Layout, fraction: float, role: Role
) -> int:
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


def _check_requests(scenario: Scenario, requests: Sequence[RequestSpec]) -> None:
    """Each request alone must fit both pools."""
    page = scenario.page_size
    longest = max(requests, key=lambda spec: len(spec.prompt))
    largest = max(requests, key=lambda spec: len(spec.prompt) + len(spec.output))
    room = (scenario.prefill.pool_tokens or 0) - 1 - page
    if len(longest.prompt) > room:
        raise ConfigError(
            f"request {longest.request_id} has a prompt of {len(longest.prompt)} tokens; a prefill instance has room "
            f"for {room}: give it a larger GPU, tp or mem_fraction, or leave the request out"
        )
    tokens = len(largest.prompt) + len(largest.output) - 1
    pool = scenario.decode.pool_tokens or 0
    if tokens > pool:
        raise ConfigError(
            f"request {largest.request_id} grows to {tokens} tokens; a decode instance holds {pool}: "
            f"give it a larger GPU, tp or mem_fraction, or leave the request out"
        )


def _check_faults(scenario: Scenario, num_requests: int) -> None:
    ids = [*instance_ids(scenario.prefill, "prefill"), *instance_ids(scenario.decode, "decode")]
    links = [*ids, *(["shared"] if scenario.network.shared_bandwidth is not None else [])]
    check_faults(scenario.faults, instances=ids, links=links, num_requests=num_requests)


def _cache(scenario: Scenario, settings: PrefillSettings | DecodeSettings) -> KvCache:
    assert settings.pool_tokens is not None, "the scenario is not resolved"
    pool = PagePool(settings.pool_tokens // scenario.page_size)
    eviction: EvictionPolicy = deepcopy(settings.eviction)
    tree = RadixCache(pool, scenario.page_size, eviction) if settings.radix_cache else None
    return KvCache(pool, scenario.page_size, tree)


def _prefill_limits(settings: PrefillSettings, health: HealthSettings | None) -> PrefillLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return PrefillLimits(
        max_running_requests=settings.max_running_requests,
        chunked_prefill_tokens=settings.chunked_prefill_tokens or None,
        max_prefill_tokens=settings.max_prefill_tokens,
        overlap=settings.overlap,
        bootstrap_timeout_ns=None if health is None else health.bootstrap_timeout,
    )


def _decode_limits(settings: DecodeSettings, health: HealthSettings | None) -> DecodeLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return DecodeLimits(
        max_running_requests=settings.max_running_requests,
        extra_slots=settings.extra_slots or 0,
        waiting_timeout_ns=None if health is None else health.waiting_timeout,
        release_timeout_ns=None if health is None else health.release_timeout,
    )
