"""Reads the options of servers as fields of a scenario, the inverse of `pdsim launch`. Older names of options are
known, too.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pdsim.formats.deployments import encoders
from pdsim.formats.deployments.measured_fields import read_hisparse_config
from pdsim.formats.deployments.names import is_known, model_named
from pdsim.formats.deployments.readers import (
    STATE_DTYPES,
    Read,
    Reader,
    Value,
    count_of,
    inverse,
    is_flag,
    json_of,
    note_dtype,
    nothing,
    number_of,
    of_common,
    of_server,
    one_of,
    positive_of,
    sizes_of,
    text_of,
)
from pdsim.formats.deployments.trtllm_flags import TRTLLM
from pdsim.inputs import finite, whole
from pdsim.launch import host_memory, sglang, vllm
from pdsim.system.catalog import names
from pdsim.system.memory import A2aBackend
from pdsim.system.states import StateStrategy

_KV_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("auto", "None"), None),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
    **dict.fromkeys(("fp4_e2m1", "fp4_mx_block16", "nvfp4"), "fp4"),
}


def _kv_dtype(read: Read, value: Value) -> None:
    if (dtype := one_of(_KV_DTYPES)(value)) is not None:
        read.common["kv_dtype"] = dtype


def _quantization(read: Read, value: Value) -> None:
    """Reads --quantization. fp8 becomes weight_dtype, because the server casts the checkpoint while it loads it. Other
    values become a note: they only describe the checkpoint.
    """
    if value == "fp8":
        read.common["weight_dtype"] = "fp8"
    else:
        read.aside.append(f"--quantization {value}: the catalog's entry of the model says its types")


def _a2a_backend(read: Read, value: Value) -> None:
    """Stores --moe-a2a-backend, or vLLM's --all2all-backend, in the server's fields. A library that pdsim does not
    model becomes a note.
    """
    name = text_of(value).removesuffix("_low_latency").removesuffix("_high_throughput")
    backend = "none" if name == "allgather_reducescatter" else name
    if backend in get_args(A2aBackend):
        read.server["moe_a2a_backend"] = backend
    else:
        read.aside.append(f"the all-to-all backend {value}: pdsim models {', '.join(get_args(A2aBackend))}")


def _reserved(read: Read, value: Value) -> None:
    read.server["admission"] = {"reserved_tokens": count_of(value)}


def _host_bytes(read: Read, value: Value) -> None:
    size = number_of(value)
    if size:
        read.server["host_cache"] = f"{size:g} GB"


def _write_policy(read: Read, value: Value) -> None:
    read.server["host_cache_write"] = text_of(value)


def _host_cache(read: Read, value: Value) -> None:
    if is_flag(found=True)(value):
        read.server.setdefault("host_cache", "auto")


def _storage_extra(read: Read, value: Value) -> None:
    found = json_of(value)
    if isinstance(found, dict) and "prefetch_threshold" in found:
        read.common["storage.prefetch_threshold"] = found["prefetch_threshold"]


def _backup(read: Read, value: Value) -> None:
    read.server["retracts_to_host_cache"] = value == "host_pool"


def _draft_model(read: Read, value: Value) -> None:
    """Stores the draft model in the server's fields: its name in the catalog, or its path if the catalog lacks the
    model. Scenarios use the name only with the algorithm STANDALONE.
    """
    path = text_of(value)
    read.server["speculative_draft_model"] = model_named(path)[0] if is_known(path) else path


def _state_strategy(read: Read, value: Value) -> None:
    if value in get_args(StateStrategy):
        read.server["mamba_radix_cache_strategy"] = value
    elif value != "auto":
        read.aside.append(f"the strategy {value} of mamba states: pdsim models {' and '.join(get_args(StateStrategy))}")


def _divides(field: str) -> Reader:
    """Makes a reader that stores the size of a group of GPUs in the server's field `field`. The reader leaves out 1,
    which is the default.
    """

    def read_size(read: Read, value: Value) -> None:
        if (size := positive_of(value)) > 1:
            read.server[field] = size

    return read_size


def _transport(read: Read, value: Value) -> None:
    backend = text_of(value)
    name = {"mooncake_tcp": "mooncake-tcp", "ascend": "ascend-sdma"}.get(backend, f"{backend}-rdma")
    if name in names("transports"):
        read.common["network.transport"] = name
    else:
        read.aside.append(f"--disaggregation-transfer-backend {value}: the catalog has no such transport")


SGLANG: dict[str, Reader] = {
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), of_server("tp", positive_of)),
    **dict.fromkeys(("dp-size", "data-parallel-size", "dp"), of_server("dp", positive_of)),
    **dict.fromkeys(("pp-size", "pipeline-parallel-size", "pp"), of_server("pp", positive_of)),
    **dict.fromkeys(("ep-size", "expert-parallel-size", "ep"), of_server("ep", positive_of)),
    "moe-a2a-backend": _a2a_backend,
    "deepep-mode": nothing,
    "enable-dp-attention": of_server("dp_attention", is_flag(found=True)),
    "load-balance-method": of_server("load_balance_method", text_of),
    "enable-eplb": of_server("eplb", is_flag(found=True)),
    "ep-num-redundant-experts": of_server("redundant_experts"),
    "page-size": of_common("page_size"),
    "context-length": of_common("context_tokens"),
    "kv-cache-dtype": _kv_dtype,
    "quantization": _quantization,
    "mamba-ssm-dtype": of_common("state_dtype", one_of(STATE_DTYPES)),
    "mem-fraction-static": of_server("mem_fraction", number_of),
    "max-total-tokens": of_server("pool_tokens"),
    "max-running-requests": of_server("max_running_requests"),
    "radix-eviction-policy": of_server("eviction", text_of),
    "enable-hierarchical-cache": _host_cache,
    "hicache-size": _host_bytes,
    "hicache-write-policy": _write_policy,
    "hicache-storage-backend": of_common("storage.shared", lambda value: value != "file"),
    "hicache-storage-prefetch-policy": of_common("storage.prefetch", text_of),
    "hicache-storage-backend-extra-config": _storage_extra,
    "dtype": note_dtype,
    "stream-interval": of_server("stream_interval"),
    "cuda-graph-bs": of_common("cost.graph_sizes", sizes_of),
    "cuda-graph-bs-decode": of_common("cost.graph_sizes", sizes_of),
    "chunked-prefill-size": of_server("chunked_prefill_tokens"),
    "max-prefill-tokens": of_server("max_prefill_tokens"),
    "prefill-max-requests": of_server("prefill_max_requests"),
    "schedule-policy": of_server(
        "policy", one_of(inverse({k: v for k, v in sglang.SCHEDULE_POLICIES.items() if k != "priority"}))
    ),
    "enable-priority-scheduling": of_server("has_priorities", is_flag(found=True)),
    "disable-radix-cache": of_server("radix_cache", is_flag(found=False)),
    "disable-overlap-schedule": of_server("overlap", is_flag(found=False)),
    "enable-mixed-chunk": of_server("mixed_chunk", is_flag(found=True)),
    "scheduler-recv-interval": of_server("scheduler_recv_interval"),
    "schedule-conservativeness": of_server("schedule_conservativeness", number_of),
    "priority-scheduling-preemption-threshold": of_server("priority_preemption_threshold"),
    "disaggregation-mode": of_server("role", text_of),
    "disaggregation-transfer-backend": _transport,
    "enable-dynamic-chunking": of_server("dynamic_chunks", is_flag(found=True)),
    "enable-prefill-cp": nothing,
    "cp-strategy": nothing,
    "attn-cp-size": _divides("cp"),
    **dict.fromkeys(("dcp-size", "decode-context-parallel-size"), _divides("dcp")),
    "optimistic-prefill-attempts": of_server("optimistic_attempts"),
    "disaggregation-decode-enable-radix-cache": of_server("radix_cache", is_flag(found=True)),
    "disaggregation-decode-polling-interval": of_server("polling_interval"),
    "disaggregation-decode-extra-slots": of_server("extra_slots"),
    "disaggregation-decode-retraction-backup": _backup,
    "disaggregation-decode-allocation-policy": of_server("allocation", text_of),
    "num-reserved-decode-tokens": _reserved,
    "speculative-algorithm": of_server("speculative_algorithm", text_of),
    "speculative-num-steps": of_server("speculative_num_steps"),
    "speculative-eagle-topk": of_server("speculative_eagle_topk"),
    "speculative-num-draft-tokens": of_server("speculative_draft_tokens"),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-draft-model"), _draft_model),
    "enable-hisparse": of_server("enable_hisparse", is_flag(found=True)),
    **dict.fromkeys(("hisparse-config", "hierarchical-sparse-attention-extra-config"), read_hisparse_config),
    **dict.fromkeys(("mamba-radix-cache-strategy", "mamba-scheduler-strategy"), _state_strategy),
    "mamba-track-interval": of_server("mamba_track_interval"),
    **encoders.OPTIONS,
}
"""For each option of SGLang's servers (0.4 to 0.5.23) that pdsim reads as fields of a scenario: the function that
translates the option's value.
"""


def _blocks(read: Read, value: Value) -> None:
    read.server["num_blocks"] = count_of(value)


def _eplb(read: Read, value: Value) -> None:
    found = json_of(value)
    if isinstance(found, dict) and "num_redundant_experts" in found:
        read.server["redundant_experts"] = whole(found["num_redundant_experts"])


def _speculative(read: Read, value: Value) -> None:
    found = json_of(value)
    if isinstance(found, dict) and isinstance(found.get("num_speculative_tokens"), int):
        read.server["speculative_draft_tokens"] = found["num_speculative_tokens"] + 1
    else:
        read.aside.append("--speculative-config: without num_speculative_tokens the scenario has no drafts")


_CONNECTORS = {
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", vllm.NIXL_PUSH), "nixl-rdma"),
    "MooncakeConnector": "mooncake-rdma",
    "MooncakeConnectorV1": "mooncake-rdma",
    "P2pNcclConnector": "p2p-nccl",
    "LMCacheConnectorV1": "lmcache",
    "MoRIIOConnector": "mori-rdma",
}
_KV_ROLES = inverse(vllm.KV_ROLES)


def _transfer_config(read: Read, value: Value) -> None:
    for config in _configs(json_of(value)):
        connector, role, extra = config.get("kv_connector"), config.get("kv_role"), _extra_of(config)
        if connector == host_memory.LMCACHE and role == "kv_both":
            read.server["lmcache"] = extra
        elif connector == host_memory.KVBM:
            read.server["kvbm"] = True
        elif connector in _CONNECTORS:
            read.common.setdefault("network.transport", _moved_by(config))
            if connector == vllm.NIXL_PUSH:
                read.common["network.nixl_push"] = True
        if role in _KV_ROLES:
            read.server.setdefault("role", _KV_ROLES[role])
        if isinstance(extra.get("kv_lease_duration"), int):
            read.server["hold_timeout"] = f"{extra['kv_lease_duration']} s"
        if connector == host_memory.OFFLOADING and extra.get("cpu_bytes_to_use"):
            read.server["offload_bytes"] = whole(extra["cpu_bytes_to_use"])
    read.server["has_connector"] = True


def _extra_of(config: dict[str, Any]) -> dict[str, Any]:
    """A connector's own settings (kv_connector_extra_config). Empty if the config has none, or if they are no JSON
    object.
    """
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def _offload_gibibytes(read: Read, value: Value) -> None:
    read.server["offload_bytes"] = round(number_of(value) * 2**30)


def _moved_by(config: dict[str, Any]) -> str:
    is_libfabric = _extra_of(config).get("backends") == ["LIBFABRIC"]
    return "nixl-libfabric" if is_libfabric else _CONNECTORS[config["kv_connector"]]


def _configs(found: Any) -> list[dict[str, Any]]:
    """A connector's configuration `found`, followed by the configurations of the connectors inside it, if it has
    several. Raises ValueError if `found` is no object.
    """
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    inside = _extra_of(found).get("connectors")
    return [found, *(one for one in inside or [] if isinstance(one, dict))]


VLLM: dict[str, Reader] = {
    **dict.fromkeys(("tensor-parallel-size", "tp"), of_server("tp", positive_of)),
    **dict.fromkeys(("data-parallel-size", "dp"), of_server("dp", positive_of)),
    **dict.fromkeys(("pipeline-parallel-size", "pp"), of_server("pp", positive_of)),
    **dict.fromkeys(("decode-context-parallel-size", "dcp"), _divides("dcp")),
    **dict.fromkeys(("dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size"), nothing),
    "enable-expert-parallel": of_server("whole_experts", is_flag(found=True)),
    "all2all-backend": _a2a_backend,
    "enable-eplb": of_server("eplb", is_flag(found=True)),
    "eplb-config": _eplb,
    "num-redundant-experts": of_server("redundant_experts"),
    "block-size": of_common("page_size"),
    "max-model-len": of_common("context_tokens", lambda value: _shortened(text_of(value))),
    "kv-cache-dtype": _kv_dtype,
    "quantization": _quantization,
    "mamba-ssm-cache-dtype": of_common("state_dtype", one_of(STATE_DTYPES)),
    "dtype": note_dtype,
    "stream-interval": of_server("stream_interval"),
    "gpu-memory-utilization": of_server("mem_fraction", number_of),
    "num-gpu-blocks-override": _blocks,
    "max-num-seqs": of_server("max_running_requests"),
    "enable-prefix-caching": of_server("radix_cache", is_flag(found=True)),
    "no-enable-prefix-caching": of_server("radix_cache", is_flag(found=False)),
    "max-num-batched-tokens": of_server("rank_chunk_tokens", lambda value: _shortened(text_of(value))),
    "no-enable-chunked-prefill": of_server("rank_chunk_tokens", lambda _: 0),
    "enable-chunked-prefill": nothing,
    "scheduling-policy": of_server("has_priorities", lambda value: value == "priority"),
    "long-prefill-token-threshold": of_server("long_prefill_tokens"),
    "long-prefill-token-threshold-adaptive": of_server("long_prefill_adaptive", is_flag(found=True)),
    "disable-chunked-mm-input": of_server("chunked_media", is_flag(found=False)),
    "prefill-schedule-interval": of_server("prefill_schedule_interval"),
    "no-async-scheduling": of_server("overlap", is_flag(found=False)),
    "async-scheduling": nothing,
    "cudagraph-capture-sizes": of_common("cost.graph_sizes", sizes_of),
    "cuda-graph-sizes": of_common("cost.graph_sizes", sizes_of),
    "speculative-config": _speculative,
    "kv-transfer-config": _transfer_config,
    **encoders.VLLM_OPTIONS,
    "kv-offloading-size": _offload_gibibytes,
    "disaggregation-mode": of_server("role", text_of),
    "is-prefill-worker": of_server("role", lambda _: "prefill"),
    "is-decode-worker": of_server("role", lambda _: "decode"),
}
"""Readers of the options of vLLM's servers, 0.6 to 0.33, and of Dynamo's workers of vLLM."""

_FACTORS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""Factors that letters after a number stand for in vLLM (arg_utils.human_readable_int)."""


def _shortened(text: str) -> int:
    if text[-1:] in _FACTORS:
        return round(finite(text[:-1]) * _FACTORS[text[-1]])
    return whole(text)


SILENT = {
    "host", "port", "model", "model-path", "served-model-name", "trust-remote-code", "log-level", "log-requests",
    "base-gpu-id", "dist-init-addr", "nnodes", "node-rank", "disaggregation-bootstrap-port", "kv-events-config",
    "tokenizer", "tokenizer-path", "download-dir", "api-key", "disable-log-requests",
    "enable-metrics", "seed", "decode-log-interval", "watchdog-timeout", "uvicorn-log-level", "disable-log-stats",
    "no-enable-log-requests", "enable-log-requests", "load-format", "random-seed", "skip-tokenizer-init",
}  # fmt: skip
"""Options that read_flags skips without a note: options such as model and port, which other functions read, and
options that affect neither the data that is computed and sent nor its times.
"""
TABLES = {"sglang": SGLANG, "vllm": VLLM, "dynamo.sglang": {**VLLM, **SGLANG}, "dynamo.vllm": VLLM}
TABLES |= {"trtllm": TRTLLM, "dynamo.trtllm": TRTLLM}


def read_flags(program: str, flags: Mapping[str, Value]) -> Read:
    """The scenario fields that the options of a program set. program: name of the program, a key of TABLES. flags:
    values of its options, by option. Raises ValueError for a wrong value, which names the option, its value and the
    possible values. If the value contains a variable ($NAME) that the file does not set, adds a note instead.
    """
    read, table = Read(), TABLES[program]
    for name, value in flags.items():
        shown = f"--{name}" if value is True else f"--{name} {' '.join(value) if isinstance(value, list) else value}"
        if name in table:
            before = len(read.aside)
            try:
                table[name](read, value)
            except (ValueError, TypeError, OverflowError) as wrong:
                if "$" in shown:
                    read.unknown.add(name)
                    read.aside.append(f"{shown}: the file does not set it")
                    continue
                wanted = wrong if isinstance(wrong, ValueError) else "another value"
                raise ValueError(f"{shown}: expected {wanted}") from None
            if len(read.aside) == before:
                read.understood.append(shown)
        elif name not in SILENT:
            read.aside.append(shown)
    return read
