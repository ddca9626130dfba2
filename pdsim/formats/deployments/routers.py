"""Reads the options of gateways and frontends as routing policies."""

from collections.abc import Mapping
from typing import Any

from pdsim.formats.deployments.readers import Value
from pdsim.inputs import finite
from pdsim.launch.commands import THRESHOLDS
from pdsim.launch.dynamo import KV_SETTINGS, QUEUE_ORDERS, QUEUE_SETTINGS, ROUTER_MODES, WITHOUT_EVENTS
from pdsim.launch.gateway import MANUAL, POLICIES

_MODES = {theirs: ours for ours, theirs in ROUTER_MODES.items()}
_TTL = "router-session-affinity-ttl-secs"
_OF_DISKS = "router-disk-cache-hit-weight"
"""Option of Dynamo's frontend that has no effect in a simulation: no engine's events name blocks on disks (SGLang
0.5.23, mem_cache/unified_cache/unified_tree_core.py:2438; vLLM has no disks behind host memory in pdsim).
"""
_WITHOUT_EFFECT = "no server's KV events name blocks on disks, so this weight changes nothing"
_SILENT = {
    "host", "port", "http-host", "http-port", "pd-disaggregation", "vllm-pd-disaggregation", "prefill",
    "decode", "worker-urls", "kv-connector", "model-path", "service-discovery", "service-discovery-port",
    "service-discovery-namespace", "selector", "prefill-selector", "decode-selector", "intra-node-data-parallel-size",
    "log-level", "model-name",
}  # fmt: skip


def router_of(
    program: str, flags: Mapping[str, Value], variables: Mapping[str, str], *, is_pair: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns (the section `router` of the scenario, texts on options that pdsim does not understand or that change
    nothing). Empty section: the section's default (cache_aware), or a mode or policy that pdsim lacks, which the texts
    then name. program: frontend or gateway. flags: the program's options, with their values. variables: the program's
    environment variables. is_pair: True: prefill and decode are separate.
    """
    if program == "frontend":
        mode = flags.get("router-mode") or variables.get("DYN_ROUTER_MODE") or "round-robin"
        known = {
            *_SILENT,
            "router-mode",
            "router-kv-events",
            WITHOUT_EVENTS,
            _TTL,
            *({**KV_SETTINGS, **QUEUE_SETTINGS} if mode == "kv" else ()),
        }
        aside = [
            f"--{name}: {_WITHOUT_EFFECT}" if name == _OF_DISKS else f"--{name}" for name in flags if name not in known
        ]
        if mode not in _MODES:
            return {}, [*aside, f"--router-mode {mode}"]
        names = dict.fromkeys(("prefill", "decode"), _MODES[str(mode)])
        settings = _settings(flags, KV_SETTINGS)
        predicts = WITHOUT_EVENTS in flags or variables.get("DYN_ROUTER_USE_KV_EVENTS", "").lower() in ("false", "0")
        events = {} if predicts or mode != "kv" else {"kv_events": True}
        found = _of_roles(names, settings | events, is_pair=is_pair)
        queue = _queue(flags) if mode == "kv" else {}
        return _with_sessions(found, names, flags.get(_TTL), is_pair=is_pair) | queue, aside
    both = flags.get("policy", "cache_aware")
    names = {role: str(flags.get(f"{role}-policy", both)) for role in ("prefill", "decode")}
    known = {*_SILENT, "policy", "prefill-policy", "decode-policy", *THRESHOLDS}
    known |= MANUAL.keys() if "manual" in names.values() else set()
    aside = [f"--{name}" for name in flags if name not in known]
    known_names = (*POLICIES, "sticky_least_loaded")
    unknown = [name for name in names.values() if name not in known_names]
    if unknown:
        return {}, [*aside, f"policy {unknown[0]}: pdsim has {', '.join(known_names)}"]
    return _of_roles(names, _settings(flags, THRESHOLDS), is_pair=is_pair, manual=_manual(flags)), aside


def _queue(flags: Mapping[str, Value]) -> dict[str, Any]:
    """Returns the field `queue` of a scenario's router. Returns no field if --router-queue-threshold is not given,
    because Dynamo's router then holds no request back. flags: the router's options.
    """
    threshold, order = (flags.get(flag) for flag in QUEUE_SETTINGS)
    if not isinstance(threshold, str):
        return {}
    ordered = {"order": order} if order in QUEUE_ORDERS else {}
    return {"queue": {"use": "busy_threshold", "threshold": finite(threshold), **ordered}}


def _with_sessions(
    found: dict[str, Any], names: Mapping[str, str], ttl: Value | None, *, is_pair: bool
) -> dict[str, Any]:
    """Returns the routing policies by role, each inside session_affinity if the frontend keeps sessions. found: the
    policies that differ from pdsim's defaults, by role. names: names of the policies of all roles. ttl: time in s for
    which the frontend keeps a session without requests; None: it keeps no sessions. is_pair: True: prefill and decode
    are separate.
    """
    if not isinstance(ttl, str):
        return found
    roles = names if is_pair else ("prefill",)
    affinity = {"use": "session_affinity", "ttl": f"{finite(ttl):g} s"}
    return {role: {**affinity, "otherwise": found.get(role, names[role])} for role in roles}


def _settings(flags: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, float]:
    return {ours: finite(flags[flag]) for flag, ours in names.items() if isinstance(flags.get(flag), str)}


def _manual(flags: Mapping[str, Value]) -> dict[str, Any]:
    """The settings that the gateway's options give for its policy `manual`."""
    given = {ours: flags[flag] for flag, ours in MANUAL.items() if isinstance(flags.get(flag), str)}
    return {name: value if name == "assignment_mode" else f"{finite(value):g} s" for name, value in given.items()}


def _of_roles(
    names: Mapping[str, str], settings: Mapping[str, float], *, is_pair: bool, manual: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The policy of each role. Roles with the default (cache_aware without settings) are left out. cache_aware with a
    match threshold of 1 becomes least_loaded, because `pdsim launch` writes least_loaded with these options. names:
    policy by role. settings: settings of the policies cache_aware or dynamo_kv. manual: settings of the policy manual.
    is_pair: True: prefill and decode are separate; False: only the policy of prefill is returned.
    """
    found: dict[str, Any] = {}
    for role, name in names.items():
        policy: Any = name
        if name == "cache_aware" and settings.get("match_threshold") == 1:
            policy = "least_loaded"
        elif name == "manual" and manual:
            policy = {"use": name, **manual}
        elif name in ("cache_aware", "dynamo_kv") and settings:
            numbers = {
                ours: int(value) if ours == "balance_abs_threshold" else value for ours, value in settings.items()
            }
            policy = {"use": name, **numbers}
        if policy != "cache_aware" and (is_pair or role == "prefill"):
            found[role] = policy
    return found
