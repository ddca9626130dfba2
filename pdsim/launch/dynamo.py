"""The commands that put a scenario on real GPUs with Dynamo: frontend, workers of SGLang or vLLM, and load.

Flags are those of ai-dynamo 1.6.1: common/configuration/groups/router_args.py, frontend/frontend_args.py and
vllm/backend_args.py; a worker takes its engine's flags too, as in examples/backends/*/launch/disagg_router.sh.
Frontend and workers find each other by etcd. Without --decode-fallback the frontend sends no prompt to decode workers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.launch import graph, sglang, vllm
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
from pdsim.launch.manifests import app_name
from pdsim.launch.words import Flags, command_words
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
    "network.transport": None,
}


def launch_sglang(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Workers of SGLang. Raises ConfigError for what they and the frontend cannot be told."""
    made, at, resolved = _begun(scenario, "dynamo", SGLANG_RULES)
    made.notes += sglang.left_to_the_operator(scenario)
    workers = []
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings, environment = sglang.server_flags(made, resolved, servers), sglang.environment(resolved, role)

        def flags(host: str, number: int, index: int, role: str = role, settings: Flags = settings) -> Flags:
            port = [("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT + index)] if role == "prefill" else []
            return [("model-path", model), ("host", host), *_events(resolved, number, {}), *settings, *port]

        for index, place in enumerate(servers_at):
            variables = {**_variables(place, servers), **environment}
            made.add(f"{role}-{index}", SGLANG_WORKER, flags(place.host, place.number, index), **variables)
        words = command_words(SGLANG_WORKER, flags(graph.ANYWHERE, 0, 0))
        workers.append(graph.Worker(role, servers, words, environment))
    _finish(made, scenario, "sglang", workers)
    vllm.add_load(made, resolved, source, model)
    return made


def launch_vllm(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Workers of vLLM, as launch_sglang."""
    made, at, resolved = _begun(scenario, "dynamo-vllm", VLLM_RULES)
    made.notes += vllm.own_ways(scenario)
    if scenario.aggregated is None and not scenario.network.transport.startswith("nixl"):
        made.notes.append(
            f"network.transport: {scenario.network.transport}: Dynamo's vLLM workers move KV by NIXL; "
            "--set network.transport=nixl-rdma simulates that"
        )
    resolved = vllm.resolved(scenario)
    workers = []
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings = vllm.server_flags(made, resolved, servers)
        connector = "nixl" if role in vllm.KV_ROLES else None
        if connector:
            settings.append(("disaggregation-mode", role))
            settings.append(("kv-transfer-config", vllm.transfer_config(connector, "kv_both", servers)))

        def flags(number: int, settings: Flags = settings) -> Flags:
            return [("model", model), *_events(resolved, number, VLLM_EVENTS), *settings]

        for index, place in enumerate(servers_at):
            variables = {**_variables(place, servers), **vllm.environment(place, servers, connector)}
            made.add(f"{role}-{index}", VLLM_WORKER, flags(place.number), **variables)
        workers.append(graph.Worker(role, servers, command_words(VLLM_WORKER, flags(0)), {}))
    _finish(made, scenario, "vllm", workers)
    vllm.add_load(made, resolved, source, model)
    return made


def _finish(made: Launch, scenario: Scenario, engine: str, workers: Sequence[graph.Worker]) -> None:
    """Adds the same as a DynamoGraphDeployment."""
    made.manifests["graph.yaml"] = graph.deployment(scenario, engine, _frontend(scenario, graph.ANYWHERE), workers)
    made.notes.append(
        "graph.yaml: the same frontend and workers on Kubernetes with Dynamo's operator, instead of their scripts; "
        f"load.sh sends behind kubectl port-forward service/{app_name(scenario.name)}-frontend {GATEWAY_PORT}"
    )


def _begun(scenario: Scenario, engine: str, rules: dict[str, Rule]) -> tuple[Launch, dict[str, list[Place]], Scenario]:
    """A launch with the frontend, places, and the resolved scenario."""
    made = Launch(notes=notes_on(scenario, engine, rules))
    mode = ROUTER_MODES[component_name(scenario.router.prefill)]
    if mode == "kv":
        made.notes.append("router: cache_aware: Dynamo's kv mode weighs matches and load by a rule of its own")
    made.add("frontend", FRONTEND, _frontend_flags(scenario, HOST))
    resolved = resolve(scenario)
    return made, places(scenario), resolved.model_copy(update={"health": None})


def _frontend_flags(scenario: Scenario, host: str) -> Flags:
    mode = ROUTER_MODES[component_name(scenario.router.prefill)]
    return [("http-host", host), ("http-port", GATEWAY_PORT), ("router-mode", mode)]


def _frontend(scenario: Scenario, host: str) -> list[str]:
    return command_words(FRONTEND, _frontend_flags(scenario, host))


def _variables(place: Place, servers: ServerSettings) -> dict[str, object]:
    gpus = ",".join(str(place.first_gpu + i) for i in range(servers.num_server_gpus))
    return {"DYN_SYSTEM_PORT": FIRST_SYSTEM_PORT + place.number, "CUDA_VISIBLE_DEVICES": gpus}


def _events(scenario: Scenario, number: int, switch: Mapping[str, bool]) -> Flags:
    """KV events of the worker of this number, for routing by KV; `switch` is what its engine wants too."""
    if component_name(scenario.router.prefill) != "cache_aware":
        return []
    endpoint = f"tcp://*:{FIRST_EVENT_PORT + number}"
    config = {**switch, "publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    return [("kv-events-config", json.dumps(config, separators=(",", ":")))]
