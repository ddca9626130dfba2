"""A profile: a file of settings that were fitted to measurements. The file also says where they come from.

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

import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo

from pdsim.scenario.sections.fields import base_folder
from pdsim.scenario.yaml_file import ConfigError, did_you_mean, read_yaml
from pdsim.workload.trace_file import InputNote

_BESIDE = ("host", "cold_start", "cold_kernels")
"""Sections of a profile's cost that a scenario may change: a scenario may have them beside `profile`."""
_BESIDE_TEXT = f"{', '.join(_BESIDE[:-1])} and {_BESIDE[-1]}"
_NO_MODEL = (*_BESIDE, "measured")
"""Sections of a profile's cost that are not settings of its cost model."""
_SETUP_OF = {"prefill": ("pp", "cp"), "decode": ("dcp", "draft_tokens")}
"""By role, the fields of MeasuredSettings that describe servers of this role only."""
_OF_ROLE = {
    "prefill": ("prefill_interval",),
    "decode": (
        "decode_interval",
        "graph_sizes",
        "graph_empty_row_kv",
        "graph_empty_rows_free",
        "eager_layer",
        "attention_sm_bandwidth",
        "attention_merge",
        "cold_start",
    ),
}
"""Fields of a profile's cost that belong to one role, by role. The role's cost model itself is not listed."""
_HOST_OF_DECODE = ("decode_step", "decode_request", "decode_prefill")


def origin(command: str) -> dict[str, str]:
    """Fields of a profile's provenance: the command that made the profile, the date, and the version of pdsim."""
    return {"command": command, "date": datetime.now(UTC).date().isoformat(), "pdsim": version("pdsim")}


def _named(value: Any, info: ValidationInfo[Any]) -> tuple[Path, dict[str, Any]] | None:
    """The path of the profile that a section names, and the section's other fields. None: the section names no profile.
    value: the section as the file has it. info: pydantic's; has the folder at which relative paths start.
    """
    if not (isinstance(value, dict) and "profile" in value):
        return None
    beside = {key: setting for key, setting in value.items() if key != "profile"}
    return base_folder(info) / str(value["profile"]), beside


def with_profile(data: Any, base: Path) -> Any:
    """Returns a scenario's plain data, in which `cost`, `network` and `front_end` name the file of the field `profile`,
    as far as the profile has such settings. Validators of these sections then read the file. Data without `profile` is
    returned unchanged. A warning names what the profile has and lacks. base: folder at which relative paths start.

    One file serves both roles; {prefill: FILE, decode: FILE} gives each role a file of its own. Transfers and front end
    come from the first file that has them. Raises ValueError if `profile` has other keys, or if the scenario has step
    times of its own.
    """
    given = data.get("profile") if isinstance(data, dict) else None
    if given is None:
        return data
    files = {role: str(file) for role, file in given.items()} if isinstance(given, dict) else {"": str(given)}
    if any(role not in ("", *_OF_ROLE) for role in files):
        raise ValueError(f"profile: expected FILE, or {{prefill: FILE, decode: FILE}}, found {given!r}")
    profiles = {file: read_profile(base / file) for file in files.values()}
    roles = " and ".join(role for role in files if role) or "both roles"
    sections = [*([] if data.get("aggregated") else [_transfers(profiles, data)]), _front_end(profiles, data)]
    applied = [f"step times of {roles}", *(text for _, text, is_there in sections if is_there)]
    lacks = [text for _, text, is_there in sections if not is_there]
    note = f"profile {' and '.join(profiles)}: applied {', '.join(applied)}"
    warnings.warn(f"{note}; not applied: {', '.join(lacks)}" if lacks else note, InputNote, stacklevel=2)
    found = {**data, "cost": _cost_beside(data.get("cost") or {}, files)}
    for section, _, _ in sections:
        found |= section
    return found


_Section = tuple[dict[str, Any], str, bool]
"""Result of looking for one kind of settings in profiles: the section to write into the scenario, a name of the
settings for messages, and True if a profile has them.
"""


def _cost_beside(cost: Any, files: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(cost, dict) or any(section not in _BESIDE for section in cost):
        raise ValueError(f"profile: cost is given too; leave one out, or keep only {_BESIDE_TEXT} in cost")
    if "" in files:
        return {"profile": files[""], **cost}
    return {**{role: {"profile": file} for role, file in files.items()}, **cost}


def _transfers(profiles: Mapping[str, Any], data: Mapping[str, Any]) -> _Section:
    network = data.get("network") or {}
    for file, profile in profiles.items():
        transports = (profile.get("network") or {}).get("transports", {})
        transport = network.get("transport") or (next(iter(transports)) if len(transports) == 1 else None)
        if transport in transports:
            return {"network": {"profile": file, **network, "transport": transport}}, f"transfers of {transport}", True
    return {}, f"transfers of {network.get('transport', 'the default transport')}, which the profile lacks", False


def _front_end(profiles: Mapping[str, Any], data: Mapping[str, Any]) -> _Section:
    own = data.get("front_end") or {}
    for file, profile in profiles.items():
        if profile.get("front_end"):
            beside = own if isinstance(own, dict) else {"kind": own}
            return {"front_end": {"profile": file, **beside}}, "front end", True
    return ({} if own else {"front_end": None}), "front end, which the profile lacks", False


def cost_by_role(value: Any, info: ValidationInfo[Any]) -> Any:
    """Returns the scenario's cost, in which {profile: FILE}, for both roles or for one role, is replaced by the cost in
    the file. The sections host, cold_start and cold_kernels may stand beside `profile`, and change the file's cost.
    Raises ValueError if other sections stand there. value: the scenario's cost. info: pydantic's context with the
    scenario's folder.
    """
    of_role = {role: its for role in _OF_ROLE if isinstance(value, dict) and (its := _named(value.get(role), info))}
    named = _named(value, info)
    if of_role:
        return _joined(value, dict.fromkeys(_OF_ROLE, named) | of_role if named else of_role)
    if named is None:
        return value
    path, beside = named
    if any(section not in _BESIDE for section in beside):
        raise ValueError(f"profile cannot be combined with {', '.join(beside)}, only with {_BESIDE_TEXT}")
    cost = read_profile(path)["cost"]
    changed = {section: _changed(section, cost.get(section), changes) for section, changes in beside.items()}
    return {"measured": {}, **cost, **changed}  # without `measured` it does not say what it was measured on


def _changed(section: str, fitted: Any, changes: Any) -> dict[str, Any] | None:
    """A section of a profile's cost with the changes that a scenario makes to it. fitted: the section in the profile;
    None: the profile lacks it. Returns None if the scenario removes the section by `null`; only cold_kernels can be
    removed.
    """
    if changes is None and section == "cold_kernels":
        return None
    if not isinstance(changes, dict):
        raise ValueError(f"{section}: expected a section, {{name: value}}, found {changes!r}")
    return {**(fitted or {}), **changes}


def _joined(value: dict[str, Any], of_role: dict[str, tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the scenario's cost, in which each role in of_role has the times from its profile. A role without a
    profile keeps the times in `value`. value: the scenario's cost. of_role: by role, the path of its profile, and the
    fields that the scenario's cost gives next to this path.
    """
    given = {key: setting for key, setting in value.items() if key != "profile"}
    costs = {}
    for role, (path, others) in of_role.items():
        if role in given and others:
            raise ValueError(f"{role}: profile cannot be combined with {', '.join(others)}")
        costs[role] = read_profile(path)["cost"]
    found: dict[str, Any] = {}
    for role, cost in costs.items():
        model = cost.get(role) or {key: setting for key, setting in cost.items() if key not in _NO_MODEL}
        own = {field: cost[field] for field in _OF_ROLE[role] if field in cost and field not in given}
        found |= {role: model, **own}
    hosts = {role: cost.get("host") or {} for role, cost in costs.items()}
    host = {
        name: time
        for role, times in hosts.items()
        for name, time in times.items()
        if (name in _HOST_OF_DECODE) == (role == "decode")
    }
    kernels = {role: its[role] for role, cost in costs.items() if role in (its := cost.get("cold_kernels") or {})}
    beside = {"host": host, "measured": _measured(costs), **({"cold_kernels": kernels} if kernels else {})}
    changed = {section: _changed(section, beside[section], given[section]) for section in beside.keys() & given.keys()}
    return {**given, **found, **beside, **changed}


def _measured(costs: dict[str, Any]) -> dict[str, Any]:
    """Joins the setups on which two profiles were measured. costs: cost of each profile, by role. If texts of the
    setups differ, the result has both, such as "H100 and H200". No scenario can run on such a joined setup, so commands
    warn that the scenario differs from it. If only one role has a profile, the result names this role.
    """
    known = {role: cost.get("measured") or {} for role, cost in costs.items()}
    found: dict[str, Any] = {} if len(known) == len(_OF_ROLE) else {"role": next(iter(known))}
    for name in ("model", "weight_dtype", "kv_dtype", "device", "scaled_from"):
        texts = [str(one[name]) for one in known.values() if one.get(name) is not None]
        if texts and (name == "scaled_from" or len(texts) == len(known)):
            found[name] = " and ".join(dict.fromkeys(texts))
    for name, unknown in (("tp", (1, 1)), ("dp", (1, 1)), ("ep", None), ("moe_a2a_backend", None)):
        pairs = {role: one.get(name, unknown) for role, one in known.items()}
        sizes = [pair[list(_OF_ROLE).index(role)] for role, pair in pairs.items() if pair is not None]
        if len(sizes) == len(known):
            found[name] = (sizes[0], sizes[-1])
    for role, one in known.items():
        found |= {name: value for name, value in one.items() if name in _SETUP_OF[role] or name.startswith(f"{role}_")}
    return found


def network_of_profile(value: Any, info: ValidationInfo[Any]) -> Any:
    """Validator of the scenario's section `network`: replaces `profile: FILE` by the settings that were fitted for the
    transport. Fields that the scenario gives next to `profile` take precedence. value: the section as given. info:
    pydantic's, with the folder of relative paths.
    """
    if (named := _named(value, info)) is None:
        return value
    path, given = named
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
    """Replaces `profile: FILE` by the measured times of the front end. Fields beside `profile` take precedence.

    waits_for_prefill is false by default, because profiles are measured in real mode, which has no gateway. value: the
    section as the file has it. info: pydantic's; has the folder at which relative paths start.
    """
    if (named := _named(value, info)) is None:
        return value
    path, given = named
    measured = read_profile(path).get("front_end")
    if not measured:
        raise ValueError(f"profile {path} has no field 'front_end'")
    return {"waits_for_prefill": False, **measured, **given}


def read_profile(path: Path) -> dict[str, Any]:
    profile: dict[str, Any] = read_yaml(path)
    for field in ("cost", "provenance"):
        if not isinstance(profile, dict) or field not in profile:
            raise ConfigError(f"profile {path} has no field {field!r}")
    return profile
