"""Settings that were fitted to measurements, in a file of their own with where they come from.

name: qwen3-32b-b200-tp2
cost: {use: affine, ..., measured: {model: ..., ...}}   or {prefill: {...}, decode: {...}, host: {...}, measured: {...}}
network:                          optional
  transports: {mooncake-tcp: {bandwidth: ..., transfer_latency: ..., descriptor_latency: ...,
    handover: ...}}
  staging: {gather_host: ..., ...}
  message_latency: ...
front_end: {service: ..., latency_in: ..., latency_out: ...}                  optional
provenance: {fitted_on: ..., command: ..., date: ...}
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from pdsim.scenario.component import base_folder
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, read_yaml

_BESIDE = ("measured", "host")
"""Sections of a profile's cost that a scenario may change."""


def cost_by_role(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces {profile: FILE} by what the file says. Only changes of `measured` and `host` may stand beside it."""
    if not (isinstance(value, dict) and "profile" in value):
        return value
    beside = {key: changes for key, changes in value.items() if key != "profile"}
    if any(section not in _BESIDE or not isinstance(changes, dict) for section, changes in beside.items()):
        known, found = " and ".join(_BESIDE), ", ".join(beside)
        raise ValueError(f"profile stands alone, or beside {known}, found {found} beside it")
    cost = read_profile(base_folder(info) / str(value["profile"]))["cost"]
    changed = {section: {**cost.get(section, {}), **changes} for section, changes in beside.items()}
    return {"measured": {}, **cost, **changed}  # without `measured` it does not say what it was measured on


def network_of_profile(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces `profile: FILE` by what was fitted for the transport; what stands beside it goes before it."""
    if not (isinstance(value, dict) and "profile" in value):
        return value
    path = base_folder(info) / str(value["profile"])
    given = {key: setting for key, setting in value.items() if key != "profile"}
    fitted = dict(read_profile(path).get("network") or {})
    transports = fitted.pop("transports", {})
    staging = fitted.pop("staging", {})
    name = given.get("transport") or (next(iter(transports)) if len(transports) == 1 else None)
    if name not in transports:
        hint = did_you_mean(str(name), transports) if name else ""
        what = f"has no transport {name!r}{hint}" if name else "has more than one transport, or none: name one"
        raise ValueError(f"profile {path} {what}; there are {', '.join(transports) or 'none'}")
    found = {"transport": name, **fitted, **transports[name], **given}
    if isinstance(given.get("staging"), dict):  # whether there is staging is the scenario's choice
        found["staging"] = {**staging, **given["staging"]}
    return found


def front_end_of_profile(value: Any, info: ValidationInfo[Any]) -> Any:
    """Replaces `profile: FILE` by what was measured; what stands beside it goes before it."""
    if not (isinstance(value, dict) and "profile" in value):
        return value
    path = base_folder(info) / str(value["profile"])
    given = {key: setting for key, setting in value.items() if key != "profile"}
    measured = read_profile(path).get("front_end")
    if not measured:
        raise ValueError(f"profile {path} has no field 'front_end'")
    return {**measured, **given}


def read_profile(path: Path) -> dict[str, Any]:
    profile: dict[str, Any] = read_yaml(path)
    for field in ("cost", "provenance"):
        if not isinstance(profile, dict) or field not in profile:
            raise ConfigError(f"profile {path} has no field {field!r}")
    return profile
