"""Reads environment variables that change the behaviour of servers, as fields of a scenario."""

from collections.abc import Mapping
from typing import Any

from pdsim.inputs import finite, whole
from pdsim.launch.sglang import LINKS, TIMEOUTS

_HEARTBEATS = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"
_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"


def of_environment(variables: Mapping[str, str], network: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by path. Values that are not numbers are left out."""
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
    if variables.get(_HEARTBEATS, "").isdecimal():
        found["health.heartbeat_failures"] = whole(variables[_HEARTBEATS])
    if variables.get("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX") == "0":
        found["prefill.transfer"] = {"use": "every_chunk", "cached_prefix_first": False}
    if variables.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "").isdecimal():
        most = whole(variables["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"])
        found["decode.admission.max_estimated_output_tokens"] = most
    return found


def _take(found: dict[str, Any], variables: Mapping[str, str], name: str, path: str, unit: str) -> None:
    try:
        found[path] = f"{finite(variables.get(name)):g} {unit}"
    except ValueError:
        return
