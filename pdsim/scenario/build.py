"""Builds the pure objects that a scenario describes: instances, router, cost models, requests."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from pdsim.core.aggregated_instance import AggregatedInstance, AggregatedLimits
from pdsim.core.decode_instance import DecodeInstance, DecodeLimits
from pdsim.core.health import HealthMonitor
from pdsim.core.instance import Instance
from pdsim.core.journal import TakesMessages
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.prefill_instance import PrefillInstance, PrefillLimits
from pdsim.core.receiver import Receiver
from pdsim.core.router import NO_RETRIES, RetryLimits, RoleRouter, Router
from pdsim.core.running_batch import Speculation
from pdsim.core.sender import Sender
from pdsim.core.staging_ring import StagingRing
from pdsim.cost.aiconfigurator import NoOperatorTablesError
from pdsim.cost.copies import HostCopies
from pdsim.cost.model import CostModel, CostSettings
from pdsim.cost.step_times import NO_DRAFTING, DecodeHostOverhead, Drafting, Graphs, StepTimes, captured_batches
from pdsim.policy.protocols import RoutingPolicy
from pdsim.scenario import wiring
from pdsim.scenario.faults import ClientAbort, HealthSettings, Kill, SlowLink
from pdsim.scenario.schema import (
    AggregatedSettings,
    DecodeSettings,
    DecodingSettings,
    FrontEndSettings,
    HostSettings,
    PrefillSettings,
    Scenario,
)
from pdsim.scenario.sizing import (
    check_requests,
    instance_ids,
    kv_cache,
    layout_of,
    require_room_for_run,
    resolved_computing,
    resolved_memory,
)
from pdsim.scenario.yaml_file import ConfigError, did_you_mean
from pdsim.system.memory import Layout, Role, default_mem_fraction, memory_tier
from pdsim.workload.client_driver import Client
from pdsim.workload.request_spec import RequestSpec, Streams
from pdsim.workload.trace_file import TraceError

_SMALL_BATCH = 32
"""The largest max_running_requests for which a decode instance gets two extra slots for each."""
DP_CONSERVATIVENESS = 0.3
"""SGLang's factor on schedule_conservativeness with data-parallel attention."""


AnyInstance = PrefillInstance | DecodeInstance | AggregatedInstance


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All that a driver needs. Instances are fresh: each build makes new ones."""

    scenario: Scenario
    """Resolved."""
    instances: Sequence[AnyInstance]
    agents: Sequence[Sender | Receiver]
    router: Router
    monitor: HealthMonitor | None
    """Watches the instances, if anybody does."""
    costs: Mapping[str, StepTimes]
    hosts: Mapping[str, HostSettings]
    """Host times of the loops of prefill instances."""
    host_copies: HostCopies | None
    """Copies of KV that decode instances retract; None: they take no time."""
    front_end: FrontEndSettings
    interconnect: wiring.Interconnect | None
    """None: nothing is sent, for the cluster is aggregated."""
    message_latency_ns: int
    handover_ns: int
    requests: Sequence[RequestSpec]
    client: Client


def requests_of(scenario: Scenario) -> Sequence[RequestSpec]:
    """Raises ConfigError for a trace that cannot be read, and where programs limit it, for more than fits."""
    require_room_for_run(scenario)
    try:
        return scenario.workload.requests(Streams(scenario.seed))
    except TraceError as wrong:
        raise ConfigError(f"workload: {wrong}") from None


def build(scenario: Scenario, requests: Sequence[RequestSpec] | None = None) -> Cluster:
    """Raises ConfigError for what no cluster can be: a layout, a trace, a request larger than the pool, a fault.

    requests: what `requests_of` gives for this scenario, if that is known already.
    """
    scenario = resolve(scenario)
    if requests is None:
        requests = requests_of(scenario)
    check_requests(scenario, requests)
    _check_faults(scenario, len(requests))
    is_aggregated = scenario.aggregated is not None
    return Cluster(
        scenario=scenario,
        instances=build_instances(scenario),
        agents=build_agents(scenario),
        router=build_router(scenario),
        monitor=None if scenario.health is None else build_monitor(scenario, scenario.health),
        costs=_costs(scenario),
        hosts={} if is_aggregated else _hosts(scenario),
        host_copies=None if is_aggregated else _host_copies(scenario),
        front_end=scenario.front_end,
        interconnect=None if is_aggregated else wiring.interconnect(scenario),
        message_latency_ns=scenario.network.message_latency,
        handover_ns=scenario.network.handover,
        requests=requests,
        client=scenario.client,
    )


def state_machines(scenario: Scenario) -> dict[str, Instance | TakesMessages]:
    """Fresh state machines of a resolved scenario by name: what its journal replays on."""
    machines: dict[str, Instance | TakesMessages] = {i.instance_id: i for i in build_instances(scenario)}
    machines |= {a.instance_id: a for a in build_agents(scenario)} | {"router": build_router(scenario)}
    if scenario.health is not None:
        machines[HealthMonitor.instance_id] = build_monitor(scenario, scenario.health)
    return machines


def restarted(scenario: Scenario, name: str) -> AnyInstance | Sender | Receiver:
    """One state machine of a resolved scenario, as it is after a restart: with nothing in its memory."""
    return build_machine(scenario, name, has_restarted=True)


def resolve(scenario: Scenario) -> Scenario:
    """Fill in every default that follows from model and GPU."""
    health = HealthSettings() if scenario.faults and scenario.health is None else scenario.health
    if (aggregated := scenario.aggregated) is not None:
        update: dict[str, Any] = {
            "aggregated": aggregated.model_copy(update=resolved_computing(scenario, aggregated, "aggregated")),
            "front_end": scenario.front_end.model_copy(update={"waits_for_prefill": False}),
        }
        return scenario.model_copy(update={**update, "health": health})
    prefill, decode = scenario.pair
    computing = resolved_computing(scenario, prefill, "prefill")
    update = {
        "prefill": prefill.model_copy(
            update={**computing, "optimistic_attempts": _optimistic_attempts(prefill, decode)}
        ),
        "decode": decode.model_copy(update=_resolved_decode(scenario, decode)),
    }
    return scenario.model_copy(update={**update, "health": health})


def build_instances(scenario: Scenario) -> list[AnyInstance]:
    """Fresh instances of a resolved scenario."""
    return [_instance(scenario, role, i) for role, ids in _roles(scenario).items() for i in ids]


def build_agents(scenario: Scenario) -> list[Sender | Receiver]:
    """The state machines beside the loops of the instances: senders, and with staging receivers."""
    if scenario.aggregated is not None:
        return []
    roles = _roles(scenario)
    senders: list[Sender | Receiver] = [_sender(scenario, i) for i in roles["prefill"]]
    receivers = [] if scenario.network.staging is None else roles["decode"]
    return [*senders, *(_receiver(scenario, i, has_restarted=False) for i in receivers)]


def build_machine(scenario: Scenario, name: str, *, has_restarted: bool = False) -> AnyInstance | Sender | Receiver:
    """One instance, sender or receiver of a resolved scenario by its name, and nothing else."""
    for role, ids in _roles(scenario).items():
        for instance_id in ids:
            if name == instance_id:
                return _instance(scenario, role, instance_id)
            if name == sender_of(instance_id):
                return _sender(scenario, instance_id)
            if name == receiver_of(instance_id):
                return _receiver(scenario, instance_id, has_restarted=has_restarted)
    raise KeyError(name)


def _instance(scenario: Scenario, role: Role, instance_id: str) -> AnyInstance:
    """It has its own copy of its policies: they may keep state."""
    health = scenario.health
    if (aggregated := scenario.aggregated) is not None:
        return AggregatedInstance(
            instance_id,
            cache=kv_cache(scenario, aggregated),
            limits=_aggregated_limits(aggregated, health),
            policy=deepcopy(aggregated.policy),
            preemption_policy=deepcopy(aggregated.preemption),
        )
    prefill, decode = scenario.pair
    if role == "prefill":
        return PrefillInstance(
            instance_id,
            cache=kv_cache(scenario, prefill, keeps_replaced=prefill.layer_groups > 0),
            limits=_prefill_limits(prefill, health),
            policy=deepcopy(prefill.policy),
            planner=wiring.planner(scenario, instance_id),
        )
    return DecodeInstance(
        instance_id,
        cache=kv_cache(scenario, decode),
        limits=_decode_limits(decode, health),
        admission_policy=deepcopy(decode.admission),
        preemption_policy=deepcopy(decode.preemption),
        staged=scenario.network.staging is not None,
    )


def _sender(scenario: Scenario, prefill_id: str) -> Sender:
    transport = wiring.transport(scenario)
    return Sender(
        prefill_id,
        _roles(scenario)["decode"],
        num_queues=transport.num_queues,
        by_request=transport.queue_by == "request",
        staged=scenario.network.staging is not None,
    )


def _receiver(scenario: Scenario, decode_id: str, *, has_restarted: bool) -> Receiver:
    staging, health = scenario.network.staging, scenario.health
    assert staging is not None, "without staging there are no receivers"
    return Receiver(
        decode_id,
        _roles(scenario)["prefill"],
        StagingRing(staging.ring),
        release_timeout_ns=None if health is None else health.release_timeout,
        has_restarted=has_restarted,
    )


def build_monitor(scenario: Scenario, health: HealthSettings) -> HealthMonitor:
    """It tells the router, the instances of the other role if there is one and, of prefill, the receivers."""
    roles = _roles(scenario)
    peers = {i: [Router.instance_id] for ids in roles.values() for i in ids}
    if scenario.aggregated is None:
        prefill_ids, decode_ids = roles["prefill"], roles["decode"]
        receivers = [] if scenario.network.staging is None else [receiver_of(i) for i in decode_ids]
        peers = {i: [*decode_ids, *receivers, Router.instance_id] for i in prefill_ids}
        peers |= {i: [*prefill_ids, Router.instance_id] for i in decode_ids}
    return HealthMonitor(peers, max_failures=health.heartbeat_failures)


def build_router(scenario: Scenario) -> Router:
    """It tries nothing again without a health section."""
    settings, health = scenario.router, scenario.health

    def role(name: Role, policy: RoutingPolicy) -> RoleRouter:
        return RoleRouter(instance_ids(getattr(scenario, name), name), deepcopy(policy))

    limits = NO_RETRIES
    if health is not None:
        limits = RetryLimits(
            max_retries=health.max_retries,
            initial_backoff_ns=health.initial_backoff,
            backoff_jitter=health.backoff_jitter,
            seed=scenario.seed,
        )
    if scenario.aggregated is not None:
        return Router(prefill=role("aggregated", settings.prefill), decode=None, limits=limits)
    return Router(prefill=role("prefill", settings.prefill), decode=role("decode", settings.decode), limits=limits)


def _roles(scenario: Scenario) -> dict[Role, list[str]]:
    """The roles of a cluster, and the instances of each."""
    roles: Sequence[Role] = ("prefill", "decode") if scenario.aggregated is None else ("aggregated",)
    return {role: instance_ids(getattr(scenario, role), role) for role in roles}


def _costs(scenario: Scenario) -> dict[str, StepTimes]:
    costs: dict[str, StepTimes] = {}
    for role, ids in _roles(scenario).items():
        layout = layout_of(scenario, role)
        for i in ids:
            settings = getattr(scenario, role)
            is_prefill = role == "prefill"
            costs[i] = _prefill_times(scenario, layout) if is_prefill else _decode_times(scenario, settings, layout)
    return costs


def _hosts(scenario: Scenario) -> dict[str, HostSettings]:
    return dict.fromkeys(instance_ids(scenario.pair.prefill, "prefill"), scenario.cost.host.slowed())


def _host_copies(scenario: Scenario) -> HostCopies | None:
    if not scenario.pair.decode.retraction_backup:
        return None
    return wiring.host_copies(layout_of(scenario, "decode"), scenario.page_size)


def _optimistic_attempts(prefill: PrefillSettings, decode: DecodeSettings) -> int:
    is_late = decode.allocation == "prefill_complete"
    attempts = int(is_late) if prefill.optimistic_attempts is None else prefill.optimistic_attempts
    if is_late and not attempts:
        raise ConfigError(
            "prefill.optimistic_attempts: 0, but decode.allocation prefill_complete grants pages to computed prompts "
            "only: at least 1, or leave it out"
        )
    if attempts and prefill.layer_groups:
        why = "decode.allocation prefill_complete computes" if is_late else "prefill.optimistic_attempts computes"
        raise ConfigError(
            f"prefill.layer_groups: {prefill.layer_groups}, but {why} prompts before it is known where their KV goes: "
            "0, or allocation early without attempts"
        )
    return attempts


def _resolved_decode(scenario: Scenario, settings: DecodeSettings) -> dict[str, Any]:
    layout, given = layout_of(scenario, "decode"), settings.max_running_requests
    fraction = settings.mem_fraction or default_mem_fraction(
        layout.gpu, settings.tp, "decode", None, given, draft_tokens=settings.speculative_draft_tokens or 1
    )
    extra = settings.extra_slots
    if extra is None:
        running = None if given is None else max(1, given // settings.dp)
        extra = 2 * running if running is not None and running <= _SMALL_BATCH else 0
    return {**resolved_memory(scenario, settings, layout, fraction, "decode"), "extra_slots": extra}


def _check_faults(scenario: Scenario, num_requests: int) -> None:
    """Raises ConfigError for what a run does not have."""
    instances = [i for ids in _roles(scenario).values() for i in ids]
    links = [] if scenario.aggregated is not None else list(instances)
    if links and scenario.network.shared_bandwidth is not None:
        links.append("shared")

    def missing(what: str, name: str, among: Sequence[str]) -> ConfigError:
        return ConfigError(f"{what} {name!r}{did_you_mean(name, among)}; there are {', '.join(among)}")

    for i, fault in enumerate(scenario.faults):
        if isinstance(fault, Kill) and fault.kill not in instances:
            raise missing(f"faults.{i}.kill: no instance", fault.kill, instances)
        if isinstance(fault, SlowLink) and not links:
            raise ConfigError(f"faults.{i}.link: an aggregated cluster sends no KV; it has no links")
        if isinstance(fault, SlowLink) and fault.link not in links:
            raise missing(f"faults.{i}.link: no link of", fault.link, links)
        if isinstance(fault, ClientAbort) and not 0 <= fault.abort < num_requests:
            raise ConfigError(f"faults.{i}.abort: no request {fault.abort}; there are 0 to {num_requests - 1}")


def _speculation(settings: DecodingSettings) -> Speculation | None:
    tokens = settings.speculative_draft_tokens
    return None if tokens is None else Speculation(draft_tokens=tokens)


def _prefill_limits(settings: PrefillSettings, health: HealthSettings | None) -> PrefillLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return PrefillLimits(
        max_running_requests=settings.max_running_requests,
        chunked_prefill_tokens=settings.rank_chunk_tokens or None,
        max_prefill_tokens=settings.max_prefill_tokens,
        overlap=settings.overlap,
        bootstrap_timeout_ns=None if health is None else health.bootstrap_timeout,
        optimistic_attempts=settings.optimistic_attempts or 0,
    )


def _decode_limits(settings: DecodeSettings, health: HealthSettings | None) -> DecodeLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return DecodeLimits(
        max_running_requests=settings.max_running_requests,
        extra_slots=settings.extra_slots or 0,
        waiting_timeout_ns=None if health is None else health.waiting_timeout,
        release_timeout_ns=None if health is None else health.release_timeout,
        polling_interval_steps=settings.polling_interval,
        saves_retracted=settings.retraction_backup,
        speculation=_speculation(settings),
        grants_computed_only=settings.allocation == "prefill_complete",
    )


def _aggregated_limits(settings: AggregatedSettings, health: HealthSettings | None) -> AggregatedLimits:
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    return AggregatedLimits(
        max_running_requests=settings.max_running_requests,
        chunked_prefill_tokens=settings.rank_chunk_tokens or None,
        max_prefill_tokens=settings.max_prefill_tokens,
        schedule_conservativeness=settings.schedule_conservativeness * (1 if settings.dp == 1 else DP_CONSERVATIVENESS),
        overlap=settings.overlap,
        speculation=_speculation(settings),
        waiting_timeout_ns=None if health is None else health.waiting_timeout,
    )


def _prefill_times(scenario: Scenario, layout: Layout) -> StepTimes:
    """An instance that computes prompts alone."""
    model, measured = _model(scenario, scenario.cost.prefill, layout), scenario.cost.measured
    return StepTimes(prefill=model, decode=model, measured=None if measured is None else measured.bounds())


def _decode_times(scenario: Scenario, settings: DecodeSettings | AggregatedSettings, layout: Layout) -> StepTimes:
    """An instance that decodes, in a resolved scenario; an aggregated one computes prompts as well."""
    assert settings.max_running_requests is not None, "the scenario is not resolved"
    cost, host, draft_tokens = scenario.cost, scenario.cost.host, settings.speculative_draft_tokens
    drafting, graphs = NO_DRAFTING, None
    if draft_tokens is not None:
        drafting = Drafting(draft_tokens, settings.speculative_drafting)
    if cost.graph_sizes is not None:
        largest = memory_tier(layout.gpu, settings.tp).max_graph_batch
        default = captured_batches(largest, settings.max_running_requests, speculative=draft_tokens is not None)
        launch_ns = host.slowdown * cost.eager_layer * layout.model.num_layers
        sizes = default if cost.graph_sizes == "sglang" else cost.graph_sizes
        graphs = Graphs(sorted(sizes), launch_ns, cost.graph_empty_row_kv)
    return StepTimes(
        prefill=_model(scenario, cost.prefill, layout),
        decode=_model(scenario, cost.decode, layout),
        measured=None if cost.measured is None else cost.measured.bounds(),
        drafting=drafting,
        graphs=graphs,
        host_overhead=DecodeHostOverhead(host.slowdown * host.decode_step, host.slowdown * host.decode_request),
    )


def _model(scenario: Scenario, settings: CostSettings, layout: Layout) -> CostModel:
    try:
        return _slowed(settings, scenario.cost.host.slowdown).model(layout)
    except NoOperatorTablesError as wrong:
        raise ConfigError(f"cost: aiconfigurator: {wrong}") from None


def _slowed(settings: CostSettings, slowdown: float) -> CostSettings:
    """The settings with their host work slowed: a class names those fields in HOST_FIELDS."""
    host_fields = getattr(settings, "HOST_FIELDS", ())
    if slowdown == 1 or not host_fields or not is_dataclass(settings):
        return settings
    return replace(settings, **{name: slowdown * getattr(settings, name) for name in host_fields})
