"""What SGLang's commands say, read back with SGLang's own meaning of its flags, is the scenario."""

import shlex

from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.launch import ENGINES
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import parse_scenario
from tests.cli.test_sglang import flags

WORKLOAD = {"use": "random_lengths", "num_requests": 9, "input_tokens": 100, "output_tokens": 10}
KV_DTYPES = {"auto": "bf16", "fp8_e4m3": "fp8", "fp4_mx_block16": "fp4"}
STATE_DTYPES = {"": "fp32", "float16": "fp16", "bfloat16": "bf16"}
POLICIES = ["cache_aware", "round_robin", "random", "power_of_two", "least_loaded"]

servers = {
    "gpu": st.just("h200"),
    "instances": st.integers(1, 3),
    "tp": st.sampled_from([1, 2, 4, 8]),
    "mem_fraction": st.sampled_from([0.7, 0.75, 0.85]),
    "pool_tokens": st.integers(16384, 65536),
    "max_running_requests": st.integers(1, 500),
    "eviction": st.sampled_from(["lru", "lfu"]),
    "radix_cache": st.booleans(),
}
computing = {
    "chunked_prefill_tokens": st.integers(64, 9999) | st.just(-1),
    "max_prefill_tokens": st.integers(64, 99999),
    "prefill_max_requests": st.none() | st.integers(1, 9),
    "policy": st.sampled_from(["fcfs", "lpm", "lof", "hrrn", "dfs_weight", "random"]),
    "overlap": st.booleans(),
}
decode_only = {
    "polling_interval": st.integers(1, 9),
    "stream_interval": st.integers(1, 9),
    "extra_slots": st.integers(0, 99),
    "allocation": st.just("early"),
    "admission": st.builds(
        lambda reserved, most: {"reserved_tokens": reserved, "max_estimated_output_tokens": most},
        st.integers(0, 999),
        st.integers(1, 9999),
    ),
}
whole = {
    "model": st.just("qwen3-8b"),
    "workload": st.just(WORKLOAD),
    "page_size": st.sampled_from([1, 16, 64]),
    "context_tokens": st.integers(1000, 40000),
    "kv_dtype": st.sampled_from(list(KV_DTYPES.values())),
    "state_dtype": st.sampled_from(list(STATE_DTYPES.values())),
}
pairs = st.fixed_dictionaries(
    {
        **whole,
        "prefill": st.fixed_dictionaries({**servers, **computing}),
        "decode": st.fixed_dictionaries({**servers, **decode_only}),
        "router": st.sampled_from(POLICIES).map(lambda name: {"prefill": name, "decode": name}),
        "network": st.builds(
            lambda transport, staging: {"transport": transport, "staging": staging},
            st.sampled_from(["mooncake-rdma", "mooncake-tcp", "mooncake-nvlink", "nixl-rdma"]),
            st.none() | st.integers(1, 8).map(lambda size: {"ring": f"{size} GiB"}),
        ),
    }
)
alone = st.fixed_dictionaries(
    {
        **whole,
        "aggregated": st.fixed_dictionaries(
            {**servers, **computing, "schedule_conservativeness": st.sampled_from([0.5, 1.0, 1.5])}
        ),
        "router": st.sampled_from(POLICIES).map(lambda name: {"prefill": name, "decode": name}),
    }
)


def read(commands):
    """The plain data of a scenario: the first server of each role stands for all."""
    found = {"model": "qwen3-8b", "workload": WORKLOAD}
    counts = {}
    for what, command in commands.items():
        role = what.partition("-")[0]
        if role in ("prefill", "decode", "aggregated"):
            counts[role] = counts.get(role, 0) + 1
            found[role] = {**server(role, command, found), "instances": counts[role]}
    found["router"] = router(flags(commands["gateway"]))
    return found


def server(role, command, scenario):
    said = flags(command)
    variables = dict(word.split("=") for word in shlex.split(said[""]) if "=" in word)
    scenario["page_size"] = int(said["page-size"])
    scenario["context_tokens"] = int(said["context-length"])
    scenario["kv_dtype"] = KV_DTYPES[said["kv-cache-dtype"]]
    scenario["state_dtype"] = STATE_DTYPES[said.get("mamba-ssm-dtype", "")]
    settings = {
        "gpu": "h200",
        "tp": int(said["tp-size"]),
        "mem_fraction": float(said["mem-fraction-static"]),
        "pool_tokens": int(said["max-total-tokens"]),
        "max_running_requests": int(said["max-running-requests"]),
        "eviction": said["radix-eviction-policy"],
        "radix_cache": "disable-radix-cache" not in said,
    }
    if role == "decode":
        settings |= {
            "radix_cache": "disaggregation-decode-enable-radix-cache" in said,
            "polling_interval": int(said["disaggregation-decode-polling-interval"]),
            "stream_interval": int(said["stream-interval"]),
            "extra_slots": int(said["disaggregation-decode-extra-slots"]),
            "allocation": said["disaggregation-decode-allocation-policy"],
            "admission": {
                "reserved_tokens": int(said["num-reserved-decode-tokens"]),
                "max_estimated_output_tokens": int(variables.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", 4096)),
            },
        }
        ring = variables.get("SGLANG_DISAGG_STAGING_POOL_SIZE_MB")
        backend = said["disaggregation-transfer-backend"]
        link = {"NVLINK": "mnnvl", "INTRA_NODE_NVLINK": "nvlink"}.get(variables.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL"))
        link = link or ("tcp" if "MC_FORCE_TCP" in variables else "rdma")
        scenario["network"] = {
            "transport": f"{backend}-{link}",
            "staging": {"ring": f"{ring} MiB"} if ring else None,
        }
    else:
        settings |= {
            "chunked_prefill_tokens": int(said["chunked-prefill-size"]),
            "max_prefill_tokens": int(said["max-prefill-tokens"]),
            "prefill_max_requests": int(limit) if (limit := said.get("prefill-max-requests")) else None,
            "policy": said["schedule-policy"].replace("-", "_"),
            "overlap": "disable-overlap-schedule" not in said,
        }
    if role == "aggregated":
        settings["schedule_conservativeness"] = float(said["schedule-conservativeness"])
    assert said.get("disaggregation-mode", "aggregated") == role
    return settings


def router(said):
    is_least_loaded = said.get("cache-threshold") == "1.0"
    names = {role: said.get(f"{role}-policy", said.get("policy")) for role in ("prefill", "decode")}
    return {role: "least_loaded" if is_least_loaded else name for role, name in names.items()}


@settings(max_examples=60, deadline=None)
@given(pairs | alone)
def test_commands_say_what_the_scenario_says(data):
    scenario = parse_scenario(data, base=None)
    made = ENGINES["sglang"](scenario, ["scenario.yaml"], "qwen3-8b")
    again = parse_scenario(read(made.commands), base=None)
    assert resolve(again) == resolve(scenario)
