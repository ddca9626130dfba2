"""The commands that put a scenario on real GPUs with Dynamo: frontend, workers of SGLang or vLLM, and load.

Flags are those of ai-dynamo 1.6.1: common/configuration/groups/router_args.py, frontend/frontend_args.py and
vllm/backend_args.py; a worker takes its engine's flags too, as in examples/backends/*/launch/disagg_router.sh.
Frontend and workers find each other by etcd. Without --decode-fallback the frontend sends no prompt to decode workers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.launch import sglang, vllm
from pdsim.launch.commands import (
    FIRST_BOOTSTRAP_PORT,
    GATEWAY_PORT,
    HOST,
    Launch,
    Place,
    Rule,
    notes_on,
    one_host,
    places,
)
from pdsim.launch.words import Flags
from pdsim.scenario.component import component_name
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import ServerSettings
from pdsim.scenario.sizing import resolve

_MODULES = ("dynamo.frontend", "dynamo.sglang", "dynamo.vllm")
FRONTEND, SGLANG_WORKER, VLLM_WORKER = (("python", "-m", module) for module in _MODULES)
ROUTER_MODES = {
    "cache_aware": "kv",
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "power-of-two",
    "least_loaded": "least-loaded",
}
FIRST_EVENT_PORT, FIRST_SYSTEM_PORT = 5557, 8081
"""Ports of KV events, which routing by KV needs, and of metrics."""
VLLM_EVENTS = {"enable_kv_cache_events": True}
"""vLLM publishes nothing without it, whatever the publisher (0.33.0, config/kv_events.py)."""


def _routing(value: Any, scenario: Scenario) -> str | None:
    if value not in ROUTER_MODES:
        return f"Dynamo has {', '.join(ROUTER_MODES)}"
    names = {component_name(policy) for policy in (scenario.router.prefill, scenario.router.decode)}
    if scenario.aggregated is None and len(names) > 1:
        return "Dynamo's frontend has one mode for both roles; give both the same"
    return None


_ROUTER_RULES: dict[str, Rule] = {"router.prefill": _routing, "router.decode": _routing}
_OF_GATEWAY = {name: rule for name, rule in sglang.RULES.items() if not name.startswith(("router", "health"))}
SGLANG_RULES: dict[str, Rule] = {**_OF_GATEWAY, **_ROUTER_RULES, "*.tp": one_host}
VLLM_RULES: dict[str, Rule] = {
    **vllm.SERVER_RULES,
    **_ROUTER_RULES,
    "network.transport": lambda value, _: (
        None if value.startswith("nixl") else "Dynamo's vLLM workers move KV by nixl, such as nixl-rdma"
    ),
}


def launch_sglang(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Workers of SGLang. Raises ConfigError for what they and the frontend cannot be told."""
    made, at, resolved = _begun(scenario, "dynamo", SGLANG_RULES)
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings = sglang.server_flags(made, resolved, servers)
        for index, place in enumerate(servers_at):
            flags: Flags = [("model-path", model), ("host", place.host), *_events(resolved, place, {}), *settings]
            if role == "prefill":
                flags.append(("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT + index))
            variables = {**_variables(place, servers), **sglang.environment(resolved, role)}
            made.add(f"{role}-{index}", SGLANG_WORKER, flags, **variables)
    vllm.add_load(made, resolved, source, model)
    return made


def launch_vllm(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Workers of vLLM, as launch_sglang."""
    made, at, resolved = _begun(scenario, "dynamo-vllm", VLLM_RULES)
    made.notes += vllm.own_ways(scenario)
    resolved = vllm.resolved(scenario)
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings = vllm.server_flags(made, resolved, servers)
        for index, place in enumerate(servers_at):
            flags: Flags = [("model", model), *_events(resolved, place, VLLM_EVENTS), *settings]
            connector = None
            if role in vllm.KV_ROLES:
                connector = "nixl"
                flags.append(("disaggregation-mode", role))
                flags.append(("kv-transfer-config", vllm.transfer_config(connector, "kv_both", servers)))
            variables = {**_variables(place, servers), **vllm.environment(place, servers, connector)}
            made.add(f"{role}-{index}", VLLM_WORKER, flags, **variables)
    vllm.add_load(made, resolved, source, model)
    return made


def _begun(scenario: Scenario, engine: str, rules: dict[str, Rule]) -> tuple[Launch, dict[str, list[Place]], Scenario]:
    """A launch with the frontend, places, and the resolved scenario."""
    made = Launch(notes=notes_on(scenario, engine, rules))
    mode = ROUTER_MODES[component_name(scenario.router.prefill)]
    if mode == "kv":
        made.notes.append("router: cache_aware: Dynamo's kv mode weighs matches and load by a rule of its own")
    flags = [("http-host", HOST), ("http-port", GATEWAY_PORT), ("router-mode", mode)]
    made.add("frontend", FRONTEND, flags)
    resolved = resolve(scenario)
    return made, places(scenario), resolved.model_copy(update={"health": None})


def _variables(place: Place, servers: ServerSettings) -> dict[str, object]:
    gpus = ",".join(str(place.first_gpu + i) for i in range(servers.num_server_gpus))
    return {"DYN_SYSTEM_PORT": FIRST_SYSTEM_PORT + place.number, "CUDA_VISIBLE_DEVICES": gpus}


def _events(scenario: Scenario, place: Place, switch: Mapping[str, bool]) -> Flags:
    """KV events of a worker, which routing by KV needs; `switch` is what its engine wants besides a publisher."""
    if component_name(scenario.router.prefill) != "cache_aware":
        return []
    endpoint = f"tcp://*:{FIRST_EVENT_PORT + place.number}"
    config = {**switch, "publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    return [("kv-events-config", json.dumps(config, separators=(",", ":")))]
