"""Translates those environment variables that change how servers behave into fields of a scenario."""

from collections.abc import Callable, Mapping
from typing import Any

from pdsim.inputs import finite, whole
from pdsim.launch.host_memory import KVBM_GB
from pdsim.launch.sglang import LINKS, TIMEOUTS
from pdsim.scenario.yaml_file import ConfigError

_HEARTBEATS = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"
_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"

_LMCACHE = "LMCACHE_"
_LMCACHE_GIB = 5
"""Host memory of each rank in GiB if no setting gives it (LMCache 0.5.6, v1/config.py:96)."""
_WITHOUT_NOTE = (KVBM_GB, "DYN_KVBM_LEADER_", "DYN_KVBM_METRICS", "DYN_KVBM_ENABLE_RECORD")
"""Variables of KVBM, by the beginnings of their names, for which no note says that pdsim does not model them: pdsim
reads KVBM_GB, and all other variables with these beginnings do not change times."""


def of_environment(variables: Mapping[str, str], network: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the variables set, by path. Raises ConfigError for a value that should be a number and is not.
    network: settings of the network that options have set; variables choose only among the links of the same transfer
    engine (Mooncake, if options set no transport).
    """
    found: dict[str, Any] = {}
    backend, _, _ = str(network.get("transport", "mooncake")).partition("-")
    for transport, needed in LINKS.items():
        has_all = all(variables.get(name, "").lower() == value.lower() for name, value in needed.items())
        if transport.startswith(f"{backend}-") and has_all:
            found["network.transport"] = transport
    if variables.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() in ("1", "true"):
        found["network.staging"] = {}
        _take(found, variables, "SGLANG_DISAGG_STAGING_POOL_SIZE_MB", "network.staging.ring", "MiB")
        _take(found, variables, "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB", "network.staging.prefill_buffer", "MiB")
    for name, variable in TIMEOUTS.items():
        _take(found, variables, variable, f"health.{name}", "s")
    _take(found, variables, _RELEASE, "health.release_timeout", "s")
    if (failures := _number(variables, _HEARTBEATS, whole)) is not None:
        found["health.heartbeat_failures"] = failures
    if variables.get("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX") == "0":
        found["prefill.transfer"] = {"use": "every_chunk", "cached_prefix_first": False}
    if (most := _number(variables, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", whole)) is not None:
        found["decode.admission.max_estimated_output_tokens"] = most
    return found


def of_hold(variables: Mapping[str, str]) -> dict[str, Any]:
    """The field prefill.hold_timeout: how long vLLM's prefill holds KV that decode has not read (0.33.0, envs.py:268;
    in older releases, NIXL's connector). Empty: no variable sets it, so pdsim assumes no limit.
    """
    found: dict[str, Any] = {}
    for connector in ("NIXL", "MOONCAKE"):
        _take(found, variables, f"VLLM_{connector}_ABORT_REQUEST_TIMEOUT", "hold_timeout", "s")
    return found


def of_host_memory(
    given: dict[str, Any], per_gpu: float, variables: Mapping[str, str], aside: list[str], common: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of vLLM's servers that keep KV in host memory. Empty: the servers keep none. Removes the
    settings of host memory from `given`, adds notes on settings that pdsim does not model to `aside`, and adds fields
    of the storage behind host memory to `common`.

    given: settings read from options. per_gpu: factor from the host memory of an engine to that of one GPU. variables:
    environment variables of the servers.
    """
    found: dict[str, Any] = {}
    if offload_bytes := given.pop("offload_bytes", 0):
        found = {"host_cache": f"{offload_bytes * per_gpu / 1e9:.12g} GB"}
    if (lmcache := given.pop("lmcache", None)) is not None:
        found = _of_lmcache(lmcache, variables, aside, common)
    if given.pop("kvbm", False):
        found = _of_kvbm(per_gpu, variables, aside)
    return found


def _of_kvbm(per_gpu: float, variables: Mapping[str, str], aside: list[str]) -> dict[str, Any]:
    others = [one for one in variables if one.startswith("DYN_KVBM_") and not one.startswith(_WITHOUT_NOTE)]
    aside += [f"{name}: pdsim does not model this setting of KVBM" for name in sorted(others)]
    if not (size := _number(variables, KVBM_GB, finite)):
        aside.append(f"KVBM: without {KVBM_GB} the scenario has no host memory")
        return {}
    return {"host_cache": f"{size * per_gpu:.12g} GB", "host_cache_connector": "kvbm"}


def _of_lmcache(
    extra: Mapping[str, Any], variables: Mapping[str, str], aside: list[str], common: dict[str, Any]
) -> dict[str, Any]:
    """Returns the fields of servers that keep KV in CPU memory with LMCache. Empty: LMCache keeps no KV there. Adds
    notes on settings that pdsim does not model to `aside`, and fields of storage to `common`.

    extra: LMCache's settings in the configuration of its connector, which take precedence over variables LMCACHE_...
    (LMCache 0.5.6, integration/vllm/vllm_v1_adapter.py:494). variables: environment variables of the servers.
    """
    given = {
        name.removeprefix(_LMCACHE).lower(): value for name, value in variables.items() if name.startswith(_LMCACHE)
    }
    given |= {name.removeprefix("lmcache."): str(value) for name, value in extra.items() if name.startswith("lmcache.")}
    if given.pop("local_cpu", "true").lower() in ("false", "0"):
        return {}
    found: dict[str, Any] = {"host_cache": f"{_LMCACHE_GIB} GiB", "host_cache_connector": "lmcache"}
    _take(found, given, "max_local_cpu_size", "host_cache", "GiB")
    if (chunk_tokens := _number(given, "chunk_size", whole)) is not None:
        found["host_cache_chunk_tokens"] = chunk_tokens
    if given.pop("use_layerwise", "false").lower() in ("true", "1"):
        found["host_cache_layerwise"] = True
    if (url := given.get("remote_url")) and given.get("enable_async_loading", "").lower() in ("true", "1"):
        common["storage.shared"] = not url.startswith("fs:")
        del given["remote_url"], given["enable_async_loading"]
    others = given.keys() - {"max_local_cpu_size", "chunk_size"}
    aside += [f"LMCache's {name}: pdsim does not model this setting" for name in sorted(others)]
    return found


def _take(found: dict[str, Any], variables: Mapping[str, str], name: str, path: str, unit: str) -> None:
    if (value := _number(variables, name, finite)) is not None:
        found[path] = f"{value:.12g} {unit}"


def _number(variables: Mapping[str, str], name: str, read: Callable[[str], Any]) -> Any:
    """The number in the variable `name`. read: makes the number from text. None: the variable is not set or empty, or
    its value names another variable. Raises ConfigError if the value is no number.
    """
    value = variables.get(name, "")
    if not value or "$" in value:
        return None
    try:
        return read(value)
    except ValueError:
        raise ConfigError(f"{name}: {value}: expected a {'whole ' if read is whole else ''}number") from None
