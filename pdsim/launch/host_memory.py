"""Settings of the KV connectors by which vLLM keeps KV in host memory."""

from typing import Any

from pdsim.launch.commands import Place
from pdsim.scenario.sections.servers import ServerSettings, StorageSettings

OFFLOADING, LMCACHE, KVBM = "OffloadingConnector", "LMCacheConnectorV1", "DynamoConnector"
KVBM_GB = "DYN_KVBM_CPU_CACHE_GB"
"""Environment variable with the host memory of all ranks of a server in GB (ai-dynamo/dynamo,
lib/llm/src/block_manager/distributed/leader.rs of ae2223b: compute_num_blocks).
"""
STORES = {False: "fs://localhost:0/var/tmp/lmcache", True: "mooncakestore://localhost:50051/"}
"""Value of LMCache's remote_url, by storage.shared."""
_KVBM_MODULE = {"kv_connector_module_path": "kvbm.vllm_integration.connector"}
_FIRST_KVBM_PORT = 56001


def connector(servers: ServerSettings, host_bytes: int, storage: StorageSettings | None) -> dict[str, Any]:
    """Settings of vLLM's KV connector (--kv-transfer-config) that keeps KV in host memory. servers: settings of the
    role's servers. host_bytes: bytes of host memory for each GPU. storage: settings of the storage behind host memory;
    None: there is no such storage.
    """
    if servers.host_cache_connector == "kvbm":  # reads its size from the environment
        return {"kv_connector": KVBM, "kv_role": "kv_both", **_KVBM_MODULE}
    if servers.host_cache_connector == "lmcache":
        name, extra = LMCACHE, _of_lmcache(servers, host_bytes, storage)
    else:
        name, extra = OFFLOADING, {"cpu_bytes_to_use": host_bytes * (servers.tp // servers.dp)}  # of all ranks
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _of_lmcache(servers: ServerSettings, host_bytes: int, storage: StorageSettings | None) -> dict[str, Any]:
    """LMCache's settings. The setting max_local_cpu_size is GiB of host memory for one rank (0.5.6,
    v1/storage_backend/local_cpu_backend.py:403). host_bytes: bytes of host memory for each GPU. storage: None: there is
    no storage behind host memory.
    """
    found: dict[str, Any] = {
        "lmcache.max_local_cpu_size": host_bytes / 2**30,
        "lmcache.chunk_size": servers.host_cache_chunk_tokens,
    }
    if servers.host_cache_layerwise:
        found["lmcache.use_layerwise"] = True
    if storage is not None:
        found |= {"lmcache.remote_url": STORES[storage.shared], "lmcache.enable_async_loading": True}
    return found


def beside_transfers(servers: ServerSettings, role: str, connectors: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings of one connector that combines several connectors: vLLM's MultiConnector or, with KVBM, PdConnector,
    whose first connector must be KVBM's (kvbm 1.6.1, vllm_integration/connector/pd_connector.py:91).

    role: the server's kv_role. connectors: settings of the connector to the other role, then of the connector to host
    memory.
    """
    if _has_kvbm(servers):
        found = {"kv_connector": "PdConnector", "kv_role": role, **_KVBM_MODULE}
        return {**found, "kv_connector_extra_config": {"connectors": connectors[::-1]}}
    found = {"kv_connector": "MultiConnector", "kv_role": role}
    return {**found, "kv_connector_extra_config": {"connectors": connectors}}


def kvbm_variables(servers: ServerSettings, place: Place | None = None) -> dict[str, object]:
    """Environment variables of a server with KVBM: size of its host memory, and at a place also its ports and, if the
    server spans several hosts, the address of the first host. Empty: the server has no KVBM. place: where the server
    runs; None: a pod of its own, in which KVBM's default ports are free.
    """
    if not _has_kvbm(servers):
        return {}
    assert servers.host_cache_bytes is not None
    found: dict[str, object] = {KVBM_GB: f"{servers.host_cache_bytes * servers.tp / 1e9:.12g}"}
    if place is not None:
        port = _FIRST_KVBM_PORT + 2 * place.number
        found |= {"DYN_KVBM_LEADER_ZMQ_PUB_PORT": port, "DYN_KVBM_LEADER_ZMQ_ACK_PORT": port + 1}
        if len(place.hosts) > 1:
            found["DYN_KVBM_LEADER_ZMQ_HOST"] = place.host
    return found


def _has_kvbm(servers: ServerSettings) -> bool:
    return servers.host_cache_bytes is not None and servers.host_cache_connector == "kvbm"
