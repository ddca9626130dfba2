"""Checks whether real mode can run a scenario, and how large a request may be."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from pdreal.control.refused import RefusedError
from pdreal.settings.host import BETWEEN_HOSTS
from pdreal.settings.model import MOST_VERIFIED_TOKENS, ModelConfig, ModelError, model_config
from pdreal.settings.options import Options, RealA2a
from pdreal.settings.rank import roles_of
from pdsim.policy.pages import ReserveDecodeTokens
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.building.wiring import storage_costs, wire_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import HealthSettings, SlowLink
from pdsim.scenario.sections.servers import DecodeSettings
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_model
from pdsim.system.model import DTYPE_BYTES, KV_DTYPES
from pdsim.workload.request_spec import RequestSpec

_TOKEN_BYTES = 64
"""Number of bytes that a request's body may have for each prompt token. A message part takes 30 bytes besides its text.
A token that is spelled out takes at most 21: its number of up to 9 digits, and two escaped characters (\\u003c) of 6
bytes each.
"""
_FIELDS_BYTES = 1 << 16
"""Maximum number of bytes that all fields of a request's HTTP body but the prompt may take."""


class Room(NamedTuple):
    """Limits for one request, in tokens: the largest that pools and context can hold. In the sum of prompt and output,
    the prompt counts in whole pages.
    """

    prompt_tokens: int
    """Largest number of prompt tokens of a request."""
    total_tokens: int
    """Largest number of prompt and output tokens of a request together; the prompt is rounded up to whole pages."""
    page_size: int = 1
    """Number of tokens of a page."""
    reserved_tokens: int = 0
    """Number of tokens of decode's pool that the admission policy keeps free. total_tokens already leaves them out;
    refusals name them as the reason.
    """

    @classmethod
    def of(cls, scenario: Scenario, context: int) -> "Room":
        """Returns the largest request that a resolved scenario's pools and a model's context can hold. Raises
        ConfigError if they can hold none.
        """
        page, reserved = scenario.page_size, 0
        if scenario.aggregated is not None:
            total = prompt = (scenario.aggregated.pool_tokens or 0) - page - 1 - _ahead(scenario)
        else:
            prefill, decode = scenario.pair
            prompt = (prefill.pool_tokens or 0) - 1 - page
            total, reserved = _decode_room(decode, page)
            total -= _ahead(scenario)
        room = cls(min(prompt, total - 1, context - 1), min(total, context), page, reserved)
        if room.prompt_tokens < 1:
            raise ConfigError(f"no request fits pool_tokens{room.why}")
        return room

    @property
    def body_bytes(self) -> int:
        """Largest size of a request's body in bytes."""
        return _FIELDS_BYTES + _TOKEN_BYTES * self.prompt_tokens

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises RefusedError for a request that does not fit. max_tokens: maximum number of output tokens."""
        paged = -(-num_prompt_tokens // self.page_size) * self.page_size
        if num_prompt_tokens > self.prompt_tokens or paged + max_tokens > self.total_tokens:
            raise RefusedError(
                f"the prompt has {num_prompt_tokens} tokens and asks for up to {max_tokens} more; there is room "
                f"for {self.prompt_tokens} prompt tokens, and for {self.total_tokens} with the output{self.why}"
            )

    @property
    def why(self) -> str:
        reserved = self.reserved_tokens
        return f", as decode.admission.reserved_tokens keeps {reserved} of decode's pool free" if reserved else ""


def _ahead(scenario: Scenario) -> int:
    """Number of tokens for which a request needs pages in addition to those of its prompt and output: the drafts of two
    steps.
    """
    return scenario.servers[1].num_ahead_tokens(scenario.page_size) - 1


def _decode_room(decode: DecodeSettings, page_size: int) -> tuple[int, int]:
    """Returns two numbers of tokens. The first is the largest size of a request (prompt and output together) that
    decode can admit, also again after a retraction. The second is the number of tokens that admission keeps free.
    """
    pool = decode.pool_tokens or 0
    if not isinstance(decode.admission, ReserveDecodeTokens):
        return pool + 1, 0
    reserved = decode.admission.reserved_tokens
    return min((pool - reserved) // page_size * page_size + 1, pool), reserved


def real_scenario(scenario: Scenario, options: Options) -> tuple[Scenario, Sequence[RequestSpec]]:
    """Returns the resolved scenario and its requests. Raises ConfigError if the scenario has features that only the
    simulator supports, or a prompt that does not fit.
    """
    cluster = build(for_real(scenario, options))
    _check_hosts(cluster.scenario, options)
    room = _room(cluster.scenario, options)
    for spec in cluster.requests:
        if spec.media:
            what = "images" if spec.media[0].modality == "image" else "audio clips"
            raise ConfigError(f"workload: request {spec.request_id} has {what}; real mode takes text only")
        if len(spec.prompt) > room.prompt_tokens:
            raise ConfigError(
                f"request {spec.request_id} has a prompt of {len(spec.prompt)} tokens; "
                f"there is room for {room.prompt_tokens}{room.why}"
            )
    return cluster.scenario, cluster.requests


def served_scenario(scenario: Scenario, options: Options) -> Scenario:
    """Returns the resolved scenario of a server. With prefill and decode instances, health checks are on, because
    clients disconnect and processes die. Raises ConfigError if a server cannot run the scenario, or no request fits the
    pools.
    """
    scenario = for_real(scenario, options)
    if scenario.acceptance is not None:
        raise ConfigError(
            "speculative_draft_tokens: a server's drafts would be accepted whether they are right or not, because its "
            "draft model has random weights; `pdreal run` decodes with drafts"
        )
    if scenario.aggregated is None and scenario.health is None:
        scenario = scenario.model_copy(update={"health": HealthSettings()})
    resolved = resolve(scenario)
    storage_costs(resolved)  # refuses roles that cannot read each other's pages
    _check_hosts(resolved, options)
    _room(resolved, options)
    return resolved


def _check_hosts(scenario: Scenario, options: Options) -> None:
    """Raises ConfigError unless each instance has one host, and the transport can send KV between the hosts. scenario:
    resolved.
    """
    if options.hosts is None:
        return
    options.hosts.placed(list(roles_of(scenario)))
    transport = scenario.network.transport
    if scenario.aggregated is None and not options.hosts.are_one_machine and transport not in BETWEEN_HOSTS:
        raise ConfigError(
            f"network.transport: {transport} works within one host only; between hosts use {', '.join(BETWEEN_HOSTS)}"
        )


def _check_windows(scenario: Scenario) -> None:
    """Raises ConfigError if a scenario with sliding windows has decode.radix_cache or prefill.layer_groups. Decode gets
    only the last tokens' KV of sliding-window layers, after the KV of all other layers.
    """
    if not wire_of(scenario).num_window_planes:
        return
    prefill, decode = scenario.pair
    if decode.radix_cache:
        raise ConfigError(
            "decode.radix_cache: decode gets only the last tokens of layers with a sliding window, so a shorter prefix "
            "would lack KV. SGLang does not match such prefixes (0.5.23, mem_cache/unified_cache/components/"
            "swa.py:357), which pdsim does not model; leave it out"
        )
    if prefill.layer_groups:
        raise ConfigError("prefill.layer_groups: real mode sends sliding windows after all layers; leave it out")


def _check_drafts(scenario: Scenario, options: Options) -> None:
    """Raises ConfigError for drafts that real mode cannot make or verify. Real mode drafts with an EAGLE head of one
    layer, which proposes one chain of tokens and no tree. The model may have no sliding windows, on GPUs no latent KV,
    and experts cannot be recorded.
    """
    decoding = scenario.decode or scenario.aggregated
    assert decoding is not None
    role = "decode" if scenario.aggregated is None else "aggregated"
    config = model_config(options, scenario.model)
    algorithm, branches = decoding.speculative_algorithm or "EAGLE", decoding.speculative_eagle_topk or 1
    if algorithm != "EAGLE" or load_model(scenario.model).num_nextn_layers or scenario.num_draft_layers != 1:
        raise ConfigError(f"{role}.speculative_algorithm: real mode drafts with an EAGLE head of one layer only")
    if branches > 1 or decoding.num_draft_steps + 1 != decoding.num_verified_tokens:
        raise ConfigError(
            f"{role}.speculative_eagle_topk: trees of drafts are verified in simulation only; leave it out"
        )
    if decoding.num_verified_tokens > MOST_VERIFIED_TOKENS:
        most = MOST_VERIFIED_TOKENS
        raise ConfigError(f"{role}.speculative_draft_tokens: real mode verifies up to {most} tokens in a step")
    if config.llama.window_layers:
        raise ConfigError(f"{role}.speculative_algorithm: drafts beside sliding windows run in simulation only")
    if options.device == "cuda" and config.latent is not None:
        raise ConfigError(f"{role}.speculative_algorithm: drafts of models with latent KV run with --device cpu only")
    if options.record_experts:
        raise ConfigError("--record-experts: steps that verify drafts are not counted; leave it out")


def _check_ranks(scenario: Scenario) -> None:
    """Raises ConfigError for ways to divide a server among GPUs that real mode lacks."""
    for role, servers in scenario.roles.items():
        for field in ("pp", "cp", "dcp"):
            if (size := getattr(servers.split, field)) > 1:
                raise ConfigError(f"{role}.{field}: {size}: it runs in simulation only; leave it out")
        if servers.dp > 1:
            raise ConfigError(f"{role}.dp: {servers.dp}: data-parallel attention runs in simulation only")
        if (backend := servers.moe_a2a_backend) not in (None, *get_args(RealA2a)):
            raise ConfigError(
                f"{role}.moe_a2a_backend: {backend} runs in simulation only; real mode runs none and deepep"
            )


def _check_states(scenario: Scenario, config: ModelConfig, options: Options) -> None:
    """Checks a scenario whose model has linear attention. Raises ConfigError if the scenario or the options use a
    feature that real mode lacks for such models, such as drafts or a host cache, or if states in --dtype have another
    size than in the catalog entry. Does nothing for other models.
    """
    delta, state = config.llama.delta, load_model(scenario.model).state
    if delta is None or state is None:
        return
    conv_bytes = delta.num_channels * (delta.conv_tokens - 1) * round(DTYPE_BYTES[KV_DTYPES[options.dtype]])
    if conv_bytes != state.conv_bytes:
        raise ConfigError(
            f"--dtype {options.dtype}: a layer's convolution then keeps {conv_bytes} bytes, and {state.conv_bytes} in "
            f"the catalog entry {scenario.model}"
        )
    if options.quantization is not None:
        raise ConfigError("--quantization: layers of linear attention run with unquantised weights only")
    if scenario.acceptance is not None:
        raise ConfigError("speculative_draft_tokens: drafts beside linear attention are verified in simulation only")
    for role, settings in scenario.roles.items():
        if settings.host_cache is not None:
            raise ConfigError(f"{role}.host_cache: states of linear attention are copied there in simulation only")
        if settings.mamba_radix_cache_strategy == "no_buffer":
            raise ConfigError(f"{role}.mamba_radix_cache_strategy: no_buffer runs in simulation only; leave it out")
    if scenario.aggregated is None:
        prefill, decode = scenario.pair
        if prefill.tp != decode.tp:
            raise ConfigError(
                f"prefill.tp: {prefill.tp}, but decode.tp {decode.tp}: real mode sends states of linear attention "
                "between equal tensor-parallel sizes only"
            )
        if prefill.layer_groups:
            raise ConfigError("prefill.layer_groups: real mode sends states after all layers; leave it out")


def _room(scenario: Scenario, options: Options) -> Room:
    return Room.of(scenario, model_config(options, scenario.model).max_context_tokens)


def for_real(scenario: Scenario, options: Options) -> Scenario:
    """Returns the scenario, changed for real mode: sets kv_dtype and, if there is a decode section,
    decode.retraction_backup. If there is a file of hosts, adds a health section where the scenario has none. scenario:
    not yet resolved. Raises ConfigError if real mode cannot run the scenario or its model.
    """
    if scenario.engine != "sglang":
        raise ConfigError(f"engine: {scenario.engine}: instances of {scenario.engine} run in simulation only")
    if scenario.decode is not None and scenario.decode.returns_kv:
        raise ConfigError("decode.returns_kv: KV goes back to prefill in simulation only; leave it out")
    _check_ranks(scenario)
    if scenario.decode is not None and scenario.decode.retracts_to_host_cache:
        raise ConfigError("decode.retracts_to_host_cache: it is for simulation only; leave it out")
    if (interval := scenario.servers[1].stream_interval) > 1:
        raise ConfigError(f"stream_interval: {interval}: tokens are sent in groups in simulation only; leave it out")
    if scenario.aggregated is not None and scenario.aggregated.mixed_chunk:
        raise ConfigError("aggregated.mixed_chunk: forwards mix prompts and outputs in simulation only; leave it out")
    if scenario.aggregated is not None and scenario.aggregated.scheduler_recv_interval > 1:
        raise ConfigError("aggregated.scheduler_recv_interval: it is for simulation only; leave it out")
    if scenario.storage is not None and not scenario.storage.shared:
        raise ConfigError("storage.shared: real mode has Mooncake's store, which all instances share; set it to true")
    if scenario.encode is not None:
        raise ConfigError("encode: images and audio clips are encoded in simulation only; leave it out")
    if scenario.elastic is not None:
        raise ConfigError("elastic: servers change their roles in simulation only; leave it out")
    for role in ("prefill", "decode"):
        policy = getattr(scenario.router, role)
        if getattr(policy, "metrics_interval_ns", 0):
            raise ConfigError(f"router.{role}: metrics of instances are read in simulation only; choose other scorers")
        if getattr(policy, "reads_sessions", False):
            raise ConfigError(f"router.{role}: sessions exist in simulation only; choose another policy")
        if getattr(policy, "reads_caches", False):
            raise ConfigError(f"router.{role}: instances send KV events in simulation only; leave kv_events out")
    for i, fault in enumerate(scenario.faults):
        if isinstance(fault, SlowLink):
            raise ConfigError(f"faults.{i}: links are slowed down in simulation only; real mode has kill and abort")
    try:
        config = model_config(options, scenario.model)
    except ModelError as wrong:
        raise ConfigError(f"model: {wrong}") from None
    context = config.max_context_tokens
    _check_states(scenario, config, options)
    if (scenario.context_tokens or 0) > context:
        raise ConfigError(f"context_tokens: at most the model's own {context}; extended in simulation only")
    if scenario.acceptance is not None:
        _check_drafts(scenario, options)
    if scenario.aggregated is None:
        _check_windows(scenario)
    health = scenario.health
    if options.hosts is not None:
        health = health or HealthSettings()  # or nobody would find out about a cut link
    decode = scenario.decode
    if decode is not None:
        decode = decode.model_copy(update={"retraction_backup": True})
    kv_dtype = "fp8" if options.kv_cache_dtype == "fp8" else KV_DTYPES[options.dtype]
    return scenario.model_copy(update={"kv_dtype": kv_dtype, "decode": decode, "health": health})
