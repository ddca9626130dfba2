"""Reads the encode instances of a deployment (EPD), the inverse of pdsim/launch/encoding.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.formats.deployments.readers import Read, Reader, Value, is_flag, nothing, object_of, of_server, text_of
from pdsim.inputs import whole

_CACHE_MB = 4096
"""SGLang's default of SGLANG_VLM_CACHE_SIZE_MB on encode instances (0.5.23, disaggregation/encoder/server.py:643)."""


def _backend(read: Read, value: Value) -> None:
    backend = text_of(value)
    if backend == "mooncake":
        read.server["encode_transport"] = "mooncake-rdma"
    elif backend == "zmq_to_tokenizer":
        read.aside.append(f"--encoder-transfer-backend {backend}: simulated as zmq_to_scheduler")


def _urls(read: Read, value: Value) -> None:
    read.server["encode_urls"] = len(value) if isinstance(value, list) else 1


def _encoder_only(read: Read, value: Value) -> None:
    if is_flag(found=True)(value):
        read.server["role"] = "encode"


OPTIONS: dict[str, Reader] = {
    "encoder-only": _encoder_only,
    "language-only": nothing,
    "encoder-urls": _urls,
    "encoder-transfer-backend": _backend,
    **dict.fromkeys(("encoder-bootstrap-port", "encoder-register-urls"), nothing),
    "enable-prefix-mm-cache": of_server("encode_cache", is_flag(found=True)),
}
"""Readers of SGLang's options for encode instances, and for servers that get embeddings from encode instances."""


def _ec_transfer(read: Read, value: Value) -> None:
    """Reads vLLM's --ec-transfer-config: stores transport and cache of embeddings in the server's fields, and the role
    encode for an encode instance (ec_producer).
    """
    config = object_of(value)
    extra = config.get("ec_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ValueError("ec_connector_extra_config as a JSON object")
    read.server["encode_transport"] = "nixl-rdma"
    if config.get("ec_connector") != "ECCPUConnector" or str(extra.get("ec_enable_nixl")).lower() not in ("true", "1"):
        read.aside.append("--ec-transfer-config: simulated as ECCPUConnector with ec_enable_nixl")
    if "ec_cpu_bytes" in extra:
        read.server["encode_cache"] = f"{whole(str(extra['ec_cpu_bytes']))} B"
    if config.get("ec_role") == "ec_producer":
        read.server["role"] = "encode"


VLLM_OPTIONS: dict[str, Reader] = {"ec-transfer-config": _ec_transfer}
"""Readers of options of vLLM's encode instances, and of servers that read embeddings."""


def encode_section(
    given: Mapping[str, Any], num_instances: int, variables: Mapping[str, str], assumed: list[str]
) -> dict[str, Any]:
    """The section `encode`, without its GPU. Empty: the deployment has no encode instances.

    given: fields that the options of all servers set. num_instances: encode instances that the files start. variables:
    environment variables of an encode instance. assumed: notes are added here.
    """
    if not num_instances:
        num_instances = given.get("encode_urls", 0)
        if num_instances:
            assumed.append(
                f"encode.instances: {num_instances}: the number of --encoder-urls; the files start no such server"
            )
    if not num_instances:
        return {}
    found: dict[str, Any] = {"instances": num_instances}
    batch, size = (variables.get(f"SGLANG_{name}", "") for name in ("ENCODER_MAX_BATCH_SIZE", "VLM_CACHE_SIZE_MB"))
    if batch.isdecimal():
        found["max_batch_size"] = int(batch)
    if isinstance(given.get("encode_cache"), str):
        found["cache"] = given["encode_cache"]
    elif given.get("encode_cache"):
        found["cache"] = f"{int(size) if size.isdecimal() else _CACHE_MB} MiB"
    if "encode_transport" in given:
        found["transport"] = given["encode_transport"]
    return found


def taken(servers: Sequence[Read]) -> dict[str, Any]:
    """Removes the fields that options of encode instances set (encode_urls, encode_transport, encode_cache) from all
    servers. Returns these fields; if several servers set the same field, the last one counts.
    """
    found: dict[str, Any] = {}
    for read in servers:
        for name in ("encode_urls", "encode_transport", "encode_cache"):
            if name in read.server:
                found[name] = read.server.pop(name)
    return found
