"""Defaults of a scenario that depend on its engine, on its model, or on priorities."""

from collections.abc import Mapping
from typing import Any, Literal

from pdsim.scenario.sections.speculation import with_chosen_drafts

Engine = Literal["sglang", "vllm"]

ENGINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm": {
        "page_size": 16,
        "decode": {
            "radix_cache": True,
            "allocation": "prefill_complete",
            "admission": "free_pages",
            "preemption": "last_admitted_first",
        },
        "aggregated": {"preemption": "last_admitted_first"},
    }
}
"""By engine: defaults of scenario fields that differ from the defaults of the schema (page_size: vLLM 0.33.0,
config/cache.py).
"""

VLLM_VICTIMS = {"use": "lowest_priority_first", "last_arrived": True}
"""Preemption policy that vLLM uses with priority scheduling (0.33.0, Scheduler.schedule)."""
PREEMPTION_THRESHOLD = 10
"""SGLang's default of --priority-scheduling-preemption-threshold: a request may preempt a running request whose
priority is lower by more than this number.
"""


def with_priority_policy(data: Any) -> Any:
    """Returns a scenario's plain data, in which servers that compute prompts have the default policy `priority` if
    request classes have priorities. Servers of vLLM then also preempt by priority, and aggregated servers of SGLang
    preempt above PREEMPTION_THRESHOLD. Other data is returned unchanged.
    """
    if not isinstance(data, dict) or not data.get("priorities"):
        return data
    roles = {role: data[role] for role in ("prefill", "aggregated") if isinstance(data.get(role), dict)}
    filled = {role: _filled({"policy": "priority"}, given) for role, given in roles.items()}
    if data.get("engine") == "vllm":
        for role in ("decode", "aggregated"):
            if isinstance(given := filled.get(role, data.get(role)), dict):
                filled[role] = _filled({"preemption": VLLM_VICTIMS}, given)
    elif "aggregated" in filled:
        default = {"priority_preemption_threshold": PREEMPTION_THRESHOLD}
        filled["aggregated"] = _filled(default, filled["aggregated"])
    return {**data, **filled}


def with_defaults_of_engine(data: Any) -> Any:
    """Returns a scenario's plain data, in which missing fields have the values that ENGINE_DEFAULTS gives for the
    scenario's engine. Other data is returned unchanged.
    """
    if not isinstance(data, dict) or not isinstance(data.get("engine"), str):
        return data
    filled = dict(data)
    for field, default in ENGINE_DEFAULTS.get(data["engine"], {}).items():
        if not isinstance(default, dict):
            filled = _filled({field: default}, filled)
        elif isinstance(given := data.get(field), dict):
            filled[field] = _filled(default, given)
    return filled


def with_drafts_of_engine(data: Any) -> Any:
    """Returns a scenario's plain data, in which missing numbers of speculative steps, branches and verified tokens have
    the values that SGLang chooses for the model. Other data is returned unchanged.
    """
    if not isinstance(data, dict):
        return data
    roles = {role: data[role] for role in ("decode", "aggregated") if isinstance(data.get(role), dict)}
    return {**data, **{role: with_chosen_drafts(servers, data.get("model")) for role, servers in roles.items()}}


def _filled(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields, and the defaults of fields that are missing or null."""
    return {**given, **{name: default for name, default in defaults.items() if given.get(name) is None}}
