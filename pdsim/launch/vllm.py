"""Writes commands that run a scenario with vLLM: its servers, its router and its load.

Options are those of vLLM 0.33.0 (vllm/engine/arg_utils.py, vllm/benchmarks) and of vllm-router 0.1.17.
"""

import json
from collections.abc import Sequence
from typing import Any

from pdsim.launch import encoding, host_memory
from pdsim.launch.bench_serving import image_size
from pdsim.launch.commands import (
    DRIVES,
    FIRST_BOOTSTRAP_PORT,
    GATEWAY_PORT,
    HOST,
    THRESHOLDS,
    Aside,
    Launch,
    Place,
    Rule,
    add_replay,
    kv_cache_dtype,
    notes_on,
    one_of,
    pace,
    places,
    quantization,
    thresholds,
    weights,
)
from pdsim.launch.words import Expanded, Flags
from pdsim.policy.pages import FewestOutputsFirst
from pdsim.policy.routing import CacheAware, LeastLoaded
from pdsim.policy.sessions import StickyLeastLoaded
from pdsim.scenario.building.sizing import resolve, roles
from pdsim.scenario.building.wiring import NO_HYBRID_STAGES, is_hybrid
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.scenario.sections.servers import (
    AggregatedSettings,
    ComputingSettings,
    DecodeSettings,
    DecodingSettings,
    PrefillSettings,
    ServerSettings,
)
from pdsim.system.catalog import load_model
from pdsim.workload.client import Gamma, OpenLoop
from pdsim.workload.lengths import Fixed, Lengths, Uniform
from pdsim.workload.synthetic import RandomLengths, SharedPrefixGroups

BLOCK = 16
"""The size of a block in tokens must be a multiple of this, for attention kernels (0.33.0,
v1/attention/backends/flash_attn.py:367).
"""
FIRST_SIDE_CHANNEL_PORT, SIDE_CHANNELS = 5600, 16
"""First port and number of ports of a server for NIXL's handshakes: VLLM_NIXL_SIDE_CHANNEL_PORT, plus one for each
further data-parallel rank."""
ROUTING_POLICIES = {
    **{name: name for name in ("cache_aware", "round_robin", "random", "power_of_two", "sticky_least_loaded")},
    "least_loaded": "power_of_two",
}
"""Policies of vLLM's router, by pdsim's names. The router cannot pick the least loaded of all servers."""
STATE_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
KV_DTYPES = {"bf16": "auto", "fp8": "fp8", "fp4": "nvfp4"}
CONNECTORS = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
NIXL_PUSH = "NixlPushConnector"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


_EXPIRATION = Aside("set VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S of vLLM's router")


def _thresholds(_: Any, scenario: Scenario) -> str | None:
    router = scenario.router
    both = [thresholds(one) for one in (router.prefill, router.decode) if isinstance(one, CacheAware)]
    if scenario.aggregated is None and both and both[0] != both[-1]:
        return "the router has one set of cache_aware thresholds; give both roles the same"
    return None


def _same_dp(_: Any, scenario: Scenario) -> str | None:
    if scenario.aggregated is None and len({servers.dp for servers in scenario.pair}) > 1:
        return "vLLM's router has one number of data-parallel ranks; give both roles the same"
    return None


def _stages(value: Any, scenario: Scenario) -> str | None:
    return NO_HYBRID_STAGES if value > 1 and is_hybrid(load_model(scenario.model)) else None


VICTIMS = ("fewest_outputs_first", "last_admitted_first", "last_arrived_first", "lowest_priority_first")


def _storage(value: Any, scenario: Scenario) -> str | None:
    found = {servers.host_cache_connector for servers in scenario.roles.values() if servers.host_cache is not None}
    return None if value is None or found == {"lmcache"} else "pdsim launches storage behind LMCache only; leave it out"


SERVER_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "engine",
            "network.nixl_push",
            "state_dtype",
            "*.long_prefill_tokens",
            "*.long_prefill_adaptive",
            "*.chunked_media",
            "prefill.hold_timeout",
            "decode.allocation",
        )
    ),
    **dict.fromkeys(("*.stream_interval", "*.prefill_schedule_interval", "*.dcp", "aggregated.pp")),
    "weight_dtype": weights,
    "kv_dtype": one_of(KV_DTYPES, "vLLM"),
    "page_size": lambda value, _: (
        None if value == 1 or value % BLOCK == 0 else f"vLLM's kernels have blocks of multiples of {BLOCK} tokens"
    ),
    "*.eviction": one_of(("lru",), "vLLM"),
    "*.policy": one_of(("fcfs", "priority"), "vLLM"),
    "priorities": None,
    **dict.fromkeys(("*.host_cache", "*.host_cache_connector", "*.host_cache_chunk_tokens", "*.host_cache_layerwise")),
    "*.host_cache_write": one_of(("write_through",), "vLLM"),
    "decode.host_cache": "vLLM's decode reads all KV from prefill (0.33.0, multi_connector.py:467); leave it out",
    "storage": _storage,
    "storage.shared": None,
    **DRIVES,
    "*.two_batch_overlap": "pdsim does not launch vLLM's dual batch overlap (--enable-dbo); leave it out",
    "*.preemption": one_of(VICTIMS, "vLLM"),
    "*.cp": "pdsim models SGLang's context parallelism, which differs from vLLM's; give 1",
    "prefill.pp": _stages,
    "decode.pp": "pdsim models no pipeline stages of vLLM's decode, and NixlConnector refuses them; give 1",
    "prefill.layer_groups": "NixlConnector and MooncakeConnector send KV when the prompt is computed; give 0",
    "prefill.transfer": one_of(("every_chunk", "whole_prompt"), "vLLM"),
    "decode.admission": one_of(
        ("free_pages", "reserve_decode_tokens"), "vLLM's decode admits by free blocks; the simulator"
    ),
}
"""Rules of vLLM's servers, by the path of a scenario's field. A rule says whether commands express the field
(pdsim.launch.commands.Rule). `own_ways` has notes on differences."""
RULES: dict[str, Rule] = {
    **SERVER_RULES,
    **encoding.VLLM_ENCODE_RULES,
    "*.dp": _same_dp,
    "router.queue": "vLLM's router holds no request back while servers are busy; leave it out",
    "router.prefill": one_of(ROUTING_POLICIES, "vLLM's router"),
    "router.decode": one_of(ROUTING_POLICIES, "vLLM's router"),
    **{f"router.{role}.{name}": _thresholds for role in KV_ROLES for name in THRESHOLDS.values()},
    **{f"router.{role}.session_expiration": _EXPIRATION for role in KV_ROLES},
    "network.transport": lambda value, _: (
        None if value.partition("-")[0] in CONNECTORS else f"vLLM moves KV by {' or '.join(CONNECTORS)}"
    ),
}


def launch(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Commands of servers, of the router (or of encode instances and their proxy) and of the load. source: words of a
    command line that name the scenario's file. model: name or path by which the engine finds the model. Raises
    ConfigError, which lists the fields that vLLM cannot express.
    """
    made = Launch(notes=[*notes_on(scenario, "vllm", RULES), *own_ways(scenario)])
    policies = [scenario.router.prefill] if scenario.aggregated else [scenario.router.prefill, scenario.router.decode]
    if any(isinstance(policy, LeastLoaded) for policy in policies):
        made.notes.append("router: least_loaded: vLLM's nearest is power_of_two, the less loaded of two random servers")
    if any(isinstance(policy, StickyLeastLoaded) for policy in policies):
        made.notes.append("router: sticky_least_loaded: vLLM's router keeps sessions of clients that send X-Session-ID")
    at, scenario = places(scenario), resolved(scenario)
    encoders = at.pop("encode", [])
    connector = scenario.network.transport.partition("-")[0]
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(scenario, role)
        settings = server_flags(made, scenario, servers)
        transport = scenario.network.transport if role in KV_ROLES else None
        moved = transfer_config(scenario, transport, KV_ROLES.get(role, "kv_both"), servers)
        settings.append(("kv-transfer-config", moved))
        reading, of_reading = encoding.reader_settings(scenario, role)
        settings += reading
        for index, place in enumerate(servers_at):
            for rank, host in enumerate(place.hosts):
                variables = environment(place, host, servers, connector if role in KV_ROLES else None) | of_reading
                if role == "prefill" and connector == "mooncake":
                    variables["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = FIRST_BOOTSTRAP_PORT + index
                name = f"{role}-{index}" + (f"-host-{rank}" if len(place.hosts) > 1 else "")
                made.add(name, ["vllm", "serve", model], _at_host(place, rank, settings), **variables)
    if encoders:
        encoding.add_vllm_encode_instances(made, scenario, encoders, model)
        encoding.add_proxy(made, scenario, at | {"encode": encoders})
    else:
        made.add("gateway", ["vllm-router"], _router_flags(scenario, at, connector))
    add_load(made, scenario, source, model)
    return made


def _at_host(place: Place, rank: int, settings: Flags) -> Flags:
    """Options of a server's process on one of its hosts. The first host answers requests (0.33.0, engine/arg_utils.py).
    rank: index of this host, from 0. settings: options that the processes on all hosts share.
    """
    listening: Flags = [("host", place.host), ("port", place.port)]
    if len(place.hosts) == 1:
        return [*listening, *settings]
    group: Flags = [("nnodes", len(place.hosts)), ("node-rank", rank), ("master-addr", place.host)]
    return [*listening, *settings, *group] if rank == 0 else [("headless", True), *settings, *group]


def resolved(scenario: Scenario) -> Scenario:
    """The scenario with missing sizes of servers filled in, such as the chunk size. mem_fraction and pool_tokens stay
    as given: if they are None, vLLM chooses them.
    """
    found = resolve(scenario)
    update: dict[str, Any] = {}
    for role in roles(scenario):
        given: ServerSettings = getattr(scenario, role)
        own = {"mem_fraction": given.mem_fraction, "pool_tokens": given.pool_tokens}
        update[role] = getattr(found, role).model_copy(update=own)
    return found.model_copy(update=update)


def _uses_nixl(scenario: Scenario) -> bool:
    return scenario.network.transport.startswith("nixl")


def own_ways(scenario: Scenario) -> list[str]:
    """Notes on settings of the scenario for which vLLM follows other rules than SGLang."""
    found = []
    if scenario.priorities:
        found.append("priorities: vLLM serves the smallest number first; requests must send negated priorities")
    if scenario.page_size % BLOCK:
        found.append(f"page_size: {scenario.page_size}: vLLM chooses its block size, 16 tokens on most GPUs")
    if scenario.prefill is not None and _hold_seconds(scenario.prefill) is not None and _uses_nixl(scenario):
        found.append(
            "prefill.hold_timeout: NIXL holds KV for a lease (kv_lease_duration), which a living decode renews"
        )
    if scenario.storage is not None and scenario.storage.shared:
        found.append(f"storage: give the store's address in place of {host_memory.STORES[True]} (lmcache.remote_url)")
    if scenario.engine == "vllm":
        return found
    if isinstance(scenario.servers[1].preemption, FewestOutputsFirst):
        found.append("preemption: fewest_outputs_first: vLLM preempts the last arrival, and computes it again")
    if scenario.aggregated is None:
        prefill, decode = scenario.pair
        if component_name(prefill.transfer) == "every_chunk":
            found.append("prefill.transfer: every_chunk: vLLM's connectors send a prompt when all of it is computed")
        if decode.allocation == "early":
            found.append("decode.allocation: early: vLLM's decode allocates blocks when the prompt is computed")
        found.append("decode.admission: vLLM's decode admits by free blocks")
    return found


def server_flags(made: Launch, scenario: Scenario, servers: ServerSettings) -> Flags:
    """Options of a vLLM server. made: the launch that gets notes. scenario: must come from `resolved`."""
    block = None if scenario.page_size % BLOCK else scenario.page_size
    redundant, dcp = servers.redundant_experts, servers.split.dcp
    eplb = None if redundant is None else json.dumps({"num_redundant_experts": redundant})
    flags: Flags = [
        ("tensor-parallel-size", servers.tp // servers.dp),
        ("pipeline-parallel-size", servers.split.pp if servers.split.pp > 1 else None),
        ("decode-context-parallel-size", dcp if dcp > 1 else None),
        ("data-parallel-size", servers.dp if servers.dp > 1 else None),
        ("enable-expert-parallel", servers.has_whole_experts),
        ("all2all-backend", _all_to_all(scenario, servers)),
        ("enable-eplb", redundant is not None),
        ("eplb-config", eplb),
        ("attention-backend", servers.attention_backend and servers.attention_backend.upper()),
        ("block-size", block),
        ("max-model-len", scenario.context_tokens),
        ("kv-cache-dtype", kv_cache_dtype(scenario, KV_DTYPES, "bfloat16")),
        ("mamba-ssm-cache-dtype", None if scenario.state_dtype == "fp32" else STATE_DTYPES[scenario.state_dtype]),
        ("quantization", quantization(scenario)),
        ("gpu-memory-utilization", servers.mem_fraction),
        (
            "num-gpu-blocks-override",
            None if servers.pool_tokens is None else servers.pool_tokens // (block or 16) // dcp,
        ),
        ("max-num-seqs", servers.resolved_max_running),
        ("enable-prefix-caching" if servers.radix_cache else "no-enable-prefix-caching", True),
    ]
    if isinstance(servers, ComputingSettings):
        chunk = servers.rank_chunk_tokens
        flags.append(("max-num-batched-tokens", chunk) if chunk else ("no-enable-chunked-prefill", True))
        flags.append(("scheduling-policy", "priority" if scenario.priorities else None))
        flags.append(("long-prefill-token-threshold", servers.long_prefill_tokens))
        flags.append(("long-prefill-token-threshold-adaptive", servers.long_prefill_adaptive))
        flags.append(("disable-chunked-mm-input", not servers.chunked_media))
        flags.append(("no-async-scheduling", not getattr(servers, "overlap", True)))
    if isinstance(servers, AggregatedSettings) and servers.prefill_schedule_interval > 1:
        flags.append(("prefill-schedule-interval", servers.prefill_schedule_interval))
    if isinstance(servers, DecodingSettings):
        sizes = scenario.cost.graph_sizes
        flags.append(("cudagraph-capture-sizes", list(sizes) if isinstance(sizes, tuple) else None))
        flags.append(("stream-interval", servers.stream_interval if servers.stream_interval > 1 else None))
        if servers.speculative_draft_tokens is not None:
            made.notes.append(
                "speculative_draft_tokens: the draft model is not in the scenario; give --speculative-config a method "
                f"and num_speculative_tokens {servers.speculative_draft_tokens - 1}"
            )
    return flags


def _all_to_all(scenario: Scenario, servers: ServerSettings) -> str | None:
    """Value of --all2all-backend. None: the default, an all-gather and a reduce-scatter."""
    backend = scenario.a2a_backend(servers)
    kernels = "low_latency" if isinstance(servers, DecodeSettings) else "high_throughput"
    return None if backend == "none" else f"{backend}_{kernels}"


def transfer_config(scenario: Scenario, transport: str | None, role: str, servers: ServerSettings) -> str | None:
    """The JSON of --kv-transfer-config. None: the server has no connector. transport: None for an aggregated server.
    role: vLLM's kv_role, such as kv_producer.
    """
    found = [] if transport is None else [_transfer_connector(transport, role, servers)]
    if scenario.network.nixl_push and found:
        found[0]["kv_connector"] = NIXL_PUSH
    if servers.host_cache_bytes is not None:
        found.append(host_memory.connector(servers, servers.host_cache_bytes, scenario.storage))
    if not found:
        return None
    several = host_memory.beside_transfers(servers, role, found)
    return json.dumps(found[0] if len(found) == 1 else several, separators=(",", ":"))


def _transfer_connector(transport: str, role: str, servers: ServerSettings) -> dict[str, Any]:
    connector = transport.partition("-")[0]
    found: dict[str, Any] = {"kv_connector": CONNECTORS[connector], "kv_role": role}
    extra: dict[str, Any] = {}
    if connector == "nixl" and (hold := _hold_seconds(servers)) is not None:
        extra["kv_lease_duration"] = hold
    if transport == "nixl-libfabric":
        extra["backends"] = ["LIBFABRIC"]
    if extra:
        found["kv_connector_extra_config"] = extra
    return found


def _hold_seconds(servers: ServerSettings) -> int | None:
    """Time in s, rounded up, for which prefill keeps a computed prompt's KV. None: vLLM's default, or not prefill."""
    if not isinstance(servers, PrefillSettings) or servers.hold_timeout is None:
        return None
    return -(-servers.hold_timeout // 1_000_000_000)


def environment(place: Place, host: Expanded, servers: ServerSettings, connector: str | None) -> dict[str, object]:
    """Environment variables of a server's process on one of its hosts: its GPUs, its side channel for NIXL, and
    settings of other connectors. host: address of this host. connector: nixl or mooncake, which sends KV to the other
    role; None: an aggregated server.
    """
    gpus = ",".join(str(place.first_gpu + i) for i in range(servers.num_server_gpus // len(place.hosts)))
    found: dict[str, object] = {"CUDA_VISIBLE_DEVICES": gpus}
    if connector == "nixl":
        found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = FIRST_SIDE_CHANNEL_PORT + SIDE_CHANNELS * place.number
    if connector == "mooncake" and (hold := _hold_seconds(servers)) is not None:
        found["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = hold
    return found | host_memory.kvbm_variables(servers, place)


def _router_flags(scenario: Scenario, at: dict[str, list[Place]], connector: str) -> Flags:
    flags: Flags = [("host", HOST), ("port", GATEWAY_PORT)]
    router = scenario.router
    if scenario.aggregated is not None:
        dp, policies = scenario.aggregated.dp, [router.prefill]
        flags += [("worker-urls", [place.url for place in at["aggregated"]])]
        flags += [("policy", ROUTING_POLICIES[component_name(router.prefill)])]
    else:
        dp, policies = scenario.pair.prefill.dp, [router.prefill, router.decode]
        flags += [("vllm-pd-disaggregation", True), ("kv-connector", connector)]
        ports = [[FIRST_BOOTSTRAP_PORT + i] if connector == "mooncake" else [] for i in range(len(at["prefill"]))]
        flags += [("prefill", [one.url, *port]) for one, port in zip(at["prefill"], ports, strict=True)]
        flags += [("decode", [one.url]) for one in at["decode"]]
        flags += [(f"{role}-policy", ROUTING_POLICIES[component_name(getattr(router, role))]) for role in KV_ROLES]
    flags.append(("intra-node-data-parallel-size", dp if dp > 1 else None))
    aware = next((thresholds(one) for one in policies if isinstance(one, CacheAware)), {})
    return [*flags, *aware.items()]


# The load.


def add_load(made: Launch, scenario: Scenario, source: Sequence[str], model: str) -> None:
    """Adds the command of `vllm bench serve`. If this command cannot send the load: adds commands with which AIPerf
    sends a trace. source: words of a command line that name the scenario's file. model: name or path by which the
    engine finds the model.
    """
    requests, dataset = _dataset(scenario.workload, scenario.model)
    has_images = ("dataset-name", "random-mm") in dataset
    client = scenario.client
    sent = pace(client)
    if isinstance(client, OpenLoop) and isinstance(client.arrivals, Gamma):
        sent = [("request-rate", client.arrivals.rate_per_s), ("burstiness", client.arrivals.burstiness)]
    if not dataset or not sent:
        add_replay(made, scenario, source, model)
        return
    flags: Flags = [
        ("model", model),
        ("host", HOST),
        ("port", GATEWAY_PORT),
        ("num-prompts", requests),
        *dataset,
        *sent,
        *([("backend", "openai-chat"), ("endpoint", "/v1/chat/completions")] if has_images else []),
        ("ignore-eos", True),
        ("seed", scenario.seed),
        ("label", scenario.name),
        ("save-result", True),
        ("result-filename", f"{scenario.name}.json"),
    ]
    made.add("load", ["vllm", "bench", "serve"], flags)


def _dataset(workload: Any, model: str) -> tuple[int, Flags]:
    """Number of prompts, and the options with which vLLM's client generates them. No options: the client cannot
    generate them.
    """
    if isinstance(workload, SharedPrefixGroups) and workload.num_turns == 1 and workload.range_ratio == 1:
        return workload.num_groups * workload.prompts_per_group, [
            ("dataset-name", "prefix_repetition"),
            ("prefix-repetition-num-prefixes", workload.num_groups),
            ("prefix-repetition-prefix-len", workload.system_prompt_tokens),
            ("prefix-repetition-suffix-len", workload.question_tokens),
            ("prefix-repetition-output-len", workload.output_tokens),
            ("disable-shuffle", workload.ordered),
        ]
    if isinstance(workload, RandomLengths):
        inputs, outputs = _centre(workload.input_tokens), _centre(workload.output_tokens)
        if inputs is not None and outputs is not None and inputs[1] == outputs[1]:
            images: Flags = []
            if (size := image_size(workload, model)) is not None:
                num_images, height, width = size
                images = [("random-mm-base-items-per-request", num_images)]
                images.append(("random-mm-bucket-config", f"{{({height}, {width}, 1): 1}}"))
            return workload.num_requests, [
                ("dataset-name", "random-mm" if images else "random"),
                *images,
                ("random-input-len", inputs[0]),
                ("random-output-len", outputs[0]),
                ("random-range-ratio", f"{inputs[1]:.12g}"),
            ]
    return 0, []


def _centre(lengths: Lengths) -> tuple[int, float] | None:
    """Returns (mean length in tokens, largest difference of a length from the mean as a share of the mean). None:
    vLLM's benchmark client cannot draw such lengths.
    """
    if isinstance(lengths, Fixed):
        return lengths.tokens, 0.0
    if not isinstance(lengths, Uniform) or (lengths.low + lengths.high) % 2:
        return None
    mean = (lengths.low + lengths.high) // 2
    return mean, (lengths.high - mean) / mean
