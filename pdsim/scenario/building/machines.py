"""Builds the state machines of a resolved scenario: instances, senders, receivers, encoding proxies, router, health
monitor and autoscaler.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits
from pdsim.core.autoscaler import Autoscaler, ScalingTimes
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.decode.hisparse_instance import HiSparseDecodeInstance
from pdsim.core.encode.divided_requests import DividedRequests
from pdsim.core.encode.embedding_receiver import EmbeddingReceiver
from pdsim.core.encode.encoding_proxy import EncodingProxy
from pdsim.core.health import HealthMonitor
from pdsim.core.invariants import AnyInstance
from pdsim.core.memory.hisparse_cache import HiSparseCache
from pdsim.core.messages import Drain, receiver_of, sender_of
from pdsim.core.pipeline.staged_decode import StagedDecodeInstance
from pdsim.core.pipeline.staged_instances import StagedAggregatedInstance, StagedVllmInstance
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.prefill.prefill_limits import PrefillLimits
from pdsim.core.routing.held_requests import HeldRequests
from pdsim.core.routing.ranked_router import RankedRouter
from pdsim.core.routing.role_router import REMEMBERED, MemorySize, RoleRouter
from pdsim.core.routing.router import NO_RETRIES, RetryLimits, Router
from pdsim.core.transfer.kv_returns import KvGiver, KvTaker
from pdsim.core.transfer.receiver import Receiver
from pdsim.core.transfer.sender import Sender
from pdsim.core.transfer.staging_ring import StagingRing
from pdsim.core.vllm.kv_leases import MOONCAKE, NIXL, LeaseTimes
from pdsim.core.vllm.vllm_decode_instance import VllmDecodeInstance
from pdsim.core.vllm.vllm_forward_builder import TokenBudget
from pdsim.core.vllm.vllm_prefill_instance import VllmPrefillInstance
from pdsim.policy.draws import Draws
from pdsim.policy.pages import FreePages
from pdsim.policy.protocols import RoutingPolicy, Servers
from pdsim.policy.ranks import rank_policy
from pdsim.scenario.building import wiring
from pdsim.scenario.building.caches import kv_cache
from pdsim.scenario.building.cost_models import chunk_sizer
from pdsim.scenario.building.encoding import embedding_reads, encode_instances, encoder_tokens, language_ids
from pdsim.scenario.building.sizing import attention_waves, balance_method, encode_ids, roles, server_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import AggregatedSettings, ComputingSettings, ServerSettings
from pdsim.system.memory import Role

DP_CONSERVATIVENESS = 0.3
"""Factor by which SGLang multiplies schedule_conservativeness with data-parallel attention."""
DECODE_SEED = 1 << 32
"""Added to the seed of decode's routing policy, so that decode and prefill make different random choices."""


def state_machines(scenario: Scenario) -> dict[str, Any]:
    """New state machines of a resolved scenario, by name. A journal of a run of the scenario can be replayed on
    them.
    """
    instances = [*build_instances(scenario), *encode_instances(scenario)]
    machines: dict[str, Any] = {i.instance_id: i for i in instances}
    machines |= {a.instance_id: a for a in build_agents(scenario)} | {"router": build_router(scenario)}
    watching = [one for one in (build_autoscaler(scenario), build_monitor(scenario)) if one is not None]
    return machines | {one.instance_id: one for one in watching}


def restarted(scenario: Scenario, name: str) -> AnyInstance | Sender | Receiver:
    """The state machine of an instance, sender or receiver after its restart. Its memory is empty. The scenario must be
    resolved.
    """
    return build_machine(scenario, name, has_restarted=True)


def build_instances(scenario: Scenario) -> list[AnyInstance]:
    """Returns new prefill and decode instances, or new aggregated instances. The scenario must be resolved."""
    return [_instance(scenario, role, i) for role, ids in roles(scenario).items() for i in ids]


Agent = Sender | Receiver | DividedRequests


def build_agents(scenario: Scenario) -> list[Agent]:
    """New agents for KV and embeddings. Each prefill instance has a sender of KV. With staging, each decode instance
    has a receiver of KV. With encode instances, each prefill or aggregated instance has one more agent: in SGLang a
    receiver of embeddings, in vLLM a proxy that lets encode instances encode a request's media before the request goes
    on.
    """
    encoders = encode_ids(scenario)
    agents: list[Agent] = []
    if encoders and scenario.engine == "vllm":
        agents += [EncodingProxy(i, encoders) for i in language_ids(scenario)]
    elif encoders:
        agents += [EmbeddingReceiver(i, encoders, seed=scenario.seed + n) for n, i in enumerate(language_ids(scenario))]
    if scenario.aggregated is not None:
        return agents
    ids_by_role = roles(scenario)
    agents += [_sender(scenario, ids_by_role, i) for i in ids_by_role["prefill"]]
    receivers = [] if scenario.network.staging is None else ids_by_role["decode"]
    return [*agents, *(_receiver(scenario, ids_by_role, i, has_restarted=False) for i in receivers)]


def build_machine(scenario: Scenario, name: str, *, has_restarted: bool = False) -> AnyInstance | Sender | Receiver:
    """Builds the instance, sender or receiver of this name. Raises KeyError for other names. The scenario must be
    resolved. has_restarted: True: the machine takes the place of one that died. A receiver then knows that all senders
    have an outdated view of its memory; instances and senders ignore this argument.
    """
    ids_by_role = roles(scenario)
    for role, ids in ids_by_role.items():
        for instance_id in ids:
            if name == instance_id:
                return _instance(scenario, role, instance_id)
            if name == sender_of(instance_id):
                return _sender(scenario, ids_by_role, instance_id)
            if name == receiver_of(instance_id):
                return _receiver(scenario, ids_by_role, instance_id, has_restarted=has_restarted)
    raise KeyError(name)


def _instance(scenario: Scenario, role: Role, instance_id: str) -> AnyInstance:
    """Builds an instance with copies of the policies for this instance alone, because policies may keep state."""
    health = scenario.health
    waiting_timeout_ns = None if health is None else health.waiting_timeout
    if (aggregated := scenario.aggregated) is not None:
        if scenario.engine == "vllm":
            return _vllm_aggregated_instance(scenario, aggregated, instance_id)
        conservativeness = aggregated.schedule_conservativeness * (1 if aggregated.dp == 1 else DP_CONSERVATIVENESS)
        make: Callable[..., AggregatedInstance] = AggregatedInstance
        if aggregated.pp > 1:
            make = partial(StagedAggregatedInstance, num_stages=aggregated.pp, shares_turns=aggregated.dp > 1)
        return make(
            instance_id,
            cache=kv_cache(scenario, role),
            limits=AggregatedLimits(
                max_running_requests=aggregated.resolved_max_running,
                chunked_prefill_tokens=aggregated.rank_chunk_tokens or None,
                max_prefill_tokens=aggregated.max_prefill_tokens,
                prefill_max_requests=aggregated.prefill_max_requests,
                schedule_conservativeness=conservativeness,
                overlap=aggregated.overlap,
                drafts=aggregated.drafts(scenario.page_size),
                wave_requests=_wave_requests(scenario, role),
                waiting_timeout_ns=waiting_timeout_ns,
                preemption_threshold=aggregated.priority_preemption_threshold,
                mixed_chunk=aggregated.mixed_chunk,
                recv_interval_steps=aggregated.scheduler_recv_interval,
                rules=scenario.engine_rules,
            ),
            policy=deepcopy(aggregated.policy),
            preemption_policy=deepcopy(aggregated.preemption),
        )
    return _prefill_instance(scenario, instance_id) if role == "prefill" else _decode_instance(scenario, instance_id)


def _vllm_aggregated_instance(scenario: Scenario, aggregated: AggregatedSettings, instance_id: str) -> DecodeInstance:
    make: Callable[..., DecodeInstance] = partial(VllmDecodeInstance, reads=embedding_reads(scenario, instance_id))
    if aggregated.pp > 1:
        make = partial(StagedVllmInstance, num_stages=aggregated.pp)
    return make(
        instance_id,
        cache=kv_cache(scenario, "aggregated"),
        limits=DecodeLimits(
            max_running_requests=aggregated.resolved_max_running,
            wave_requests=_wave_requests(scenario, "aggregated"),
            rules=scenario.engine_rules,
        ),
        budget=replace(
            _token_budget(scenario, aggregated), prefill_interval_steps=aggregated.prefill_schedule_interval
        ),
        admission_policy=FreePages(),
        preemption_policy=deepcopy(aggregated.preemption),
        policy=deepcopy(aggregated.policy),
    )


def _prefill_instance(scenario: Scenario, instance_id: str) -> PrefillInstance:
    prefill, health = scenario.pair.prefill, scenario.health
    is_vllm = scenario.engine == "vllm"
    cache = kv_cache(scenario, "prefill", keeps_replaced=prefill.layer_groups > 0)
    limits = PrefillLimits(
        max_running_requests=prefill.resolved_max_running,
        chunked_prefill_tokens=prefill.rank_chunk_tokens or None,
        max_prefill_tokens=prefill.max_prefill_tokens,
        prefill_max_requests=prefill.prefill_max_requests,
        overlap=prefill.overlap,
        bootstrap_timeout_ns=None if health is None or is_vllm else health.bootstrap_timeout,
        optimistic_attempts=prefill.optimistic_attempts or 0,
        num_stages=prefill.pp,
        rules=scenario.engine_rules,
    )
    policy, planner = deepcopy(prefill.policy), wiring.planner(scenario, instance_id)
    taker = KvTaker(cache) if scenario.pair.decode.returns_kv else None
    make: Callable[..., PrefillInstance] = partial(PrefillInstance, sizer=chunk_sizer(scenario))
    if is_vllm:
        hold_ns, lease = prefill.hold_timeout, _lease(scenario)
        make = partial(
            VllmPrefillInstance,
            budget=_token_budget(scenario, prefill),
            hold_timeout_ns=hold_ns,
            lease=lease,
            reads=embedding_reads(scenario, instance_id),
        )
    return make(instance_id, cache=cache, limits=limits, policy=policy, planner=planner, taker=taker)


def _lease(scenario: Scenario) -> LeaseTimes:
    """Returns the durations after which vLLM's prefill frees KV whose decode instance has died: prefill.hold_timeout,
    or if the scenario does not give it, those of the transport's connector (Mooncake or NIXL).
    """
    if (timeout_ns := scenario.pair.prefill.hold_timeout) is not None:
        return LeaseTimes(timeout_ns)
    return MOONCAKE if scenario.network.transport.startswith("mooncake") else NIXL


def _decode_instance(scenario: Scenario, instance_id: str) -> DecodeInstance:
    (prefill, decode), health = scenario.pair, scenario.health
    cache = kv_cache(scenario, "decode")
    limits = DecodeLimits(
        max_running_requests=decode.resolved_max_running,
        extra_slots=decode.extra_slots or 0,
        waiting_timeout_ns=None if health is None else health.waiting_timeout,
        release_timeout_ns=None if health is None else health.release_timeout,
        polling_interval_steps=decode.polling_interval,
        saves_retracted=decode.retraction_backup,
        retracts_to_host_cache=decode.retracts_to_host_cache,
        drafts=decode.drafts(scenario.page_size),
        wave_requests=_wave_requests(scenario, "decode"),
        grants_computed_only=decode.allocation == "prefill_complete",
        rules=scenario.engine_rules,
    )
    giver = None
    if decode.returns_kv:
        giver = KvGiver(instance_id, cache, wiring.wire_of(scenario))
    make: Callable[..., DecodeInstance] = partial(
        DecodeInstance, staged=scenario.network.staging is not None, giver=giver
    )
    if isinstance(cache, HiSparseCache):
        make = HiSparseDecodeInstance
    elif scenario.engine == "vllm":
        make = partial(VllmDecodeInstance, budget=_token_budget(scenario, prefill), giver=giver)
    elif decode.pp > 1:
        make = partial(StagedDecodeInstance, num_stages=decode.pp, shares_turns=decode.dp > 1)
    policies = {"admission_policy": deepcopy(decode.admission), "preemption_policy": deepcopy(decode.preemption)}
    return make(instance_id, cache=cache, limits=limits, **policies)


def _token_budget(scenario: Scenario, settings: ComputingSettings) -> TokenBudget:
    return TokenBudget(
        step_tokens=settings.rank_chunk_tokens or None,
        prompt_tokens=settings.long_prefill_tokens,
        has_fair_shares=settings.long_prefill_adaptive,
        encoder_tokens=encoder_tokens(scenario, settings),
        splits_media=settings.chunked_media,
    )


def _wave_requests(scenario: Scenario, role: Role) -> float | None:
    waves = attention_waves(scenario, role)
    return None if waves is None else waves.num_requests


def _sender(scenario: Scenario, ids_by_role: Mapping[Role, list[str]], prefill_id: str) -> Sender:
    transport = wiring.transport(scenario)
    return Sender(
        prefill_id,
        ids_by_role["decode"],
        num_queues=transport.num_queues,
        by_request=transport.queue_by == "request",
        staged=scenario.network.staging is not None,
    )


def _receiver(
    scenario: Scenario, ids_by_role: Mapping[Role, list[str]], decode_id: str, *, has_restarted: bool
) -> Receiver:
    staging, health = scenario.network.staging, scenario.health
    assert staging is not None, "without staging there are no receivers"
    return Receiver(
        decode_id,
        ids_by_role["prefill"],
        StagingRing(staging.ring),
        release_timeout_ns=None if health is None else health.release_timeout,
        has_restarted=has_restarted,
    )


def build_monitor(scenario: Scenario) -> HealthMonitor | None:
    """The health monitor of a cluster, which reports dead instances to the router, to the instances of the other role,
    and to receivers. None: the scenario has no section `health`.
    """
    if (health := scenario.health) is None:
        return None
    ids_by_role = roles(scenario)
    peers = {i: [Router.instance_id] for ids in ids_by_role.values() for i in ids}
    if scenario.aggregated is None:
        prefill_ids, decode_ids = ids_by_role["prefill"], ids_by_role["decode"]
        receivers = [] if scenario.network.staging is None else [receiver_of(i) for i in decode_ids]
        peers = {i: [*decode_ids, *receivers, Router.instance_id] for i in prefill_ids}
        peers |= {i: [*prefill_ids, Router.instance_id] for i in decode_ids}
    times = {"max_failures": health.heartbeat_failures, "interval_ns": health.heartbeat_interval}
    return HealthMonitor(peers, **times)


def build_autoscaler(scenario: Scenario) -> Autoscaler | None:
    """The autoscaler, which decides how many servers prefill and decode. None: servers keep their roles. The scenario
    must be resolved.
    """
    if (elastic := scenario.elastic) is None:
        return None
    prefill, decode = scenario.pair
    return Autoscaler(
        initial=Servers(prefill.instances, decode.instances),
        max_servers=scenario.max_servers,
        times=ScalingTimes(
            interval_ns=elastic.interval,
            start_up_ns=elastic.start_up,
            switch_ns=elastic.switch,
            drain_timeout_ns=elastic.drain_timeout,
        ),
        policy=deepcopy(elastic.policy),
        router_id=Router.instance_id,
    )


def _with_own_draws(policy: Any) -> Any:
    """Returns decode's copy of a routing policy. Its seed differs from the seed of prefill's copy, so that both draw
    independently. A policy that does not draw with pdsim's `Draws` stays as it is.
    """
    if hasattr(policy, "otherwise"):  # a policy of sessions
        policy.otherwise = _with_own_draws(policy.otherwise)
    if isinstance(getattr(policy, "_draws", None), Draws):
        return replace(policy, seed=policy.seed + DECODE_SEED)
    return policy


def _build_role(scenario: Scenario, role: Role, given: RoutingPolicy) -> RoleRouter:
    """Builds the router of one role, which picks an instance for each request. If servers choose among their
    data-parallel ranks themselves, the policy picks a server, and the server's load_balance_method picks the rank.
    given: the scenario's policy, which is copied.
    """
    ids, memory = roles(scenario)[role], REMEMBERED
    policy = deepcopy(given)
    if role == "decode":
        policy = _with_own_draws(policy)
    servers: ServerSettings = getattr(scenario, role)
    method = balance_method(scenario, role)
    if getattr(given, "is_kv_aware", False):
        assert servers.pool_tokens is not None, "the scenario is not resolved"
        num_ranks = 1 if method is None else servers.dp
        memory = MemorySize(scenario.page_tokens(role), num_ranks * servers.pool_tokens)
    if method is None:
        return RoleRouter(ids, policy, role, memory)
    ranks: dict[str, list[str]] = {}
    for instance_id in ids:
        ranks.setdefault(server_of(instance_id), []).append(instance_id)
    own = {server: rank_policy(method, scenario.seed + index) for index, server in enumerate(ranks)}
    return RankedRouter(ranks, policy, own, role, memory)


def build_router(scenario: Scenario) -> Router:
    """The router of the cluster. Retries requests only if the scenario has a section `health`."""
    settings, health = scenario.router, scenario.health
    limits = NO_RETRIES
    if health is not None:
        limits = RetryLimits(max_retries=health.max_retries, backoff_jitter=health.backoff_jitter, seed=scenario.seed)
    if scenario.aggregated is not None:
        prefill, decode = _build_role(scenario, "aggregated", settings.prefill), None
    else:
        prefill = _build_role(scenario, "prefill", settings.prefill)
        decode = _build_role(scenario, "decode", settings.decode)
    if scenario.elastic is not None and decode is not None:
        first, more = (servers.instances for servers in scenario.pair)
        for i in range(scenario.max_servers):  # the first servers prefill, the next decode, the others are off
            if i >= first:
                prefill.note(Drain(f"prefill-{i}"))
            if not first <= i < first + more:
                decode.note(Drain(f"decode-{i}"))
    held = None
    if settings.queue is not None:
        held = HeldRequests(deepcopy(settings.queue), prefill, _forward_tokens(scenario))
    return Router(
        prefill=prefill,
        decode=decode,
        limits=limits,
        shedding=deepcopy(settings.shedding),
        disaggregation=None if scenario.aggregated is not None else deepcopy(settings.disaggregation),
        counts_streams=settings.counts == "streams",
        held=held,
    )


def _forward_tokens(scenario: Scenario) -> int:
    """Returns the number of tokens that servers report to Dynamo's router as the maximum of one rank's forward
    (max_num_batched_tokens). SGLang: max_prefill_tokens, even if chunks are smaller. vLLM: the chunk size of a rank.
    """
    servers = scenario.aggregated or scenario.pair.prefill
    return servers.max_prefill_tokens if scenario.engine == "sglang" else servers.rank_chunk_tokens
