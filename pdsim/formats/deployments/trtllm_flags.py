"""Readers of the options of trtllm-serve and of Dynamo's workers of TensorRT-LLM, also of options in their YAML
files.
"""

from pdsim.formats.deployments.readers import (
    STATE_DTYPES,
    Read,
    Reader,
    Value,
    count_of,
    is_flag,
    note_dtype,
    nothing,
    of_common,
    of_server,
    one_of,
    positive_of,
    share_of,
    sizes_of,
    text_of,
)


def _transceiver(read: Read, value: Value) -> None:
    """Stores cache_transceiver_config.backend as network.transport: MOONCAKE as mooncake-rdma, and every other backend
    as nixl-rdma, with a note unless the backend is NIXL. UCX, and MPI over UCX, post transfers as NIXL's UCX backend
    does.
    """
    backend = text_of(value).upper()
    read.common["network.transport"] = "mooncake-rdma" if backend == "MOONCAKE" else "nixl-rdma"
    if backend not in ("NIXL", "MOONCAKE"):
        read.assumed.append(f"network.transport: nixl-rdma: it stands for TensorRT-LLM's {backend}")


def _draft_tokens(read: Read, value: Value) -> None:
    read.server["speculative_draft_tokens"] = count_of(value) + 1


def _missing_options(read: Read, value: Value) -> None:
    """Adds a note to `read` that an options file was not found. value: the name of the file. Called only for missing
    files, because the options of a file that was found are read instead of the option that names the file.
    """
    read.aside.append(f"options of {text_of(value)}: there is no such file beside the command; defaults count")


OPTION_FILES = ("config", "extra-llm-api-options", "extra-engine-args")
"""Options that name a YAML file with further options."""

_ROLES_OF_TRTLLM = {"CONTEXT": "prefill", "GENERATION": "decode", "prefill": "prefill", "decode": "decode"}
_DTYPES_OF_TRTLLM = {"fp8": "fp8", "nvfp4": "fp4", "bfloat16": "bf16", "auto": None}


def _trtllm_kv_dtype(read: Read, value: Value) -> None:
    if (dtype := one_of(_DTYPES_OF_TRTLLM)(value)) is not None:
        read.common["kv_dtype"] = dtype


TRTLLM: dict[str, Reader] = {
    **dict.fromkeys(("tensor-parallel-size", "tp-size"), of_server("tp", positive_of)),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size"), of_server("pp", positive_of)),
    **dict.fromkeys(
        ("moe-expert-parallel-size", "ep-size"), of_server("whole_experts", lambda value: count_of(value) > 1)
    ),
    "enable-attention-dp": of_server("attention_dp", is_flag(found=True)),
    "max-batch-size": of_server("max_running_requests", positive_of),
    "max-num-tokens": of_server("rank_chunk_tokens", positive_of),
    "max-seq-len": of_common("context_tokens", positive_of),
    **dict.fromkeys(
        (
            "free-gpu-memory-fraction",
            "kv-cache-free-gpu-memory-fraction",
            "kv-cache-config.free-gpu-memory-fraction",
        ),
        of_server("free_fraction", share_of),
    ),
    "kv-cache-config.enable-block-reuse": of_server("radix_cache", is_flag(found=True)),
    "kv-cache-config.tokens-per-block": of_common("page_size", positive_of),
    "kv-cache-config.max-tokens": of_server("pool_tokens"),
    "kv-cache-config.host-cache-size": of_server("rank_host_bytes"),
    "kv-cache-config.dtype": _trtllm_kv_dtype,
    "kv-cache-config.mamba-ssm-cache-dtype": of_common("state_dtype", one_of(STATE_DTYPES)),
    "cache-transceiver-config.backend": _transceiver,
    **dict.fromkeys(("speculative-config.num-nextn-predict-layers", "speculative-config.max-draft-len"), _draft_tokens),
    "cuda-graph-config.batch-sizes": of_common("cost.graph_sizes", sizes_of),
    "disable-overlap-scheduler": of_server("overlap", is_flag(found=False)),
    "enable-chunked-prefill": of_server("is_chunked", is_flag(found=True)),
    "stream-interval": of_server("stream_interval"),
    "server-role": of_server("role", one_of(_ROLES_OF_TRTLLM)),
    "disaggregation-mode": of_server("role", one_of({**_ROLES_OF_TRTLLM, "prefill_and_decode": ""})),
    "dtype": note_dtype,
    **dict.fromkeys(OPTION_FILES, _missing_options),
    **dict.fromkeys(
        ("backend", "print-iter-log", "cuda-graph-config.enable-padding", "gpus-per-node", "num-postprocess-workers"),
        nothing,
    ),
}
"""Readers of the options of trtllm-serve, also of those in its YAML files. An option inside a section has the name
SECTION.OPTION.
"""
