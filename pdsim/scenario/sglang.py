"""The commands that put a scenario on real GPUs with SGLang 0.5: its servers, its gateway and its load."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdsim.policy.decode import ReserveDecodeTokens
from pdsim.scenario.component import component_name
from pdsim.scenario.schema import (
    AggregatedSettings,
    ComputingSettings,
    DecodeSettings,
    DecodingSettings,
    Scenario,
    ServerSettings,
)
from pdsim.scenario.sizing import resolve
from pdsim.workload.arrivals import Poisson
from pdsim.workload.client_driver import ClosedLoop
from pdsim.workload.lengths import Fixed, Lengths, Uniform
from pdsim.workload.synthetic import RandomLengths, SharedPrefixGroups

HOST = "127.0.0.1"
GATEWAY_PORT = 8000
FIRST_PORT, FIRST_BOOTSTRAP_PORT = 30000, 8998
SERVER, GATEWAY, LOAD = "sglang.launch_server", "sglang_router.launch_router", "sglang.bench_serving"
KV_DTYPES = {"bf16": "auto", "fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}
PREFILL_POLICIES = ("fcfs", "lpm")
ROUTING_POLICIES = ("cache_aware", "round_robin", "random", "power_of_two")
BACKENDS = ("mooncake", "nixl")


@dataclass
class Launch:
    """Shell commands by what they start, in order, and what of the scenario none of them says."""

    commands: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, module: str, flags: Iterable[tuple[str, Any]], **environment: object) -> None:
        """A flag with True stands alone; one with None or False is not given."""
        words = [f"{name}={value}" for name, value in environment.items()] + ["python", "-m", module]
        for name, value in flags:
            if value is not None and value is not False:
                values = [] if value is True else value if isinstance(value, list) else [value]
                words += [f"--{name}", *map(str, values)]
        self.commands[what] = " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def launch(scenario: Scenario, model: str = "$MODEL") -> Launch:
    """Commands for one host, each server on GPUs of its own. Raises ConfigError for what no cluster can be."""
    scenario = resolve(scenario)
    made = Launch()
    if scenario.network.staging is not None and scenario.network.staging.prefill_buffer is not None:
        made.notes.append(
            "network.staging.prefill_buffer is heard by SGLang 0.5.12; in 0.5.23 the buffer holds one forward's KV"
        )
    at = [("host", HOST), ("port", GATEWAY_PORT)]
    if scenario.aggregated is not None:
        urls = _add_servers(made, scenario, scenario.aggregated, "aggregated", model)
        policy = ("policy", _policy(made, scenario.router.prefill, ROUTING_POLICIES))
        made.add("gateway", GATEWAY, [*at, ("worker-urls", urls), policy])
    else:
        prefill, decode = scenario.pair
        pairs = [
            ("prefill", [url, FIRST_BOOTSTRAP_PORT + i])
            for i, url in enumerate(_add_servers(made, scenario, prefill, "prefill", model))
        ]
        pairs += [("decode", [url]) for url in _add_servers(made, scenario, decode, "decode", model)]
        policies = [
            (f"{role}-policy", _policy(made, getattr(scenario.router, role), ROUTING_POLICIES))
            for role in ("prefill", "decode")
        ]
        made.add("gateway", GATEWAY, [*at, ("pd-disaggregation", True), *pairs, *policies])
    _add_load(made, scenario)
    return made


def _add_servers(made: Launch, scenario: Scenario, servers: ServerSettings, role: str, model: str) -> list[str]:
    """Their URLs."""
    urls = []
    first_gpu = scenario.pair.prefill.num_gpus if role == "decode" else 0
    settings = _server_flags(made, scenario, servers)
    for index in range(servers.instances):
        port = FIRST_PORT + len(made.commands)
        flags = [("model-path", model), ("host", HOST), ("port", port), ("base-gpu-id", first_gpu + index * servers.tp)]
        flags += settings
        if role == "prefill":
            flags.append(("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT + index))
        made.add(f"{role}-{index}", SERVER, flags, **_environment(scenario, role))
        urls.append(f"http://{HOST}:{port}")
    return urls


def _server_flags(made: Launch, scenario: Scenario, servers: ServerSettings) -> list[tuple[str, Any]]:
    flags: list[tuple[str, Any]] = [
        ("tp-size", servers.tp),
        ("dp-size", servers.dp if servers.dp > 1 else None),
        ("enable-dp-attention", servers.dp > 1),
        ("page-size", scenario.page_size),
        ("context-length", scenario.context_tokens),
        ("kv-cache-dtype", KV_DTYPES[scenario.kv_dtype]),
        ("mem-fraction-static", servers.mem_fraction),
        ("max-total-tokens", servers.pool_tokens),
        (
            "max-running-requests",
            None if servers.max_running_requests is None else servers.max_running_requests * servers.dp,
        ),
        ("radix-eviction-policy", _policy(made, servers.eviction, ("lru", "lfu"))),
    ]
    if isinstance(servers, ComputingSettings):
        flags += [
            ("chunked-prefill-size", servers.chunked_prefill_tokens or -1),
            ("max-prefill-tokens", servers.max_prefill_tokens),
            ("schedule-policy", _policy(made, servers.policy, PREFILL_POLICIES)),
            ("disable-radix-cache", not servers.radix_cache),
            ("disable-overlap-schedule", not getattr(servers, "overlap", True)),
        ]
    if isinstance(servers, AggregatedSettings):
        flags.append(("schedule-conservativeness", servers.schedule_conservativeness))
    else:
        flags += _disaggregation_flags(made, scenario, servers)
    if isinstance(servers, DecodingSettings) and servers.acceptance is not None:
        made.notes.append(
            "speculative_draft_tokens: the draft model is not in the scenario; give --speculative-algorithm and its own"
        )
    return flags


def _disaggregation_flags(made: Launch, scenario: Scenario, servers: ServerSettings) -> list[tuple[str, Any]]:
    backend = scenario.network.transport.partition("-")[0]
    if backend not in BACKENDS:
        made.notes.append(f"network.transport {scenario.network.transport} is no backend of SGLang")
    flags: list[tuple[str, Any]] = [("disaggregation-transfer-backend", backend if backend in BACKENDS else None)]
    if not isinstance(servers, DecodeSettings):
        return [("disaggregation-mode", "prefill"), *flags]
    reserved = servers.admission.reserved_tokens if isinstance(servers.admission, ReserveDecodeTokens) else None
    if reserved is None:
        made.notes.append(f"decode.admission {component_name(servers.admission)} has no flag")
    return [
        ("disaggregation-mode", "decode"),
        *flags,
        ("disaggregation-decode-enable-radix-cache", servers.radix_cache),
        ("disaggregation-decode-polling-interval", servers.polling_interval),
        ("disaggregation-decode-extra-slots", servers.extra_slots),
        ("disaggregation-decode-allocation-policy", servers.allocation),
        ("num-reserved-decode-tokens", reserved),
    ]


def _environment(scenario: Scenario, role: str) -> Mapping[str, object]:
    staging = scenario.network.staging
    if role == "aggregated" or staging is None:
        return {}
    sizes: dict[str, object] = {}
    if role == "decode":
        sizes["SGLANG_DISAGG_STAGING_POOL_SIZE_MB"] = staging.ring >> 20
    elif staging.prefill_buffer is not None:
        sizes["SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB"] = staging.prefill_buffer >> 20
    return {"SGLANG_DISAGG_STAGING_BUFFER": 1, **sizes}


def _policy(made: Launch, policy: Any, known: tuple[str, ...]) -> str | None:
    name = component_name(policy)
    if name in known:
        return name
    made.notes.append(f"policy {name} is not SGLang's, which has {', '.join(known)}")
    return None


# The load.


def _add_load(made: Launch, scenario: Scenario) -> None:
    requests, dataset = _dataset(made, scenario.workload)
    if not dataset:
        return
    client = scenario.client
    if isinstance(client, ClosedLoop):
        pace: list[tuple[str, Any]] = [("max-concurrency", client.concurrency)]
    elif isinstance(client.arrivals, Poisson):
        pace = [("request-rate", client.arrivals.rate_per_s)]
    else:
        made.notes.append("client: bench_serving sends Poisson arrivals or a closed loop; this load is sent at once")
        pace = []
    flags = [
        ("backend", "sglang"),
        ("host", HOST),
        ("port", GATEWAY_PORT),
        ("num-prompts", requests),
        *dataset,
        *pace,
        ("seed", scenario.seed),
        ("tag", scenario.name),
        ("output-file", f"{scenario.name}.jsonl"),
    ]
    made.add("load", LOAD, flags)


def _dataset(made: Launch, workload: Any) -> tuple[int, list[tuple[str, Any]]]:
    """The number of prompts, and the flags that make them; none where bench_serving cannot."""
    if isinstance(workload, SharedPrefixGroups):
        return workload.num_groups * workload.prompts_per_group, [
            ("dataset-name", "generated-shared-prefix"),
            ("gsp-num-groups", workload.num_groups),
            ("gsp-prompts-per-group", workload.prompts_per_group),
            ("gsp-system-prompt-len", workload.system_prompt_tokens),
            ("gsp-question-len", workload.question_tokens),
            ("gsp-output-len", workload.output_tokens),
            ("gsp-num-turns", workload.num_turns if workload.num_turns > 1 else None),
        ]
    if isinstance(workload, RandomLengths):
        inputs, outputs = _longest(workload.input_tokens), _longest(workload.output_tokens)
        if inputs is not None and outputs is not None and inputs[1] == outputs[1]:
            return workload.num_requests, [
                ("dataset-name", "random-ids"),
                ("random-input-len", inputs[0]),
                ("random-output-len", outputs[0]),
                ("random-range-ratio", f"{inputs[1]:g}"),
                ("tokenize-prompt", True),
            ]
    made.notes.append(
        f"workload {component_name(workload)} with these lengths is none of bench_serving's: no load command"
    )
    return 0, []


def _longest(lengths: Lengths) -> tuple[int, float] | None:
    """The longest, and the shortest as a share of it."""
    if isinstance(lengths, Fixed):
        return lengths.tokens, 1.0
    return (lengths.high, lengths.low / lengths.high) if isinstance(lengths, Uniform) else None
