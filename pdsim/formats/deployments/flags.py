"""Reads flags of servers as fields of a scenario: the inverse of `pdsim launch`, with older names of flags."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pdsim.formats.deployments.names import is_known, model_named
from pdsim.inputs import finite, whole
from pdsim.launch import sglang, vllm
from pdsim.system.catalog import names
from pdsim.system.states import StateStrategy

Value = str | bool | list[str]


def parsed(words: Sequence[str]) -> tuple[list[str], dict[str, Value]]:
    """Words without a flag, and flags with their values. `--tp-size 4` and `--tp_size=4` are the same flag."""
    alone: list[str] = []
    flags: dict[str, Value] = {}
    name = None
    for word in words:
        if (word.startswith("--") and len(word) > 2) or word in _SHORT:  # noqa: PLR2004
            name, equals, value = _SHORT.get(word, word[2:]).partition("=")
            name = name.replace("_", "-")
            flags[name] = value if equals else True
            name = None if equals else name
        elif name is None:
            alone.append(word)
        else:
            before = flags[name]
            flags[name] = (
                word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
            )
    return alone, flags


_SHORT = {
    "-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size",
    "-O": "--compilation-config", "-n": "--nnodes", "-r": "--node-rank", "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count", "-dpl": "--data-parallel-size-local", "-dph": "--data-parallel-hybrid-lb",
}  # fmt: skip


@dataclass
class Read:
    """Fields that the flags of one server set."""

    server: dict[str, Any] = field(default_factory=dict)
    """Fields of the server's role."""
    common: dict[str, Any] = field(default_factory=dict)
    """Fields of the scenario, by path."""
    understood: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    """Flags whose values are variables that the file does not set."""


Reader = Callable[[Read, Value], None]


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError("one value")
    return value


def _count(value: Value) -> int:
    return whole(_text(value))


def _server(name: str, convert: Callable[[Value], Any] = _count) -> Reader:
    return lambda read, value: read.server.__setitem__(name, convert(value))


def _common(name: str, convert: Callable[[Value], Any] = _count) -> Reader:
    return lambda read, value: read.common.__setitem__(name, convert(value))


def _number(value: Value) -> float:
    return finite(_text(value))


def _is(found: bool) -> Callable[[Value], bool]:
    """Reader of a flag without a value, or with true or false."""

    def convert(value: Value) -> bool:
        return found if value is True or _text(value).lower() in ("true", "1") else not found

    return convert


def _one_of(known: Mapping[str, Any]) -> Callable[[Value], Any]:
    def convert(value: Value) -> Any:
        if _text(value) not in known:
            raise ValueError(", ".join(known))
        return known[_text(value)]

    return convert


def _nothing(read: Read, value: Value) -> None:
    del read, value


def _inverse(table: Mapping[str, Any]) -> dict[str, Any]:
    return {theirs: ours for ours, theirs in table.items() if theirs is not None}


_KV_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("auto", "None"), None),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "fp8"),
    **dict.fromkeys(("fp4_e2m1", "fp4_mx_block16", "nvfp4"), "fp4"),
}
_STATE_DTYPES = {"float32": "fp32", "auto": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _kv_dtype(read: Read, value: Value) -> None:
    if (dtype := _one_of(_KV_DTYPES)(value)) is not None:
        read.common["kv_dtype"] = dtype


def _quantization(read: Read, value: Value) -> None:
    """Reads --quantization. fp8 means a cast while the checkpoint is loaded; other values describe the checkpoint."""
    if value == "fp8":
        read.common["weight_dtype"] = "fp8"
    else:
        read.aside.append(f"--quantization {value}: the catalog's entry of the model says its types")


def _dtype(read: Read, value: Value) -> None:
    if value not in ("auto", "half", "float16", "bfloat16"):
        read.aside.append(f"--dtype {value}: pdsim computes in two bytes or less")


def _sizes(value: Value) -> list[int]:
    words = value if isinstance(value, list) else _text(value).replace(",", " ").split()
    return [whole(word) for word in words]


def _ep(read: Read, value: Value) -> None:
    read.server["ep"] = _count(value)


def _reserved(read: Read, value: Value) -> None:
    read.server["admission"] = {"reserved_tokens": _count(value)}


def _host_bytes(read: Read, value: Value) -> None:
    size = _number(value)
    if size:
        read.server["host_cache"] = f"{size:g} GB"


def _write_policy(read: Read, value: Value) -> None:
    read.server["host_cache_write"] = _text(value)


def _host_cache(read: Read, value: Value) -> None:
    if _is(found=True)(value):
        read.server.setdefault("host_cache", "auto")


def _storage_extra(read: Read, value: Value) -> None:
    found = json.loads(_text(value))
    if isinstance(found, dict) and "prefetch_threshold" in found:
        read.common["storage.prefetch_threshold"] = found["prefetch_threshold"]


def _backup(read: Read, value: Value) -> None:
    read.server["retracts_to_host_cache"] = value == "host_pool"


def _draft_model(read: Read, value: Value) -> None:
    """Reads the draft model's path. A scenario names the model of STANDALONE by its name in the catalog."""
    path = _text(value)
    read.server["speculative_draft_model"] = model_named(path)[0] if is_known(path) else path


def _state_strategy(read: Read, value: Value) -> None:
    if value in get_args(StateStrategy):
        read.server["mamba_radix_cache_strategy"] = value
    elif value != "auto":
        read.aside.append(f"the strategy {value} of mamba states: pdsim models {' and '.join(get_args(StateStrategy))}")


def _divides(field: str) -> Reader:
    """Reader of the size of a group of GPUs, which leaves out 1, the default."""

    def read_size(read: Read, value: Value) -> None:
        if (size := _count(value)) > 1:
            read.server[field] = size

    return read_size


def _transport(read: Read, value: Value) -> None:
    backend = _text(value)
    name = {"mooncake_tcp": "mooncake-tcp", "ascend": "ascend-sdma"}.get(backend, f"{backend}-rdma")
    if name in names("transports"):
        read.common["network.transport"] = name
    else:
        read.aside.append(f"--disaggregation-transfer-backend {value}: the catalog has no such transport")


SGLANG: dict[str, Reader] = {
    **dict.fromkeys(("tp-size", "tensor-parallel-size", "tp"), _server("tp")),
    **dict.fromkeys(("dp-size", "data-parallel-size", "dp"), _server("dp")),
    **dict.fromkeys(("pp-size", "pipeline-parallel-size", "pp"), _server("pp")),
    **dict.fromkeys(("ep-size", "expert-parallel-size", "ep"), _ep),
    "enable-dp-attention": _server("dp_attention", _is(found=True)),
    "load-balance-method": _server("load_balance_method", _text),
    "enable-eplb": _server("eplb", _is(found=True)),
    "ep-num-redundant-experts": _server("redundant_experts"),
    "page-size": _common("page_size"),
    "context-length": _common("context_tokens"),
    "kv-cache-dtype": _kv_dtype,
    "quantization": _quantization,
    "mamba-ssm-dtype": _common("state_dtype", _one_of(_STATE_DTYPES)),
    "mem-fraction-static": _server("mem_fraction", _number),
    "max-total-tokens": _server("pool_tokens"),
    "max-running-requests": _server("max_running_requests"),
    "radix-eviction-policy": _server("eviction", _text),
    "enable-hierarchical-cache": _host_cache,
    "hicache-size": _host_bytes,
    "hicache-write-policy": _write_policy,
    "hicache-storage-backend": _common("storage.shared", lambda value: value != "file"),
    "hicache-storage-prefetch-policy": _common("storage.prefetch", _text),
    "hicache-storage-backend-extra-config": _storage_extra,
    "dtype": _dtype,
    "stream-interval": _server("stream_interval"),
    "cuda-graph-bs": _common("cost.graph_sizes", _sizes),
    "cuda-graph-bs-decode": _common("cost.graph_sizes", _sizes),
    "chunked-prefill-size": _server("chunked_prefill_tokens"),
    "max-prefill-tokens": _server("max_prefill_tokens"),
    "prefill-max-requests": _server("prefill_max_requests"),
    "schedule-policy": _server(
        "policy", _one_of(_inverse({k: v for k, v in sglang.SCHEDULE_POLICIES.items() if k != "priority"}))
    ),
    "enable-priority-scheduling": _server("has_priorities", _is(found=True)),
    "disable-radix-cache": _server("radix_cache", _is(found=False)),
    "disable-overlap-schedule": _server("overlap", _is(found=False)),
    "enable-mixed-chunk": _server("mixed_chunk", _is(found=True)),
    "schedule-conservativeness": _server("schedule_conservativeness", _number),
    "priority-scheduling-preemption-threshold": _server("priority_preemption_threshold"),
    "disaggregation-mode": _server("role", _text),
    "disaggregation-transfer-backend": _transport,
    "enable-dynamic-chunking": _server("dynamic_chunks", _is(found=True)),
    "enable-prefill-cp": _nothing,
    "cp-strategy": _nothing,
    "attn-cp-size": _divides("cp"),
    **dict.fromkeys(("dcp-size", "decode-context-parallel-size"), _divides("dcp")),
    "optimistic-prefill-attempts": _server("optimistic_attempts"),
    "disaggregation-decode-enable-radix-cache": _server("radix_cache", _is(found=True)),
    "disaggregation-decode-polling-interval": _server("polling_interval"),
    "disaggregation-decode-extra-slots": _server("extra_slots"),
    "disaggregation-decode-retraction-backup": _backup,
    "disaggregation-decode-allocation-policy": _server("allocation", _text),
    "num-reserved-decode-tokens": _reserved,
    "speculative-algorithm": _server("speculative_algorithm", _text),
    "speculative-num-steps": _server("speculative_num_steps"),
    "speculative-eagle-topk": _server("speculative_eagle_topk"),
    "speculative-num-draft-tokens": _server("speculative_draft_tokens"),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-draft-model"), _draft_model),
    **dict.fromkeys(("mamba-radix-cache-strategy", "mamba-scheduler-strategy"), _state_strategy),
    "mamba-track-interval": _server("mamba_track_interval"),
}
"""Flags of SGLang's servers, 0.4 to 0.5.23."""


def _blocks(read: Read, value: Value) -> None:
    read.server["num_blocks"] = _count(value)


def _eplb(read: Read, value: Value) -> None:
    found = json.loads(_text(value))
    if isinstance(found, dict) and "num_redundant_experts" in found:
        read.server["redundant_experts"] = whole(found["num_redundant_experts"])


def _speculative(read: Read, value: Value) -> None:
    found = json.loads(_text(value))
    if isinstance(found, dict) and isinstance(found.get("num_speculative_tokens"), int):
        read.server["speculative_draft_tokens"] = found["num_speculative_tokens"] + 1


_CONNECTORS = {
    **dict.fromkeys(("NixlConnector", "NixlPullConnector", vllm.NIXL_PUSH), "nixl-rdma"),
    "MooncakeConnector": "mooncake-rdma",
    "MooncakeConnectorV1": "mooncake-rdma",
    "P2pNcclConnector": "p2p-nccl",
    "LMCacheConnectorV1": "lmcache",
    "MoRIIOConnector": "mori-rdma",
}
_KV_ROLES = _inverse(vllm.KV_ROLES)


def _transfer_config(read: Read, value: Value) -> None:
    found = json.loads(_text(value))
    for config in _configs(found):
        if config.get("kv_connector") == vllm.LMCACHE and config.get("kv_role") == "kv_both":
            read.server["lmcache"] = config.get("kv_connector_extra_config") or {}
        elif config.get("kv_connector") in _CONNECTORS:
            read.common.setdefault("network.transport", _moved_by(config))
            if config["kv_connector"] == vllm.NIXL_PUSH:
                read.common["network.nixl_push"] = True
        if config.get("kv_role") in _KV_ROLES:
            read.server.setdefault("role", _KV_ROLES[config["kv_role"]])
        extra = config.get("kv_connector_extra_config")
        if isinstance(extra, dict) and isinstance(extra.get("kv_lease_duration"), int):
            read.server["hold_timeout"] = f"{extra['kv_lease_duration']} s"
        if config.get("kv_connector") == vllm.OFFLOADING and isinstance(extra, dict) and extra.get("cpu_bytes_to_use"):
            read.server["offload_bytes"] = whole(extra["cpu_bytes_to_use"])
    read.server["has_connector"] = True


def _offload_gibibytes(read: Read, value: Value) -> None:
    read.server["offload_bytes"] = round(_number(value) * 2**30)


def _moved_by(config: dict[str, Any]) -> str:
    extra = config.get("kv_connector_extra_config")
    is_libfabric = isinstance(extra, dict) and extra.get("backends") == ["LIBFABRIC"]
    return "nixl-libfabric" if is_libfabric else _CONNECTORS[config["kv_connector"]]


def _configs(found: Any) -> list[dict[str, Any]]:
    """A connector, and the connectors inside it if it has several."""
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    extra = found.get("kv_connector_extra_config")
    inside = extra.get("connectors") if isinstance(extra, dict) else None
    return [found, *(one for one in inside or [] if isinstance(one, dict))]


VLLM: dict[str, Reader] = {
    **dict.fromkeys(("tensor-parallel-size", "tp"), _server("tp")),
    **dict.fromkeys(("data-parallel-size", "dp"), _server("dp")),
    **dict.fromkeys(("pipeline-parallel-size", "pp"), _server("pp")),
    **dict.fromkeys(("decode-context-parallel-size", "dcp"), _divides("dcp")),
    "enable-expert-parallel": _server("whole_experts", _is(found=True)),
    "enable-eplb": _server("eplb", _is(found=True)),
    "eplb-config": _eplb,
    "num-redundant-experts": _server("redundant_experts"),
    "block-size": _common("page_size"),
    "max-model-len": _common("context_tokens", lambda value: _shortened(_text(value))),
    "kv-cache-dtype": _kv_dtype,
    "quantization": _quantization,
    "mamba-ssm-cache-dtype": _common("state_dtype", _one_of(_STATE_DTYPES)),
    "dtype": _dtype,
    "stream-interval": _server("stream_interval"),
    "gpu-memory-utilization": _server("mem_fraction", _number),
    "num-gpu-blocks-override": _blocks,
    "max-num-seqs": _server("max_running_requests"),
    "enable-prefix-caching": _server("radix_cache", _is(found=True)),
    "no-enable-prefix-caching": _server("radix_cache", _is(found=False)),
    "max-num-batched-tokens": _server("rank_chunk_tokens", lambda value: _shortened(_text(value))),
    "no-enable-chunked-prefill": _server("rank_chunk_tokens", lambda _: 0),
    "enable-chunked-prefill": _nothing,
    "scheduling-policy": _server("has_priorities", lambda value: value == "priority"),
    "long-prefill-token-threshold": _server("long_prefill_tokens"),
    "long-prefill-token-threshold-adaptive": _server("long_prefill_adaptive", _is(found=True)),
    "prefill-schedule-interval": _server("prefill_schedule_interval"),
    "no-async-scheduling": _server("overlap", _is(found=False)),
    "async-scheduling": _nothing,
    "cudagraph-capture-sizes": _common("cost.graph_sizes", _sizes),
    "cuda-graph-sizes": _common("cost.graph_sizes", _sizes),
    "speculative-config": _speculative,
    "kv-transfer-config": _transfer_config,
    "kv-offloading-size": _offload_gibibytes,
    "disaggregation-mode": _server("role", _text),
    "is-prefill-worker": _server("role", lambda _: "prefill"),
    "is-decode-worker": _server("role", lambda _: "decode"),
}
"""Flags of vLLM's servers, 0.6 to 0.33, and of Dynamo's workers of vLLM."""

_FACTORS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
"""Factors of vLLM's letters after a number (arg_utils.human_readable_int)."""


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
"""Flags that change neither bytes nor times. They are not mentioned."""
TABLES = {"sglang": SGLANG, "vllm": VLLM, "dynamo.sglang": {**VLLM, **SGLANG}, "dynamo.vllm": VLLM}


def read_flags(program: str, flags: Mapping[str, Value]) -> Read:
    """Scenario fields from the flags of a program. Raises ValueError that names the flag, its value and the possible
    values.
    """
    read, table = Read(), TABLES[program]
    for name, value in flags.items():
        shown = f"--{name}" if value is True else f"--{name} {' '.join(value) if isinstance(value, list) else value}"
        if name in table:
            before = len(read.aside)
            try:
                table[name](read, value)
            except (ValueError, TypeError) as wrong:
                if "$" in shown:
                    read.unknown.add(name)
                    read.aside.append(f"{shown}: the file does not set it")
                    continue
                raise ValueError(f"{shown}: expected {wrong or 'another value'}") from None
            if len(read.aside) == before:
                read.understood.append(shown)
        elif name not in SILENT:
            read.aside.append(shown)
    return read
