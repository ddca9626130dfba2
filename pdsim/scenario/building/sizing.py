"""Sizes of instances (parallel layout, KV pool, running requests, chunks). Missing sizes are the engine's defaults."""

from dataclasses import replace
from typing import Any

from pdsim.cost.roofline import balanced_skew
from pdsim.cost.settings import Kernels, Roofline
from pdsim.cost.step_times import SM_BANDWIDTH, AttentionWaves
from pdsim.policy.ranks import LoadBalanceMethod
from pdsim.scenario.building.hisparse import resolved_hisparse
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import HealthSettings
from pdsim.scenario.sections.front_end import FrontEndSettings
from pdsim.scenario.sections.servers import ComputingSettings, DecodeSettings, PrefillSettings, ServerSettings
from pdsim.scenario.sections.speculation import DEFAULT_RUNNING, DraftError, draft_model
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system import memory, pipeline_stages
from pdsim.system.catalog import CatalogError, load_gpu, load_model
from pdsim.system.model import GroupedQueryAttention, LatentAttention, ModelSpec
from pdsim.system.states import StateRule, StateStrategy, slots_per_request

HOST_RATIO = 2
"""Host memory in bytes per byte of the GPU's pool if host_cache is auto (SGLang's --hicache-ratio)."""
_SMALL_BATCH = 32
"""If max_running_requests per rank is given and at most this, the default of extra_slots is twice it; otherwise 0."""


def instance_ids(settings: ServerSettings, role: memory.Role) -> list[str]:
    """Names of the servers of a role. With data-parallel attention: names of the ranks of each server."""
    if settings.dp == 1:
        return [f"{role}-{i}" for i in range(settings.instances)]
    return [f"{role}-{i}.dp{rank}" for i in range(settings.instances) for rank in range(settings.dp)]


def server_of(instance_id: str) -> str:
    """Name of the server to which an instance belongs. The instance may be one of the server's data-parallel ranks."""
    return instance_id.partition(".dp")[0]


def balance_method(scenario: Scenario, role: memory.Role) -> LoadBalanceMethod | None:
    """How a server of this role picks the data-parallel rank for a request. None: the server has one rank, or the
    router picks ranks.

    Source of auto: SGLang 0.5.23, arg_groups/serving_hook.py, handle_load_balance_method.
    """
    servers = scenario.roles[role]
    if servers.dp == 1 or servers.load_balance_method == "router":
        return None
    if servers.load_balance_method != "auto":
        return servers.load_balance_method
    if scenario.engine != "sglang":
        return None
    return "follow_bootstrap_room" if role == "prefill" else "round_robin"


def roles(scenario: Scenario) -> dict[memory.Role, list[str]]:
    """The roles that the cluster has, each with the names of its instances."""
    if scenario.elastic is not None:  # any server may have any role
        return {role: [f"{role}-{i}" for i in range(scenario.max_servers)] for role in scenario.roles}
    return {role: instance_ids(servers, role) for role, servers in scenario.roles.items()}


def encode_ids(scenario: Scenario) -> list[str]:
    """Names of the encode instances. Empty: the cluster has none."""
    return [] if scenario.encode is None else [f"encode-{i}" for i in range(scenario.encode.instances)]


def layout_of(scenario: Scenario, role: memory.Role) -> memory.Layout:
    settings: ServerSettings = getattr(scenario, role)
    if settings.tp % settings.dp:
        raise ConfigError(f"{role}: dp {settings.dp} does not divide tp {settings.tp}")
    if settings.ep not in (None, 1, settings.tp):
        raise ConfigError(f"{role}.ep: {settings.ep}: pdsim models ep 1, and ep of all {settings.tp} GPUs of a server")
    try:
        model, gpu = load_model(scenario.model), load_gpu(settings.gpu)
        if scenario.weight_dtype is not None:
            model = model.in_dtype(scenario.weight_dtype)
        if scenario.encode is not None and role != "decode" and scenario.engine == "sglang":
            model = replace(model, encoder=None, audio_encoder=None)
        skew = _expert_skew(scenario, role, model)
        if scenario.context_tokens is not None:
            model = replace(model, max_context_tokens=scenario.context_tokens)
        if settings.redundant_experts is not None:
            model = model.with_redundant(settings.redundant_experts)
        (_, num_stages, cp, dcp), decoding = settings.split, scenario.servers[1]
        if settings.tp % cp:
            raise ConfigError(f"{role}: cp {cp} does not divide tp {settings.tp}")
        if num_stages > model.num_layers:
            raise ConfigError(f"{role}: pp {num_stages} is more than the {model.num_layers} layers of {model.name}")
        if model.experts is None and settings.ep not in (None, 1):
            raise ConfigError(f"{role}.ep: {model.name} has no experts; leave it out")
        found = memory.Layout(
            model=pipeline_stages.largest_stage(model, num_stages),
            gpu=gpu,
            tp=settings.tp // (settings.dp * cp),
            dp=settings.dp,
            pp=num_stages,
            cp=cp,
            dcp=dcp,
            dcp_rules=memory.DCP_RULES[scenario.engine],
            has_whole_experts=settings.has_whole_experts,
            moe_a2a_backend=settings.moe_a2a_backend,
            sums_prompts=scenario.engine != "vllm",
            switches_reduce=scenario.engine != "sglang",
            expert_skew=skew,
            overlaps_batches=settings.two_batch_overlap,
            attention_backend=settings.attention_backend,
            num_draft_layers=scenario.num_draft_layers,
            draft=draft_model(decoding, model, load_model),
            num_verified_tokens=1 if role == "prefill" else decoding.num_verified_tokens,
            hisparse_ratio=settings.hisparse_ratio,
            kv_dtype=scenario.kv_dtype,
            state_dtype=scenario.state_dtype,
        )
    except (CatalogError, memory.LayoutError, DraftError) as wrong:
        raise ConfigError(f"{role}: {wrong}") from None
    if found.num_domains > 1 and scenario.elastic is not None:
        raise ConfigError(f"{role}: pdsim does not model servers over several {found.gpu.domain}s that change role")
    return found


def whole_layout(scenario: Scenario, role: memory.Role) -> memory.Layout:
    """The layout of a role as if each instance had one pipeline stage, which holds the KV of all layers."""
    settings: ServerSettings = getattr(scenario, role)
    if settings.split.pp > 1:
        scenario = scenario.model_copy(update={role: settings.model_copy(update={"pp": 1})})
    return layout_of(scenario, role)


def _expert_skew(scenario: Scenario, role: memory.Role, model: ModelSpec) -> float:
    """How many more tokens than the mean the experts of the busiest GPU get, as a share of the mean, after redundant
    experts have reduced the skew. Raises ConfigError if the servers or the cost model cannot have the skew or the
    redundant experts that the scenario sets.
    """
    settings: ServerSettings = getattr(scenario, role)
    skew, redundant, num_gpus = settings.expert_skew, settings.redundant_experts, settings.tp
    if skew == 0 and redundant is None:
        return 0.0
    field = f"{role}.{'expert_skew' if skew else 'redundant_experts'}"
    if model.experts is None:
        raise ConfigError(f"{field}: {model.name} has no experts; leave it out")
    if not settings.has_whole_experts:
        found = f"dp {settings.dp}" + ("" if settings.ep is None else f" and ep {settings.ep}")
        raise ConfigError(f"{field}: a server's GPUs hold whole experts with dp > 1 or ep > 1 only, found {found}")
    costs = (scenario.cost.prefill, scenario.cost.decode) if role == "aggregated" else (getattr(scenario.cost, role),)
    if not all(isinstance(cost, Kernels | Roofline) for cost in costs):
        raise ConfigError(f"{field}: only the cost models kernels and roofline have times of experts")
    if skew > num_gpus - 1:
        raise ConfigError(
            f"{field}: at most {num_gpus - 1}, when one of {num_gpus} GPUs has all tokens; found {skew:g}"
        )
    if redundant is None:
        return skew
    num_experts = model.experts.num_experts
    if rest := (num_experts + redundant) % num_gpus:
        near = " or ".join(str(n) for n in (redundant - rest, redundant - rest + num_gpus) if n >= 0)
        wrong = f"{num_experts} + {redundant} experts do not divide among {num_gpus} GPUs"
        raise ConfigError(f"{role}.redundant_experts: {wrong}; try {near}")
    return balanced_skew(skew, num_experts, redundant, num_gpus)


def attention_waves(scenario: Scenario, role: memory.Role) -> AttentionWaves | None:
    """Returns the waves of thread blocks in which an instance computes decode attention. None: the scenario gives no
    cost.attention_sm_bandwidth, and the cost model is not `kernels`. If the model has latent KV or the catalog has no
    num_sms of the GPU: raises ConfigError if the bandwidth is given, otherwise returns None.
    """
    cost, layout = scenario.cost, layout_of(scenario, role)
    bandwidth, attention, num_sms = cost.attention_sm_bandwidth, layout.model.attention, layout.gpu.num_sms
    unknown = ""
    if isinstance(attention, LatentAttention):
        unknown = f"{layout.model.name} has latent KV, for which pdsim does not model waves"
    elif num_sms is None:
        unknown = f"the catalog has no num_sms of {layout.gpu.name}"
    if bandwidth is None and isinstance(cost.decode, Kernels) and not unknown:
        bandwidth = SM_BANDWIDTH / cost.decode.factor
    if bandwidth is None:
        return None
    if unknown:
        raise ConfigError(f"cost.attention_sm_bandwidth: {unknown}")
    assert isinstance(attention, GroupedQueryAttention)
    assert num_sms is not None
    num_heads, whole = max(1, attention.num_kv_heads // layout.tp), 1 - attention.window_share
    return AttentionWaves(
        num_sms=num_sms,
        num_heads=num_heads,
        token_ns=1e9 * whole * layout.read_token_bytes / num_heads / bandwidth,
        merge_ns=whole * attention.num_layers * cost.attention_merge,
    )


def resolve(scenario: Scenario) -> Scenario:
    """Returns the scenario with health, front end and the sizes of servers filled in, such as the pool size. With the
    field `corner`, times are the fastest or slowest of a range. Raises ConfigError if an instance is impossible.
    """
    scenario = with_state_blocks(scenario.at_corner)
    health = HealthSettings() if scenario.faults and scenario.health is None else scenario.health
    update: dict[str, Any] = {"health": health, "front_end": _resolved_front_end(scenario)}
    if (aggregated := scenario.aggregated) is not None:
        update["aggregated"] = aggregated.model_copy(update=_resolved_computing(scenario, aggregated, "aggregated"))
    else:
        _check_divided_kv(scenario)
        prefill, decode = scenario.pair
        attempts = {"optimistic_attempts": _optimistic_attempts(prefill, decode)}
        update["prefill"] = prefill.model_copy(update={**_resolved_computing(scenario, prefill, "prefill"), **attempts})
        update["decode"] = decode.model_copy(update=_resolved_decode(scenario, decode))
    return scenario.model_copy(update=update)


def with_state_blocks(scenario: Scenario) -> Scenario:
    """The scenario with vLLM's page size for models with linear attention: on every role, one layer's part of a page
    holds the layer's state. Other scenarios keep their page size. Raises ConfigError if vLLM or pdsim cannot
    combine the model with the connector (LMCache or KVBM) of a role.
    """
    if scenario.engine != "vllm":
        return scenario
    page = max([layout_of(scenario, role).block_tokens(scenario.page_size) for role in scenario.roles])
    _check_connectors(scenario)
    return scenario.model_copy(update={"page_size": page})


def _check_connectors(scenario: Scenario) -> None:
    """Raises ConfigError if a role has the connector LMCache or KVBM, and vLLM either does not start the model with
    this connector, or then stores KV in a way that pdsim does not model.
    """
    model = load_model(scenario.model)
    wrong = ""
    if model.state is not None:
        wrong = "vLLM does not start a model with linear attention beside it (0.33.0, config/vllm.py:2269)"
    elif model.attention.kept_window_tokens:
        wrong = (
            "beside it, vLLM keeps the whole KV of layers with a sliding window (0.33.0, config/vllm.py:2269), "
            "which pdsim does not model"
        )
    for role, servers in scenario.roles.items():
        if wrong and servers.host_cache is not None and servers.host_cache_connector != "offloading":
            raise ConfigError(f"{role}.host_cache_connector: {servers.host_cache_connector}: {wrong}; say offloading")


def _check_divided_kv(scenario: Scenario) -> None:
    """Raises ConfigError if the decode GPUs divide the KV of a request (dcp) and the engine cannot send KV from prefill
    to such GPUs.
    """
    if scenario.pair.decode.dcp == 1:
        return
    layout = layout_of(scenario, "decode")
    attention, tp = layout.model.attention, layout.tp
    if not isinstance(attention, LatentAttention):
        at = "SGLang 0.5.23, disaggregation/common/conn.py:1412; vLLM 0.33.0, config/vllm.py:1587"
        wrong = f"{scenario.model} has no latent KV, and prefill can send no other KV to GPUs that divide it ({at})"
    elif scenario.engine == "sglang" and attention.index_token_bytes:
        at = "0.5.23, arg_groups/model_overrides/deepseek_v2.py:23"
        wrong = f"SGLang cannot divide the KV of sparse attention that prefill sends ({at})"
    elif scenario.engine == "vllm" and layout.dcp != tp:
        wrong = f"vLLM divides the KV that prefill sends over all {tp} GPUs (0.33.0, config/vllm.py:1582)"
    elif scenario.engine == "vllm" and layout.model.state is not None:
        at = "0.33.0, nixl/base_worker.py:2714"
        wrong = f"for models with linear attention, vLLM needs the same dcp on prefill ({at})"
    else:
        return
    raise ConfigError(f"decode.dcp {layout.dcp}: {wrong}")


def _resolved_front_end(scenario: Scenario) -> FrontEndSettings:
    """Returns the scenario's front end, with waits_for_prefill filled in. If the scenario gives none: the engine's HTTP
    server if the cost model of prefill or decode is `kernels`, otherwise a front end that takes no time.
    """
    front_end = scenario.front_end
    if front_end is None and not scenario.cost.is_of_kernels:
        return FrontEndSettings(waits_for_prefill=False)
    front_end = front_end or FrontEndSettings(kind="engine")
    waits = front_end.waits_for_prefill
    waits = scenario.aggregated is None and (scenario.engine == "sglang" if waits is None else waits)
    return front_end.model_copy(update={"waits_for_prefill": waits})


def _resolved_computing(scenario: Scenario, settings: ComputingSettings, role: memory.Role) -> dict[str, Any]:
    layout = layout_of(scenario, role)
    chunk = settings.chunked_prefill_tokens
    if chunk is None:
        tokens = memory.memory_tier(layout.gpu, layout.tp).chunked_prefill_tokens
        chunk = memory.vllm_batch(layout.gpu).num_tokens * layout.dp if scenario.engine == "vllm" else tokens
    chunk = max(chunk, 0)  # 0: no chunking
    page = scenario.page_tokens(role)
    if 0 < chunk < page * settings.dp:
        least = "a page" if settings.dp == 1 else f"a page for each of {settings.dp} ranks, with pages"
        raise ConfigError(f"{role}: chunked_prefill_tokens {chunk} is less than {least} of {page} tokens")
    fraction = memory.default_mem_fraction(layout.gpu, settings.num_server_gpus, role, chunk or None, None)
    if layout.model.encoder is not None:
        fraction *= memory.encoder_share(layout.model.encoder)
    return {**_resolved_memory(scenario, settings, layout, fraction, role), "chunked_prefill_tokens": chunk}


def _resolved_decode(scenario: Scenario, settings: DecodeSettings) -> dict[str, Any]:
    layout, given = layout_of(scenario, "decode"), settings.max_running_requests
    drafts = settings.num_verified_tokens
    fraction = memory.default_mem_fraction(layout.gpu, settings.tp, "decode", None, given, draft_tokens=drafts)
    extra = settings.extra_slots
    if extra is None:
        running = None if given is None else max(1, given // settings.dp)
        extra = 2 * running if running is not None and running <= _SMALL_BATCH else 0
    found = {**_resolved_memory(scenario, settings, layout, fraction, "decode"), "extra_slots": extra}
    if settings.hisparse is not None:
        found["hisparse"] = resolved_hisparse(settings.hisparse, layout, scenario.page_size, found["pool_tokens"])
    return found


def _resolved_memory(
    scenario: Scenario, settings: ServerSettings, layout: memory.Layout, fraction: float, role: memory.Role
) -> dict[str, Any]:
    """Values of mem_fraction, pool_tokens (of one data-parallel rank), max_running_requests (of all ranks) and
    host_cache (bytes). SGLang's slots for linear-attention states limit max_running_requests, and pool_tokens if the
    scenario does not give it. fraction: SGLang's default of mem_fraction.
    """
    fraction = settings.mem_fraction or (memory.VLLM_MEM_FRACTION if scenario.engine == "vllm" else fraction)
    page, pool, rule = scenario.page_tokens(role), settings.pool_tokens, state_rule(scenario, settings, layout, role)
    if pool is None:
        try:
            pool = layout.pool_tokens(fraction, page, engine=scenario.engine, states=rule)
        except memory.LayoutError as wrong:
            raise ConfigError(f"{role}: {wrong}") from None
    elif pool < page:
        raise ConfigError(f"{role}: pool_tokens {pool} is less than a page of {page} tokens")
    pool = pool // page * page
    if (given := _given_running(scenario, settings)) is not None:
        running = max(1, given // settings.dp)
    elif scenario.engine == "vllm":
        running = memory.vllm_batch(layout.gpu).num_requests
    else:
        running = memory.default_max_running(pool, layout.model.max_context_tokens)
    if layout.state_bytes and rule is not None:
        slots = slots_of_request(scenario, settings)
        running = max(1, min(running, layout.states(fraction, rule).num_slots // slots))
    host = settings.host_cache
    attention = layout.model.attention
    if host is not None and layout.dcp > 1 and (not isinstance(attention, LatentAttention) or attention.sparse_tokens):
        at = "0.5.23, arg_groups/hicache_hook.py:157, model_overrides/deepseek_v2.py:21"
        raise ConfigError(
            f"{role}.host_cache: SGLang copies divided KV to the host for dense latents only ({at}); leave it out"
        )
    if host == "auto":
        host = HOST_RATIO * pool * layout.kv_token_bytes
    all_ranks = running * settings.dp
    return {"mem_fraction": fraction, "pool_tokens": pool, "max_running_requests": all_ranks, "host_cache": host}


def _given_running(scenario: Scenario, settings: ServerSettings) -> int | None:
    """Returns the maximum number of running requests of a server that the scenario or speculation sets, else None."""
    has_drafts = scenario.acceptance is not None
    return settings.max_running_requests or (DEFAULT_RUNNING if has_drafts else None)


def state_rule(
    scenario: Scenario, settings: ServerSettings, layout: memory.Layout, role: memory.Role
) -> StateRule | None:
    """Returns how SGLang divides memory between KV and state slots of linear-attention layers. None: the engine is
    vLLM. Raises ConfigError if the engine or pdsim lacks the settings of these states.
    """
    if scenario.engine == "vllm":
        if layout.state_bytes and settings.host_cache is not None and not settings.radix_cache:
            raise ConfigError(f"{role}.host_cache: pdsim models states in host memory with radix_cache: true only")
        return None
    given, has_drafts = _given_running(scenario, settings), scenario.acceptance is not None
    if settings.mamba_radix_cache_strategy is not None and not layout.state_bytes:
        name = layout.model.name
        raise ConfigError(f"{role}.mamba_radix_cache_strategy: {name} has no layers of linear attention; leave it out")
    if layout.state_bytes and settings.radix_cache and (wrong := _wrong_strategy(scenario, settings)):
        raise ConfigError(f"{role}.mamba_radix_cache_strategy: no_buffer: {wrong}; say extra_buffer")
    interval = settings.mamba_track_interval
    if interval is not None and (wrong := _wrong_interval(interval, scenario, settings, layout)):
        raise ConfigError(f"{role}.mamba_track_interval: {interval}, but {wrong}")
    return StateRule(
        slots_per_request=slots_of_request(scenario, settings),
        num_verified=0 if role == "prefill" or not has_drafts else scenario.servers[1].num_verified_tokens,
        max_running=None if given is None else max(1, given // settings.dp),
        is_fixed=not settings.radix_cache,
    )


def _wrong_strategy(scenario: Scenario, settings: ServerSettings) -> str:
    if strategy_of(scenario, settings) == "extra_buffer":
        return ""
    if scenario.engine_version == "0.5.12":
        has_drafts = scenario.acceptance is not None
        return (
            "SGLang 0.5.12 has no radix cache beside this strategy and drafts (server_args.py:2569)"
            if has_drafts
            else ""
        )
    if scenario.page_size > 1:
        return f"SGLang needs pages of 1 token, found {scenario.page_size} (0.5.23, arg_groups/mamba_hook.py:157)"
    return ""


def _wrong_interval(interval: int, scenario: Scenario, settings: ServerSettings, layout: memory.Layout) -> str:
    """Says why SGLang 0.5.23 refuses this value of mamba_track_interval. Empty: SGLang takes the value."""
    state = layout.model.state
    if state is None:
        return f"{layout.model.name} has no layers of linear attention; leave it out"
    if strategy_of(scenario, settings) == "no_buffer":
        return "no_buffer keeps no states of decode steps; leave it out"
    if interval % scenario.page_size:
        return f"SGLang needs a multiple of the page, {scenario.page_size} tokens (arg_groups/mamba_hook.py:135)"
    if interval < state.chunk_tokens:
        at = "layers/attention/hybrid_linear_attn_backend.py:1081"
        return f"SGLang needs at least the model's chunk, {state.chunk_tokens} tokens ({at})"
    return ""


def slots_of_request(scenario: Scenario, settings: ServerSettings) -> int:
    """Returns the number of linear-attention state slots per running request, including slots for cached states."""
    overlap = getattr(settings, "overlap", True)
    return slots_per_request(strategy_of(scenario, settings), radix_cache=settings.radix_cache, overlap=overlap)


def strategy_of(scenario: Scenario, settings: ServerSettings) -> StateStrategy:
    """The strategy by which an SGLang instance keeps states of linear-attention layers: no_buffer or extra_buffer."""
    has_buffer = scenario.engine == "sglang" and scenario.engine_version != "0.5.12"
    return settings.mamba_radix_cache_strategy or ("extra_buffer" if has_buffer else "no_buffer")


def _optimistic_attempts(prefill: PrefillSettings, decode: DecodeSettings) -> int:
    is_late = decode.allocation == "prefill_complete"
    attempts = int(is_late) if prefill.optimistic_attempts is None else prefill.optimistic_attempts
    if is_late and not attempts:
        raise ConfigError(
            "prefill.optimistic_attempts: 0, but decode.allocation prefill_complete grants pages to computed prompts "
            "only; give at least 1, or leave it out"
        )
    if attempts and prefill.layer_groups:
        why = "decode.allocation prefill_complete computes" if is_late else "prefill.optimistic_attempts computes"
        raise ConfigError(
            f"prefill.layer_groups: {prefill.layer_groups}, but {why} prompts before decode has pages for their KV: "
            "give 0, or decode.allocation early without optimistic_attempts"
        )
    return attempts


def host_caches(scenario: Scenario) -> list[tuple[memory.Role, str]]:
    """Returns role and name of each instance that has a host cache."""
    caches = {role: ids for role, ids in roles(scenario).items() if getattr(scenario, role).host_cache is not None}
    return [(role, i) for role, ids in caches.items() for i in ids]


def num_host_pages(scenario: Scenario, role: memory.Role) -> int:
    """Returns the number of pages of each host cache of this role. 0: no cache. The scenario must be resolved."""
    settings: ServerSettings = getattr(scenario, role)
    if (host_bytes := settings.host_cache_bytes) is None:
        return 0
    page_bytes: int = layout_of(scenario, role).kv_token_bytes * scenario.page_tokens(role)
    return host_bytes // page_bytes
