"""Writes commands that run a scenario with Dynamo: the frontend, workers of SGLang or vLLM, and the load.

Options are those of ai-dynamo 1.6.1: common/configuration/groups/router_args.py, frontend/frontend_args.py and
vllm/backend_args.py. A worker also takes the options of its engine, as in examples/backends/*/launch/disagg_router.sh.
The frontend and the workers find one another through etcd. Without --decode-fallback, the frontend sends no prompt to
decode workers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdsim.launch import graph, host_memory, sglang, vllm
from pdsim.launch.commands import (
    FIRST_BOOTSTRAP_PORT,
    GATEWAY_PORT,
    HOST,
    Aside,
    Launch,
    Place,
    Rule,
    notes_on,
    one_host,
    places,
)
from pdsim.launch.manifests import app_name
from pdsim.launch.words import Flags, command_words
from pdsim.policy.dynamo import DynamoKv
from pdsim.policy.sessions import SessionAffinity
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name
from pdsim.scenario.sections.servers import ServerSettings

_MODULES = ("dynamo.frontend", "dynamo.sglang", "dynamo.vllm")
FRONTEND, SGLANG_WORKER, VLLM_WORKER = (("python", "-m", module) for module in _MODULES)
ROUTER_MODES = {
    "cache_aware": "kv",
    "dynamo_kv": "kv",
    "round_robin": "round-robin",
    "random": "random",
    "power_of_two": "power-of-two",
    "least_loaded": "least-loaded",
}
KV_SETTINGS = {
    "router-kv-overlap-score-credit": "overlap_score_credit",
    "router-kv-overlap-score-credit-decay": "overlap_score_credit_decay",
    "router-prefill-load-scale": "prefill_load_scale",
    "router-decode-active-request-weight": "decode_active_request_weight",
    "router-host-cache-hit-weight": "host_cache_hit_weight",
    "router-temperature": "router_temperature",
}
"""Options of Dynamo's frontend (keys), and the settings of the policy dynamo_kv that have the same meaning (values)."""
WITHOUT_EVENTS = "no-router-kv-events"
"""Option of Dynamo's frontend. With this option, the frontend predicts which pages workers have cached. Without it,
workers report their cached pages by KV events."""
FIRST_EVENT_PORT, FIRST_SYSTEM_PORT = 5557, 8081
"""First ports of KV events, which KV-aware routing needs, and of metrics."""
VLLM_EVENTS = {"enable_kv_cache_events": True}
"""Setting without which vLLM publishes no KV events, even if a publisher is configured (0.33.0, config/kv_events.py).
"""


QUEUE_SETTINGS = {"router-queue-threshold": "threshold", "router-queue-policy": "order"}
"""Settings of the queue policy busy_threshold, by the frontend's option for each."""
QUEUE_ORDERS = ("fcfs", "wspt")
"""Queue orders that an option of Dynamo's frontend can give. The frontend's source also has lcfs, but no option chooses
it."""


def _mode_policy(scenario: Scenario) -> Any:
    """The policy of the scenario that decides the routing mode of Dynamo's frontend: router.prefill. If router.prefill
    is session_affinity: the policy in its field `otherwise`.
    """
    policy = scenario.router.prefill
    return policy.otherwise if isinstance(policy, SessionAffinity) else policy


def _mode_name(scenario: Scenario) -> str:
    return component_name(_mode_policy(scenario))


def _of_mode(value: Any, _scenario: Scenario) -> str | None:
    return None if value in ROUTER_MODES else f"Dynamo has {', '.join(ROUTER_MODES)}"


def _routing(value: Any, scenario: Scenario) -> str | None:
    if value not in (*ROUTER_MODES, "session_affinity"):
        return f"Dynamo has {', '.join(ROUTER_MODES)}, and session_affinity before them"
    both = (scenario.router.prefill, scenario.router.decode)
    if scenario.aggregated is None and len({component_name(policy) for policy in both}) > 1:
        return "Dynamo's frontend has one mode for both roles; give both the same"
    if scenario.aggregated is None and both[0] != both[1] and value in ("dynamo_kv", "session_affinity"):
        return "Dynamo's frontend has one setting for both roles; give both the same"
    return None


def _queue_order(value: Any, _scenario: Scenario) -> str | None:
    return None if value in QUEUE_ORDERS else f"Dynamo's frontend has {' and '.join(QUEUE_ORDERS)}"


_ROUTER_RULES: dict[str, Rule] = {
    "router.queue": None,
    "router.queue.threshold": None,
    "router.queue.order": _queue_order,
    **{f"router.{role}": _routing for role in vllm.KV_ROLES},
    **{f"router.{role}.ttl": None for role in vllm.KV_ROLES},
    **{f"router.{role}.scope": Aside("clients name their sessions") for role in vllm.KV_ROLES},
    **{f"router.{role}.otherwise": _of_mode for role in vllm.KV_ROLES},
    **{
        f"router.{role}.{inner}{name}": None
        for role in vllm.KV_ROLES
        for inner in ("", "otherwise.")
        for name in (*KV_SETTINGS.values(), "kv_events")
    },
}
_OF_GATEWAY = {name: rule for name, rule in sglang.RULES.items() if not name.startswith(("router", "health"))}
SGLANG_RULES: dict[str, Rule] = {**_OF_GATEWAY, **_ROUTER_RULES, "*.tp": one_host}
VLLM_RULES: dict[str, Rule] = {
    **vllm.SERVER_RULES,
    **_ROUTER_RULES,
    "*.tp": one_host,
    "network.transport": None,
}


class _At(NamedTuple):
    """Address of a worker, and its numbers."""

    host: str
    """Address of the host on which the worker runs. In a pod: 0.0.0.0."""
    number: int
    """Number of the worker among all workers of the cluster, from 0."""
    rank: int
    """Number of the worker among the workers of its role, from 0."""


_POD = _At(graph.ANYWHERE, 0, 0)
"""Address of a worker in a Kubernetes pod, where it is the only worker."""


def launch_sglang(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Commands that run the scenario with Dynamo and workers of SGLang. source: words of a command line that name the
    scenario's file. model: name or path by which the engine finds the model. Raises ConfigError, which lists the fields
    that the commands cannot express.
    """
    made, at, resolved = _begin(scenario, "dynamo", SGLANG_RULES)
    made.notes += [*sglang.left_to_the_operator(scenario), *sglang.store_note(scenario)]
    workers = []
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings, environment = sglang.server_flags(made, resolved, servers), sglang.environment(resolved, role)
        for index, place in enumerate(servers_at):
            flags = _sglang_flags(resolved, role, model, settings, _At(place.host, place.number, index))
            made.add(f"{role}-{index}", SGLANG_WORKER, flags, **_variables(place, servers), **environment)
        in_pod = command_words(SGLANG_WORKER, _sglang_flags(resolved, role, model, settings, _POD))
        workers.append(graph.Worker(role, servers, in_pod, environment))
    _finish(made, scenario, "sglang", workers)
    vllm.add_load(made, resolved, source, model)
    return made


def _sglang_flags(scenario: Scenario, role: str, model: str, settings: Flags, at: _At) -> Flags:
    port = [("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT + at.rank)] if role == "prefill" else []
    return [("model-path", model), ("host", at.host), *_events(scenario, at.number, {}), *settings, *port]


def launch_vllm(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Commands that run the scenario with Dynamo and workers of vLLM. source: words of a command line that name the
    scenario's file. model: name or path by which the engine finds the model. Raises ConfigError, which lists the fields
    that the commands cannot express.
    """
    made, at, _ = _begin(scenario, "dynamo-vllm", VLLM_RULES)
    made.notes += [*vllm.own_ways(scenario), *_of_transport(scenario)]
    resolved, workers = vllm.resolved(scenario), []
    for role, servers_at in at.items():
        servers: ServerSettings = getattr(resolved, role)
        settings = vllm.server_flags(made, resolved, servers)
        connector = "nixl" if role in vllm.KV_ROLES else None
        for index, place in enumerate(servers_at):
            flags = _vllm_flags(resolved, role, model, settings, _At(place.host, place.number, index))
            variables = {**_variables(place, servers), **vllm.environment(place, place.host, servers, connector)}
            made.add(f"{role}-{index}", VLLM_WORKER, flags, **variables)
        in_pod = command_words(VLLM_WORKER, _vllm_flags(resolved, role, model, settings, _POD))
        workers.append(graph.Worker(role, servers, in_pod, host_memory.kvbm_variables(servers)))
    _finish(made, scenario, "vllm", workers)
    vllm.add_load(made, resolved, source, model)
    return made


def _vllm_flags(scenario: Scenario, role: str, model: str, settings: Flags, at: _At) -> Flags:
    flags: Flags = [("model", model), *_events(scenario, at.number, VLLM_EVENTS), *settings]
    moved_by = None
    if role in vllm.KV_ROLES:
        transport = scenario.network.transport
        moved_by = transport if transport.startswith("nixl") else "nixl-rdma"
        flags.append(("disaggregation-mode", role))
    moved = vllm.transfer_config(scenario, moved_by, "kv_both", getattr(scenario, role))
    return [*flags, ("kv-transfer-config", moved)]


def _of_transport(scenario: Scenario) -> list[str]:
    transport = scenario.network.transport
    if scenario.aggregated is not None or transport.startswith("nixl"):
        return []
    taken = "Dynamo's vLLM workers move KV by NIXL; --set network.transport=nixl-rdma simulates that"
    return [f"network.transport: {transport}: {taken}"]


def _finish(made: Launch, scenario: Scenario, engine: str, workers: Sequence[graph.Worker]) -> None:
    """Adds a manifest to `made`, a DynamoGraphDeployment with a frontend and these workers, and a note on the manifest.
    engine: sglang or vllm.
    """
    frontend = command_words(FRONTEND, _frontend_flags(scenario, graph.ANYWHERE))
    made.manifests["graph.yaml"] = graph.deployment(scenario, engine, frontend, workers)
    made.notes.append(
        "graph.yaml: the same frontend and workers on Kubernetes with Dynamo's operator, instead of their scripts; "
        f"load.sh needs kubectl port-forward service/{app_name(scenario.name)}-frontend {GATEWAY_PORT}"
    )


def _begin(scenario: Scenario, engine: str, rules: dict[str, Rule]) -> tuple[Launch, dict[str, list[Place]], Scenario]:
    """Begins a launch. Returns (the launch, which has notes and the frontend's command so far; places of the servers by
    role; the scenario as `resolve` returns it, but without `health`). engine: name of the engine in messages. rules: by
    field, what a launch does with the field (Rule); they go before commands.RULES. Raises ConfigError if the engine
    cannot express a field.
    """
    made = Launch(notes=notes_on(scenario, engine, rules))
    name = _mode_name(scenario)
    if isinstance(scenario.router.prefill, SessionAffinity):
        made.notes.append("router: session_affinity: load.sh sends no session ids, so the frontend ignores sessions")
    if name == "cache_aware":
        made.notes.append("router: cache_aware: Dynamo's kv mode weighs matches and load by another rule, dynamo_kv")
    if name == "dynamo_kv" and not _mode_policy(scenario).kv_events:
        made.notes.append(
            "router: dynamo_kv: without kv_events, Dynamo's frontend forgets a prompt after a time, and pdsim's router "
            "when the prompts that it sent have more tokens than a pool holds"
        )
    made.add("frontend", FRONTEND, _frontend_flags(scenario, HOST))
    resolved = resolve(scenario)
    return made, places(scenario), resolved.model_copy(update={"health": None})


def _frontend_flags(scenario: Scenario, host: str) -> Flags:
    policy, given_policy = _mode_policy(scenario), scenario.router.prefill
    flags: Flags = [("http-host", host), ("http-port", GATEWAY_PORT)]
    flags.append(("router-mode", ROUTER_MODES[component_name(policy)]))
    if isinstance(given_policy, SessionAffinity):
        flags.append(("router-session-affinity-ttl-secs", max(1, round(given_policy.ttl_ns / 1e9))))
    if isinstance(policy, DynamoKv):
        given = {flag: (getattr(policy, name), getattr(DynamoKv, name)) for flag, name in KV_SETTINGS.items()}
        flags += [(flag, value) for flag, (value, default) in given.items() if value != default]
        flags += [] if policy.kv_events else [(WITHOUT_EVENTS, True)]
    if (queue := scenario.router.queue) is not None:
        flags += [(flag, getattr(queue, name)) for flag, name in QUEUE_SETTINGS.items()]
    return flags


def _variables(place: Place, servers: ServerSettings) -> dict[str, object]:
    gpus = ",".join(str(place.first_gpu + i) for i in range(servers.num_server_gpus))
    return {"DYN_SYSTEM_PORT": FIRST_SYSTEM_PORT + place.number, "CUDA_VISIBLE_DEVICES": gpus}


def _events(scenario: Scenario, number: int, switch: Mapping[str, bool]) -> Flags:
    """The option with which a worker publishes KV events (--kv-events-config). Empty: the routing mode needs no events.
    number: the worker's number in the cluster; it sets the port. switch: entries of the option's JSON that only this
    engine needs.
    """
    if ROUTER_MODES[_mode_name(scenario)] != "kv":
        return []
    endpoint = f"tcp://*:{FIRST_EVENT_PORT + number}"
    config = {**switch, "publisher": "zmq", "topic": "kv-events", "endpoint": endpoint}
    return [("kv-events-config", json.dumps(config, separators=(",", ":")))]
