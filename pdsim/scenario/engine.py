"""Defaults that depend on the engine, or on whether requests have priorities."""

from typing import Any, Literal

Engine = Literal["sglang", "vllm"]

ENGINE_DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm": {
        "page_size": 16,
        "decode": {
            "radix_cache": True,
            "allocation": "prefill_complete",
            "admission": "free_pages",
            "preemption": "last_arrived_first",
        },
        "aggregated": {"preemption": "last_arrived_first"},
    }
}
"""Defaults of an engine where they are not those of the fields (page_size: vLLM 0.33.0, config/cache.py)."""

PREEMPTION_THRESHOLD = 10
"""SGLang's default."""


def with_priority_policy(data: Any) -> Any:
    """Prompts are computed by priority where requests have one, unless the scenario says otherwise."""
    if not isinstance(data, dict) or not data.get("priorities"):
        return data
    roles = {role: data[role] for role in ("prefill", "aggregated") if isinstance(data.get(role), dict)}
    filled = {role: {"policy": "priority", **given} for role, given in roles.items()}
    if "aggregated" in filled and data.get("engine") != "vllm":
        filled["aggregated"] = {"priority_preemption_threshold": PREEMPTION_THRESHOLD, **filled["aggregated"]}
    return {**data, **filled}


def with_defaults_of_engine(data: Any) -> Any:
    """Fill in what a scenario leaves to its engine."""
    if not isinstance(data, dict) or not isinstance(data.get("engine"), str):
        return data
    filled = dict(data)
    for field, default in ENGINE_DEFAULTS.get(data["engine"], {}).items():
        if not isinstance(default, dict):
            filled.setdefault(field, default)
        elif isinstance(given := data.get(field), dict):
            filled[field] = {**default, **given}
    return filled
