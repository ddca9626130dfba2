"""Writes commands that run a scenario with SGLang 0.5: its servers, its gateway and its load.

Options are those of SGLang 0.5.23 (srt/arg_groups/fields) and of sglang-router 0.3.2; those of the load:
bench_serving.py.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.launch.bench_serving import bench_flags
from pdsim.launch.commands import (
    DRIVES,
    FIRST_BOOTSTRAP_PORT,
    HOST,
    TIMES,
    Aside,
    Launch,
    Place,
    Rule,
    add_replay,
    kv_cache_dtype,
    notes_on,
    one_of,
    places,
    quantization,
    weights,
)
from pdsim.launch.divided_kv import attention_backend
from pdsim.launch.drafts import draft_flags
from pdsim.launch.encoding import ENCODE_RULES, add_encode_instances, language_flags
from pdsim.launch.gateway import GATEWAY_RULES, gateway_flags
from pdsim.launch.words import Expanded, Flags
from pdsim.policy.pages import ReserveDecodeTokens
from pdsim.policy.prefill import EveryChunk, ShortestPromptFirst
from pdsim.scenario.building.sizing import resolve
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
from pdsim.system.catalog import load_model, load_transport

_MODULES = ("sglang.launch_server", "sglang_router.launch_router", "sglang.bench_serving")
SERVER, GATEWAY, LOAD = (("python", "-m", module) for module in _MODULES)
MEETING_PORT = 20000
"""Port at which the hosts of one server find one another."""
KV_DTYPES = {"bf16": "auto", "fp8": "fp8_e4m3", "fp4": "fp4_mx_block16"}
"""Values of --kv-cache-dtype, by pdsim's types. SGLang 0.5.12 called fp4 `fp4_e2m1`."""
STATE_DTYPES = {"fp32": None, "fp16": "float16", "bf16": "bfloat16"}
BACKENDS = ("mooncake", "nixl", "mori", "ascend")
"""Values of --disaggregation-transfer-backend. Each is also the first word of pdsim's transports for this backend
(0.5.23, arg_groups/pd_disaggregation_hook.py)."""
STORE_URL, STORE_PORT = "ASCEND_MF_STORE_URL", 24666
"""Variable and port of the store through which memfabric's engines find each other, on the host of the first prefill
server."""
LINKS: dict[str, dict[str, str]] = {
    "mooncake-efa": {"MOONCAKE_PROTOCOL": "efa"},
    "mooncake-ascend": {"ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE": "true"},
    "nixl-libfabric": {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "LIBFABRIC"},
    "ascend-sdma": {"ASCEND_MF_TRANSFER_PROTOCOL": "sdma"},
    "ascend-rdma": {"ASCEND_MF_TRANSFER_PROTOCOL": "device_rdma"},
    "mooncake-tcp": {"MC_FORCE_TCP": "true"},
    "mooncake-mnnvl": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK", "MC_FORCE_MNNVL": "True"},
    "mooncake-nvlink": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK"},
}
"""For each transport that environment variables select: these variables. A transport without an entry needs none,
because SGLang's transfer backend takes its link by default. Sources in SGLang 0.5.23: disaggregation/mooncake/utils.py,
nixl/conn.py, ascend/transfer_engine.py and distributed/device_communicators/mooncake_transfer_engine.py.
"""
QUEUES = {"mori": ("SGLANG_MORI_TRANSFER_SHARDS", 8), "others": ("SGLANG_DISAGGREGATION_QUEUE_SIZE", 4)}
"""For MORI and for all other transfer engines: the environment variable that sets the number of transfer queues of a
prefill rank, and its default (0.5.23, srt/environ.py).
"""
SCHEDULE_POLICIES = {
    "fcfs": "fcfs",
    "lpm": "lpm",
    "priority": "fcfs",
    "lof": "lof",
    "hrrn": "hrrn",
    "dfs_weight": "dfs-weight",
    "random": "random",
    "shortest_prompt_first": "shortest-prefill-first",
    "shortest_prefill_first": "shortest-prefill-first",
}
"""Values of --schedule-policy, by pdsim's policies. Priorities have an option of their own."""
TIMEOUTS = {
    "heartbeat_interval": "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
    "bootstrap_timeout": "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "waiting_timeout": "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "transfer_timeout": "MC_TRANSFER_TIMEOUT",
}
"""Environment variables for times in s, by the fields of `health`. MC_TRANSFER_TIMEOUT is Mooncake's; the other
variables are SGLang's (0.5.12, srt/environ.py)."""


def _policy(value: Any, scenario: Scenario) -> str | None:
    if value not in SCHEDULE_POLICIES:
        return f"SGLang has {', '.join(SCHEDULE_POLICIES)}"
    if SCHEDULE_POLICIES[value] == "shortest-prefill-first" and not scenario.servers[0].radix_cache:
        return "SGLang's shortest-prefill-first needs radix_cache: true (0.5.23, managers/schedule_policy.py:333)"
    if scenario.priorities and SCHEDULE_POLICIES[value] not in {"fcfs", "lof"}:
        return "SGLang has priorities with fcfs and lof only (0.5.23, arg_groups/validation_hook.py:286)"
    return None


def _allocation(value: Any, scenario: Scenario) -> str | None:
    """Check of decode.allocation. Returns text with the settings of the scenario that SGLang refuses together with
    prefill_complete (0.5.23, arg_groups/pd_disaggregation_hook.py:199). None: the scenario has no such settings, or is
    aggregated, or `value` (its decode.allocation) is not prefill_complete.
    """
    if value != "prefill_complete" or scenario.aggregated is not None:
        return None
    prefill, decode = scenario.pair
    beside = {
        "network.transport other than Mooncake's": not scenario.network.transport.startswith("mooncake"),
        "tp above dp": any(servers.tp != servers.dp for servers in scenario.pair),
        "prefill.pp or prefill.cp": prefill.split.pp > 1 or prefill.split.cp > 1,
        "decode.radix_cache": decode.radix_cache,
        "prefill.host_cache with a host_cache_write other than write_back": prefill.host_cache is not None
        and prefill.host_cache_write != "write_back",
        "prefill.host_cache together with storage": prefill.host_cache is not None and scenario.storage is not None,
        "network.staging": scenario.network.staging is not None,
    }
    found = [name for name, is_given in beside.items() if is_given]
    return f"SGLang refuses it with {', '.join(found)} (0.5.23, pd_disaggregation_hook.py:199)" if found else None


_SAID = (
    *("state_dtype", "priorities", "storage", "network.staging", "health", "*.max_prefill_tokens"),
    *("*.prefill_max_requests", "*.stream_interval"),
    *("*.host_cache", "*.host_cache_write", "*.two_batch_overlap"),
    *("aggregated.priority_preemption_threshold", "aggregated.schedule_conservativeness", "aggregated.mixed_chunk"),
    "aggregated.scheduler_recv_interval",
    *("*.dcp", "*.pp", "*.cp", "prefill.dynamic_chunks", "prefill.optimistic_attempts"),
    *("prefill.transfer.cached_prefix_first", "decode.extra_slots", "decode.retracts_to_host_cache"),
    *("decode.polling_interval", "decode.hisparse"),
    *("decode.admission.reserved_tokens", "decode.admission.max_estimated_output_tokens"),
)
_STAGING = ("gather_host", "scatter_host", "gather_efficiency", "scatter_efficiency", "transfer_latency")


def _engine(value: Any, _scenario: Scenario) -> str | None:
    return None if value == "sglang" else "launch a scenario of vLLM with --engine vllm or dynamo-vllm"


RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAID),
    **DRIVES,
    **{f"network.staging.{name}": TIMES for name in _STAGING},
    "decode.hisparse.miss_rate": Aside("a property of model and load"),
    "engine": _engine,
    "weight_dtype": weights,
    "kv_dtype": one_of(KV_DTYPES, "SGLang"),
    "*.eviction": one_of(("lru", "lfu"), "SGLang"),
    "*.policy": _policy,
    "*.preemption": one_of(("fewest_outputs_first",), "SGLang"),
    "prefill.layer_groups": "SGLang sends KV when a forward is done; give 0",
    "prefill.transfer": one_of(("every_chunk",), "SGLang"),
    "decode.admission": one_of(("reserve_decode_tokens",), "SGLang"),
    **GATEWAY_RULES,
    "network.transport": lambda value, _: (
        None if value.partition("-")[0] in BACKENDS else f"SGLang moves KV by {' or '.join(BACKENDS)}"
    ),
    "decode.allocation": _allocation,
}


def launch(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Commands of the encode instances and servers, each on GPUs of its own, of the gateway and of the load. source:
    words of a command line that name the scenario's file. model: name or path by which the engine finds the model.
    Raises ConfigError, which lists the fields that SGLang cannot express.
    """
    made = Launch(notes=[*notes_on(scenario, "sglang", RULES | ENCODE_RULES), *left_to_the_operator(scenario)])
    at = places(scenario)
    scenario = resolve(scenario).model_copy(update={"health": scenario.health})
    if scenario.network.staging is not None and scenario.network.staging.prefill_buffer is not None:
        made.notes.append(
            "network.staging.prefill_buffer: SGLang 0.5.12 reads it; in 0.5.23 the buffer holds one forward's KV"
        )
    add_encode_instances(made, SERVER, scenario, at.get("encode", ()), model)
    for role in scenario.roles:
        _add_servers(made, scenario, role, at, model)
    made.add("gateway", GATEWAY, gateway_flags(made, scenario, at))
    load, _ = bench_flags(scenario, HOST)
    if not load:
        add_replay(made, scenario, source, model)
    else:
        made.add("load", LOAD, load)
        results = f"{scenario.name}.jsonl"
        compare = shlex.join(["pdsim", "compare", *source, results])
        made.notes.append(f"results: {results}; compare them with the simulation: {compare}")
    return made


def left_to_the_operator(scenario: Scenario) -> list[str]:
    """Notes on options in SGLang's recipes that follow from no field of the scenario."""
    has_state = load_model(scenario.model).state is not None
    roles = scenario.roles.values()
    notes = []
    if scenario.aggregated is None:
        notes.append("SGLANG_DISAGGREGATION_THREAD_POOL_SIZE: SGLang chooses by the number of cores")
        if scenario.network.transport in ("mooncake-rdma", "nixl-rdma", "mori-rdma"):
            notes.append("--disaggregation-ib-device: the NICs of a GPU are not in the scenario; SGLang chooses")
    if any(servers.dp > 1 and servers.load_balance_method == "router" for servers in roles):
        notes.append("load_balance_method: router: SGLang's gateway picks servers; the servers pick ranks by default")
    if has_state and any(servers.radix_cache for servers in roles):
        notes.append(
            "--mamba-radix-cache-strategy (--mamba-scheduler-strategy before 0.5.23): not in the scenario; auto"
        )
    return notes


def _add_servers(made: Launch, scenario: Scenario, role: str, at: Mapping[str, list[Place]], model: str) -> None:
    servers: ServerSettings = getattr(scenario, role)
    settings = server_flags(made, scenario, servers)
    for index, place in enumerate(at[role]):
        for rank, host in enumerate(place.hosts):
            flags = [("model-path", model), ("host", host), ("port", place.port), ("base-gpu-id", place.first_gpu)]
            flags += [*settings, *language_flags(scenario, role, place, at)]
            if role == "prefill":
                flags.append(("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT + index))
            name = f"{role}-{index}"
            if len(place.hosts) > 1:
                name = f"{name}-host-{rank}"
                flags += across_hosts(place.host, len(place.hosts), rank)
            made.add(name, SERVER, flags, **environment(scenario, role), **_store(scenario, at))


def _store(scenario: Scenario, at: Mapping[str, list[Place]]) -> dict[str, object]:
    """Environment variable with the address of memfabric's store, which the first prefill server opens (0.5.23,
    managers/disagg_service.py). Empty: the transport needs no store. at: where the servers run, by role.
    """
    if not needs_store(scenario):
        return {}
    return {STORE_URL: Expanded(f"tcp://{at['prefill'][0].host}:{STORE_PORT}")}


def needs_store(scenario: Scenario) -> bool:
    return scenario.aggregated is None and scenario.network.transport.startswith("ascend")


def store_note(scenario: Scenario) -> list[str]:
    """A note on the address of memfabric's store, for launches in which the user sets the addresses of servers. Empty:
    the transport needs no store.
    """
    note = f"{STORE_URL}: set it to tcp://HOST:{STORE_PORT}, where HOST is that of a prefill server"
    return [note] if needs_store(scenario) else []


def across_hosts(leader: Expanded, num_hosts: object, rank: object) -> Flags:
    """Options of one process of a server that spans num_hosts hosts, with one process per host. leader: address of the
    server's first host. rank: index of the process's host among the server's hosts, from 0.
    """
    return [("dist-init-addr", Expanded(f"{leader}:{MEETING_PORT}")), ("nnodes", num_hosts), ("node-rank", rank)]


def server_flags(made: Launch, scenario: Scenario, servers: ServerSettings) -> Flags:
    has_whole_experts = servers.has_whole_experts and load_model(scenario.model).experts is not None
    running, host_bytes = servers.max_running_requests, servers.host_cache_bytes
    flags: Flags = [
        ("tp-size", servers.tp),
        ("pp-size", servers.split.pp if servers.split.pp > 1 else None),
        ("dcp-size", servers.split.dcp if servers.split.dcp > 1 else None),
        ("dp-size", servers.dp if servers.dp > 1 else None),
        ("enable-dp-attention", servers.dp > 1),
        ("load-balance-method", _balance(servers)),
        ("ep-size", servers.tp if has_whole_experts else None),
        *_exchange_flags(scenario, servers),
        ("enable-eplb", servers.redundant_experts is not None),
        ("ep-num-redundant-experts", servers.redundant_experts),
        ("attention-backend", attention_backend(scenario, servers)),
        ("page-size", scenario.page_size),
        ("context-length", scenario.context_tokens),
        ("kv-cache-dtype", kv_cache_dtype(scenario, KV_DTYPES, "bf16")),
        ("mem-fraction-static", servers.mem_fraction),
        ("max-total-tokens", None if servers.pool_tokens is None else servers.pool_tokens // servers.split.dcp),
        ("max-running-requests", running),
        ("radix-eviction-policy", component_name(servers.eviction)),
        ("enable-hierarchical-cache", host_bytes is not None),
        ("hicache-size", None if host_bytes is None else max(1, round(host_bytes / 1e9))),
        ("hicache-write-policy", None if host_bytes is None else servers.host_cache_write),
        *_storage_flags(scenario, servers),
        ("stream-interval", servers.stream_interval if isinstance(servers, DecodingSettings) else 1),
        ("quantization", quantization(scenario)),
        ("mamba-ssm-dtype", STATE_DTYPES[scenario.state_dtype]),
        ("mamba-radix-cache-strategy", servers.mamba_radix_cache_strategy),
        ("mamba-track-interval", servers.mamba_track_interval),
    ]
    if isinstance(servers, DecodingSettings) and isinstance(scenario.cost.graph_sizes, tuple):
        flags.append(("cuda-graph-bs-decode", list(scenario.cost.graph_sizes)))
    if isinstance(servers, ComputingSettings):
        if isinstance(servers.policy, ShortestPromptFirst):
            made.notes.append("policy: shortest_prompt_first: SGLang sorts by uncached tokens, without patience")
        flags += [
            ("enable-prefill-cp", servers.cp > 1),
            ("cp-strategy", "zigzag" if servers.cp > 1 else None),
            ("attn-cp-size", servers.cp if servers.cp > 1 else None),
            ("chunked-prefill-size", servers.chunked_prefill_tokens or -1),
            ("max-prefill-tokens", servers.max_prefill_tokens),
            *([("prefill-max-requests", limit)] if (limit := servers.prefill_max_requests) is not None else []),
            ("schedule-policy", SCHEDULE_POLICIES[component_name(servers.policy)]),
            ("enable-priority-scheduling", bool(scenario.priorities)),
            ("disable-radix-cache", not servers.radix_cache),
            ("disable-overlap-schedule", not getattr(servers, "overlap", True)),
        ]
    if isinstance(servers, AggregatedSettings):
        flags += [
            ("schedule-conservativeness", servers.schedule_conservativeness),
            ("priority-scheduling-preemption-threshold", servers.priority_preemption_threshold),
            ("enable-mixed-chunk", servers.mixed_chunk),
            *([("scheduler-recv-interval", steps)] if (steps := servers.scheduler_recv_interval) > 1 else []),
        ]
    else:
        flags += _disaggregation_flags(scenario, servers)
    return flags + draft_flags(made, scenario)


def _balance(servers: ServerSettings) -> str | None:
    """Value of --load-balance-method. None: the option is left out, because the server has one data-parallel rank,
    keeps its default, or leaves the choice of the rank to the router.
    """
    return None if servers.dp == 1 or servers.load_balance_method in ("auto", "router") else servers.load_balance_method


def _exchange_flags(scenario: Scenario, servers: ServerSettings) -> Flags:
    flags: Flags = [("enable-two-batch-overlap", servers.two_batch_overlap)]
    backend = scenario.a2a_backend(servers)
    if backend != "none":
        flags.append(("moe-a2a-backend", backend))
    if backend == "deepep":
        mode = {PrefillSettings: "normal", DecodeSettings: "low_latency"}.get(type(servers), "auto")
        flags.append(("deepep-mode", mode))
    return flags


def _storage_flags(scenario: Scenario, servers: ServerSettings) -> Flags:
    storage = scenario.storage
    if storage is None or servers.host_cache is None:
        return []
    return [
        ("hicache-storage-backend", "mooncake" if storage.shared else "file"),
        ("hicache-storage-prefetch-policy", storage.prefetch),
        ("hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": storage.prefetch_threshold})),
    ]


def _disaggregation_flags(scenario: Scenario, servers: ServerSettings) -> Flags:
    flags: Flags = [("disaggregation-transfer-backend", scenario.network.transport.partition("-")[0])]
    if isinstance(servers, PrefillSettings):
        return [
            ("disaggregation-mode", "prefill"),
            *flags,
            ("enable-dynamic-chunking", servers.dynamic_chunks),
            ("optimistic-prefill-attempts", servers.optimistic_attempts or None),
        ]
    assert isinstance(servers, DecodeSettings)
    assert isinstance(servers.admission, ReserveDecodeTokens)
    backup = "host_pool" if servers.retracts_to_host_cache else None
    return [
        ("disaggregation-mode", "decode"),
        *flags,
        *_hisparse_flags(scenario, servers),
        ("disaggregation-decode-enable-radix-cache", servers.radix_cache),
        ("disaggregation-decode-polling-interval", servers.polling_interval),
        ("disaggregation-decode-extra-slots", servers.extra_slots),
        ("disaggregation-decode-retraction-backup", backup if servers.hisparse is None else "none"),
        ("disaggregation-decode-allocation-policy", servers.allocation),
        ("num-reserved-decode-tokens", servers.admission.reserved_tokens),
    ]


def _hisparse_flags(scenario: Scenario, servers: DecodeSettings) -> Flags:
    """Options of HiSparse. top_k in --hisparse-config repeats the number of tokens that the model's sparse attention
    chooses, which SGLang uses in any case (0.5.23, model_executor/model_runner.py:1039). Empty: decode has no HiSparse.
    """
    if servers.hisparse is None:
        return []
    config = {
        "top_k": load_model(scenario.model).attention.window_tokens,
        "device_buffer_size": servers.hisparse.device_buffer_tokens,
        "host_to_device_ratio": servers.hisparse.host_to_device_ratio,
    }
    return [("enable-hisparse", True), ("hisparse-config", json.dumps(config)), ("disable-radix-cache", True)]


def environment(scenario: Scenario, role: str) -> dict[str, object]:
    """Environment variables of the servers of a role."""
    if role == "aggregated":
        return {}
    staging, health = scenario.network.staging, scenario.health
    found: dict[str, object] = {**LINKS.get(scenario.network.transport, {})}
    transport = load_transport(scenario.network.transport)
    variable, queues = QUEUES["mori" if transport.name.startswith("mori") else "others"]
    if role == "prefill" and transport.num_queues != queues:
        found[variable] = transport.num_queues
    if staging is not None:
        found["SGLANG_DISAGG_STAGING_BUFFER"] = 1
        if role == "decode":
            found["SGLANG_DISAGG_STAGING_POOL_SIZE_MB"] = staging.ring >> 20
        elif staging.prefill_buffer is not None:
            found["SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB"] = staging.prefill_buffer >> 20
    if health is not None:
        found |= {variable: max(1, round(getattr(health, name) / 1e9)) for name, variable in TIMEOUTS.items()}
        found["SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"] = health.heartbeat_failures
        if role == "decode":
            seconds = health.release_timeout / 1e9
            found["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] = f"{seconds:g}"
    prefill, decode = scenario.pair
    if role == "prefill" and isinstance(prefill.transfer, EveryChunk) and not prefill.transfer.cached_prefix_first:
        found["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = 0
    most = getattr(decode.admission, "max_estimated_output_tokens", None)
    if role == "decode" and most not in (None, ReserveDecodeTokens().max_estimated_output_tokens):
        found["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = most
    return found
