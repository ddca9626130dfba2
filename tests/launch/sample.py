"""Scenarios of the launch tests: a base scenario, other values of each of its fields, and the sample of them that a
test uses.
"""

from pdsim.launch import ENGINES
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import parse_yaml

PAIR = """\
name: pair
model: qwen3-8b
prefill: {gpu: h100, tp: 2}
decode: {gpu: h100, tp: 2}
network: {transport: nixl-rdma, staging: {ring: 1 GiB}}
health: {}
workload:
  use: random_lengths
  num_requests: 30
  input_tokens: {use: uniform, low: 500, high: 1000}
  output_tokens: {use: uniform, low: 50, high: 100}
client: {use: open_loop, arrivals: {use: poisson, rate: 4/s}}
"""
WITHOUT = {
    "sglang": (),
    "kubernetes": (),
    "vllm": ("network.staging", "health"),
    "dynamo-vllm": ("network.staging", "health"),
}
WITHOUT["dynamo"] = ("health",)
"""Sections that an engine refuses whole."""

SERVERS = {
    "instances": ["3"],
    "gpu": ["h200"],
    "tp": ["4"],
    "dp": ["2"],
    "ep": [],
    "expert_skew": [],
    "load_balance_method": [],
    "redundant_experts": [],
    "attention_backend": ["flashinfer"],
    "moe_a2a_backend": [],
    "two_batch_overlap": ["true"],
    "mem_fraction": ["0.7"],
    "pool_tokens": ["65536"],
    "eviction": ["lfu", "fifo"],
    "max_running_requests": ["77"],
    "mamba_radix_cache_strategy": [],
    "mamba_track_interval": [],
}
HOST_CACHE = {"host_cache": ["200 GiB", "auto"], "host_cache_write": [], "host_cache_connector": []}
HOST_CACHE |= {"host_cache_chunk_tokens": [], "host_cache_layerwise": []}
COMPUTING = {
    "chunked_prefill_tokens": ["4096", "-1"],
    "max_prefill_tokens": ["9999"],
    "prefill_max_requests": ["3"],
    "policy": ["lpm", "shortest_prompt_first", "lof"],
    "overlap": ["false"],
}
DECODING = {"preemption": ["last_arrived_first"], "stream_interval": ["7"]}
OTHER = {
    "name": ["other"],
    "description": ["words"],
    "checkpoint": ["Qwen/Qwen3-8B"],
    "seed": ["7"],
    "model": ["qwen3-14b"],
    "weight_dtype": ["fp8", "fp4"],
    "kv_dtype": ["fp8", "fp4"],
    "state_dtype": ["bf16"],
    "context_tokens": ["16384"],
    "page_size": ["64", "48"],
    "engine": [],
    "engine_version": ["0.5.12"],
    "ignore_eos": ["false"],
    **{f"prefill.{name}": values for name, values in {**SERVERS, **HOST_CACHE, **COMPUTING}.items()},
    "prefill.radix_cache": ["false"],
    "prefill.pp": [],
    "prefill.cp": [],
    "decode.pp": [],
    "decode.dcp": [],
    "prefill.dynamic_chunks": [],
    "prefill.layer_groups": ["4"],
    "prefill.transfer": ["whole_prompt", "{use: every_chunk, cached_prefix_first: false}"],
    "prefill.optimistic_attempts": ["2"],
    "prefill.hold_timeout": [],
    "prefill.long_prefill_tokens": [],
    "prefill.long_prefill_adaptive": [],
    "prefill.chunked_media": [],
    **{f"decode.{name}": values for name, values in {**SERVERS, **DECODING}.items()},
    **{f"decode.{name}": [] for name in HOST_CACHE},
    "decode.radix_cache": ["true"],
    "decode.speculative_draft_model": [],
    "decode.extra_slots": ["5"],
    "decode.polling_interval": ["3"],
    "decode.allocation": ["prefill_complete"],
    "decode.admission": [
        "{use: reserve_decode_tokens, reserved_tokens: 100}",
        "{use: reserve_decode_tokens, max_estimated_output_tokens: 100}",
        "reserve_max_output",
    ],
    "decode.returns_kv": [],
    "decode.retraction_backup": ["false"],
    "decode.retracts_to_host_cache": [],
    **{f"decode.hisparse.{name}": [] for name in ("miss_rate", "device_buffer_tokens", "host_to_device_ratio")},
    "decode.hisparse": [],
    **{
        f"router.{role}": [
            "round_robin",
            "random",
            "power_of_two",
            "least_loaded",
            "{use: cache_aware, match_threshold: 0.5}",
            "{use: cache_aware, balance_abs_threshold: 7}",
            "{use: cache_aware, balance_rel_threshold: 7}",
            "{use: cache_aware, seed: 7}",
            *(
                f"{{use: dynamo_kv, {setting}}}"
                for setting in ("overlap_score_credit: 0.5", "overlap_score_credit_decay: 1", "prefill_load_scale: 2")
            ),
            *(f"{{use: dynamo_kv, {setting}}}" for setting in ("decode_active_request_weight: 2", "seed: 7")),
            "{use: dynamo_kv, router_temperature: 0.5}",
            "{use: dynamo_kv, kv_events: true}",
            "{use: dynamo_kv, host_cache_hit_weight: 0.5}",
            "llm_d",
            *(f"{{use: session_affinity, {setting}}}" for setting in ("ttl: 7 s", "otherwise: random", "scope: run")),
            *(f"{{use: sticky_least_loaded, {setting}}}" for setting in ("seed: 7", "session_expiration: 60 s")),
            *(f"{{use: manual, {setting}}}" for setting in ("assignment_mode: min_group", "max_idle: 7 s")),
            *(f"{{use: manual, {setting}}}" for setting in ("eviction_interval: 7 s", "max_idle: 7.5 s", "seed: 7")),
        ]
        for role in ("prefill", "decode")
    },
    "router.disaggregation": [],
    "router.counts": ["streams"],
    "router.queue": [],
    "router.shedding": ["{max_queued_requests: 8}"],
    "priorities": ["{chat: 1}"],
    "network.transport": ["mooncake-rdma", "mooncake-tcp", "mooncake-nvlink", "shared-memory"],
    **{f"network.{name}": ["1 GB/s"] for name in ("bandwidth", "shared_bandwidth")},
    **{
        f"network.{name}": ["7 us"]
        for name in ("transfer_latency", "descriptor_latency", "message_latency", "handover")
    },
    "network.gpus_per_nic": ["2"],
    "network.serial": ["true"],
    "network.nixl_push": [],
    **{f"network.staging.{name}": ["64 MiB"] for name in ("ring", "prefill_buffer")},
    **{f"network.staging.{name}": ["7 us"] for name in ("gather_host", "scatter_host", "transfer_latency")},
    **{f"network.staging.{name}": ["0.3"] for name in ("gather_efficiency", "scatter_efficiency")},
    "cost.graph_sizes": ["[1, 2, 4]"],
    "corner": ["slowest"],
    "profile": [],
    "workload": [
        "{use: random_lengths, num_requests: 30, input_tokens: 100, output_tokens: {use: normal, mean: 50, stddev: 5}}",
        "{use: shared_prefix_groups, num_groups: 4}",
        "{use: shared_prefix_groups, ordered: true, range_ratio: 0.5}",
    ],
    "client": [
        "{use: closed_loop, concurrency: 4}",
        "{use: open_loop, arrivals: {use: gamma, rate: 4/s, burstiness: 2}}",
    ],
    "encode.instances": [],
    "encode.gpu": [],
    "encode.max_batch_size": [],
    "encode.step_tokens": [],
    "encode.cache": [],
    "encode.transport": [],
    "faults": ["[{kill: decode-0, at: 1 s}]"],
    **{f"health.{name}": ["7 s"] for name in ("heartbeat_interval", "bootstrap_timeout", "waiting_timeout")},
    **{f"health.{name}": ["7 s"] for name in ("release_timeout", "transfer_timeout")},
    "health.heartbeat_failures": ["7"],
    "health.max_retries": ["7"],
    "health.backoff_jitter": ["0.5"],
}
"""For each field of a disaggregated scenario: values other than those of the base scenario."""
DRAFTS: dict[str, object] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_draft_tokens": 4,
    "speculative_accept_length": 2,
    "speculative_draft_layers": 2,
    "speculative_draft_vocabulary": 30000,
    "speculative_drafting": "1 ms",
}
WHOLE = ("cost", "front_end", "aggregated", "elastic", "storage")
"""Sections that launches leave aside as a whole, or that another test covers."""


def scenario(*changes, base=PAIR):
    data = parse_yaml(base, "base")
    for path, value in changes:
        *inner, last = path.split(".")
        section = data
        for name in inner:
            section = section.setdefault(name, {})
        if value is None:
            del section[last]
        else:
            section[last] = parse_yaml(value, path)
    return parse_scenario(data, base=None, where="test")


WIDE_SERVERS = "{gpu: h100, tp: 16, dp: 8, two_batch_overlap: true}"
WIDE = [("model", "deepseek-v3"), ("prefill", WIDE_SERVERS), ("decode", WIDE_SERVERS), ("network.staging", None)]
"""Changes after which each server spans two hosts."""
IMAGES = "{use: random_lengths, num_requests: 30, input_tokens: 99, output_tokens: 9, images: 2, image_tokens: 1000}"
HISPARSE = [("model", "deepseek-v3.2"), ("prefill", "{gpu: h200, tp: 8}"), ("network", "{transport: mooncake-rdma}")]
HISPARSE += [("decode", "{gpu: h200, tp: 8, hisparse: {miss_rate: 0.1, host_to_device_ratio: 5}}"), ("page_size", "64")]
"""Changes after which decode keeps its KV in host memory."""
ENCODE = [("model", "qwen3-vl-8b"), ("encode", "{gpu: h100, instances: 2, cache: 1 GiB}"), ("health", None)]
ENCODE += [("network.staging", None), ("workload", IMAGES)]
"""Changes that add encode instances, and a load with images."""
VLLM_ENCODE = [*ENCODE, ("encode.transport", "nixl-rdma"), ("network.transport", "nixl-rdma")]
"""As ENCODE, for vLLM."""


def text(engine, made_of):
    made = ENGINES[engine](made_of, ["pair.yaml"], made_of.checkpoint or made_of.model)
    return [*made.commands.values(), *made.manifests.values()], made.notes


AGGREGATED = {
    **SERVERS,
    **COMPUTING,
    **DECODING,
    **HOST_CACHE,
    "radix_cache": ["false"],
    "long_prefill_tokens": [],
    "long_prefill_adaptive": [],
    "chunked_media": [],
    "dcp": [],
    "pp": [],
    "cp": [],
    "schedule_conservativeness": ["0.5"],
    "priority_preemption_threshold": ["3"],
    "mixed_chunk": ["true"],
    "scheduler_recv_interval": ["4"],
    "prefill_schedule_interval": [],
    **{name: [] for name in (*DRAFTS, "speculative_draft_model")},
}
"""For each field of aggregated servers: values other than those of the base scenario."""
ALONE = [("prefill", None), ("decode", None), ("network", None), ("health", None), ("aggregated", "{gpu: h100, tp: 2}")]

FAMILIES = (("sglang", "kubernetes", "dynamo"), ("vllm", "dynamo-vllm"))
"""Groups of engines. The servers of a group's engines have the same rules."""


ROUTED = ("router", "network", "health", "workload", "client", "name", "seed")
"""Beginnings of the fields for which each engine of a family has rules of its own."""


def sample(values, engine):
    """The changes (path, value) to test with one engine. The engines of a family divide all values among them, and each
    tests one value of every field of ROUTED.
    """
    family = next(one for one in FAMILIES if engine in one)
    rank = family.index(engine)
    dealt = [(path, value) for path, others in values.items() for value in others][rank :: len(family)]
    routed = [(path, others[rank % len(others)]) for path, others in values.items() if others]
    return list(dict.fromkeys([*dealt, *(change for change in routed if change[0].startswith(ROUTED))]))
