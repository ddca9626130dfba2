"""Scenarios that can be run for real, and with what precision."""

from collections.abc import Sequence

from pdreal.model.config import ModelError, model_config
from pdreal.options import Options
from pdreal.rank_spec import roles_of
from pdreal.serve.room import Room
from pdreal.transports.names import BETWEEN_HOSTS
from pdsim.scenario.build import build
from pdsim.scenario.faults import HealthSettings, SlowLink
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.model import KV_DTYPES
from pdsim.workload.request_spec import RequestSpec


def real_scenario(scenario: Scenario, options: Options) -> tuple[Scenario, Sequence[RequestSpec]]:
    """Resolved, and its requests. Raises ConfigError for what only the simulator has."""
    cluster = build(for_real(scenario, options))
    _check_hosts(cluster.scenario, options)
    room = _room(cluster.scenario, options)
    for spec in cluster.requests:
        if len(spec.prompt) > room.prompt_tokens:
            raise ConfigError(
                f"request {spec.request_id} has a prompt of {len(spec.prompt)} tokens; "
                f"there is room for {room.prompt_tokens}{room.why}"
            )
    return cluster.scenario, cluster.requests


def served_scenario(scenario: Scenario, options: Options) -> Scenario:
    """Resolved, to serve whoever asks: instances are watched, for clients go and processes die.

    Raises ConfigError, for what no request fits as well.
    """
    scenario = for_real(scenario, options)
    if scenario.aggregated is None and scenario.health is None:
        scenario = scenario.model_copy(update={"health": HealthSettings()})
    resolved = resolve(scenario)
    _check_hosts(resolved, options)
    _room(resolved, options)
    return resolved


def _check_hosts(scenario: Scenario, options: Options) -> None:
    """scenario: resolved. Raises ConfigError unless each instance has its host, and KV gets from one to the other."""
    if options.hosts is None:
        return
    options.hosts.placed(list(roles_of(scenario)))
    transport = scenario.network.transport
    if scenario.aggregated is None and not options.hosts.are_one_machine and transport not in BETWEEN_HOSTS:
        raise ConfigError(
            f"network.transport: {transport} stays on one host; between hosts are {', '.join(BETWEEN_HOSTS)}"
        )


def _room(scenario: Scenario, options: Options) -> Room:
    return Room.of(scenario, model_config(options, scenario.model).max_context_tokens)


def for_real(scenario: Scenario, options: Options) -> Scenario:
    """Not resolved. Raises ConfigError."""
    if scenario.engine != "sglang":
        raise ConfigError(f"engine: {scenario.engine}: instances of {scenario.engine} run in simulation only")
    if scenario.decode is not None and scenario.decode.returns_kv:
        raise ConfigError("decode.returns_kv: KV goes back to prefill in simulation only; leave it out")
    for field in ("pp", "cp"):
        if (size := getattr(scenario.prefill, field, 1)) > 1:
            raise ConfigError(f"prefill.{field}: {size}: it runs in simulation only; leave it out")
    if scenario.decode is not None and scenario.decode.retracts_to_host_cache:
        raise ConfigError("decode.retracts_to_host_cache: it is for simulation only; leave it out")
    if scenario.storage is not None:
        raise ConfigError("storage: storage behind host caches runs in simulation only; leave it out")
    if scenario.elastic is not None:
        raise ConfigError("elastic: servers change their roles in simulation only; leave it out")
    for role in ("prefill", "decode", "aggregated"):
        settings = getattr(scenario, role)
        if settings is not None and settings.dp > 1:
            raise ConfigError(f"{role}.dp: {settings.dp}: data-parallel attention runs in simulation only")
        if settings is not None and settings.has_whole_experts:
            raise ConfigError(f"{role}.ep: {settings.ep}: each expert is divided among all GPUs here; leave it out")
    for i, fault in enumerate(scenario.faults):
        if isinstance(fault, SlowLink):
            raise ConfigError(f"faults.{i}: links are slowed down in simulation only; here kill and abort are possible")
    try:
        context = model_config(options, scenario.model).max_context_tokens
    except ModelError as wrong:
        raise ConfigError(f"model: {wrong}") from None
    if (scenario.context_tokens or 0) > context:
        raise ConfigError(f"context_tokens: at most the model's own {context}; extended in simulation only")
    if scenario.acceptance is not None:
        raise ConfigError("speculative_draft_tokens: decoding with drafts runs in simulation only")
    health = scenario.health
    if options.hosts is not None:
        health = health or HealthSettings()  # or nobody would find out about a cut link
    decode = scenario.decode
    if decode is not None:
        decode = decode.model_copy(update={"retraction_backup": True})
    kv_dtype = "fp8" if options.kv_cache_dtype == "fp8" else KV_DTYPES[options.dtype]
    return scenario.model_copy(update={"kv_dtype": kv_dtype, "decode": decode, "health": health})
