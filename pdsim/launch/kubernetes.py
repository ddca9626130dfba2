"""Manifests that put a scenario on Kubernetes with SGLang: a Deployment for each role, the gateway, and the load's Job.

The gateway finds the servers by their labels (service discovery of sglang_router, router_args.py at 05e589a). A role
whose servers span hosts is a LeaderWorkerSet, whose leaders alone have the labels (kubernetes-sigs/lws; SGLang's
docs/references/multi_node_deployment).
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from pdsim.launch import sglang
from pdsim.launch.commands import FIRST_BOOTSTRAP_PORT, FIRST_PORT, GATEWAY_PORT, Launch, notes_on, spanned
from pdsim.launch.words import Expanded, command_words, container_words
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import ServerSettings
from pdsim.scenario.sizing import resolve, roles
from pdsim.scenario.yaml_file import ConfigError, to_yaml
from pdsim.system.catalog import load_gpu

GPU_LABEL = "pdsim/gpu"
IMAGE = "lmsysorg/sglang:latest"
_ANYWHERE = "0.0.0.0"  # noqa: S104  a pod listens for its peers
_OF_GROUP = ("$(LWS_LEADER_ADDRESS)", "$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
"""Variables that a LeaderWorkerSet gives its pods."""
_BOOTSTRAP_ANNOTATION = "sglang.ai/bootstrap-port"
Manifest = dict[str, Any]


def launch(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Raises ConfigError for what SGLang cannot be told, and for a load that is in a file of this machine."""
    made = Launch(notes=notes_on(scenario, "kubernetes", sglang.RULES))
    given, scenario = scenario, resolve(scenario).model_copy(update={"health": scenario.health})
    app = app_name(given.name)
    manifests = [_servers(made, scenario, role, app, model) for role in roles(scenario)]
    manifests += [*_access(app), _gateway(made, scenario, app, model), _service(app)]
    made.notes.append(f"nodes: label those with each GPU: {GPU_LABEL}=NAME")
    made.manifests["cluster.yaml"] = _text(manifests)
    flags, notes = sglang.bench_flags(scenario, f"{app}-gateway")
    if not flags:
        raise ConfigError(
            f"--engine kubernetes cannot launch {given.name}:\n  workload, client: a Job sends what bench_serving can: "
            f"{'; '.join(notes)}; pdsim launch {shlex.join(source)} --engine sglang replays a trace"
        )
    command = container_words(command_words(sglang.LOAD, [*flags, ("model", model)]))
    made.manifests["load.yaml"] = _text([_job(app, command)])
    return made


def app_name(name: str) -> str:
    """The scenario's name as Kubernetes takes it in names and labels: a letter first, then letters, digits, dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).lstrip("-0123456789")[:40].strip("-") or "scenario"


def _text(manifests: list[Manifest]) -> str:
    return "---\n".join(map(to_yaml, manifests))


def _manifest(api: str, kind: str, name: str, labels: Mapping[str, str], **rest: Any) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}, **rest}


def _template(labels: Mapping[str, str], pod: Manifest, annotations: Mapping[str, str]) -> Manifest:
    return {"metadata": {"labels": dict(labels), **({"annotations": annotations} if annotations else {})}, "spec": pod}


def _deployment(name: str, labels: Mapping[str, str], replicas: int, template: Manifest) -> Manifest:
    spec = {"replicas": replicas, "selector": {"matchLabels": dict(labels)}, "template": template}
    return _manifest("apps/v1", "Deployment", name, labels, spec=spec)


def _servers(made: Launch, scenario: Scenario, role: str, app: str, model: str) -> Manifest:
    servers: ServerSettings = getattr(scenario, role)
    flags = [("model-path", model), ("host", _ANYWHERE), ("port", FIRST_PORT)]
    flags += sglang.server_flags(made, scenario, servers)
    annotations = {}
    if role == "prefill":
        flags.append(("disaggregation-bootstrap-port", FIRST_BOOTSTRAP_PORT))
        annotations[_BOOTSTRAP_ANNOTATION] = str(FIRST_BOOTSTRAP_PORT)
    num_hosts = spanned(scenario, role)
    if num_hosts > 1:
        flags += sglang.across_hosts(*map(Expanded, _OF_GROUP))
        spans_domain = load_gpu(servers.gpu).num_hosts(servers.tp) > 1
        channel = "; its pods need a channel of the NVLink domain, such as a ComputeDomain gives"
        made.notes.append(
            f"{role}: a LeaderWorkerSet (lws 0.6 or later) of {num_hosts} hosts for each server"
            + (channel if spans_domain else "")
        )
    container = {
        "name": "sglang",
        "image": IMAGE,
        "command": container_words(command_words(sglang.SERVER, flags)),
        "env": [{"name": name, "value": str(value)} for name, value in sglang.environment(scenario, role).items()],
        "ports": [{"containerPort": FIRST_PORT}],
        "resources": {"limits": {"nvidia.com/gpu": servers.num_server_gpus // num_hosts}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": FIRST_PORT}, "periodSeconds": 10},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108  NCCL's
    }
    pod = {
        "nodeSelector": {GPU_LABEL: servers.gpu},
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    name, labels = f"{app}-{role}", _labels(app, role)
    template = _template(labels, pod, annotations)
    if num_hosts == 1:
        return _deployment(name, labels, servers.instances, template)
    # Several pods for each server, of which the first answers.
    silent = {field: value for field, value in container.items() if field not in ("readinessProbe", "ports")}
    group = {
        "size": num_hosts,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": template,
        "workerTemplate": {"spec": deepcopy({**pod, "containers": [silent]})},
    }
    spec = {"replicas": servers.instances, "leaderWorkerTemplate": group}
    return _manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels, spec=spec)


def _labels(app: str, role: str) -> dict[str, str]:
    return {"app": app, "role": role}


def _access(app: str) -> list[Manifest]:
    """Access that the gateway needs to watch pods."""
    name, labels, api = f"{app}-gateway", _labels(app, "gateway"), "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    role = {"kind": "Role", "name": name, "apiGroup": api}
    subjects = [{"kind": "ServiceAccount", "name": name}]
    return [
        _manifest("v1", "ServiceAccount", name, labels),
        _manifest(f"{api}/v1", "Role", name, labels, rules=rules),
        _manifest(f"{api}/v1", "RoleBinding", name, labels, subjects=subjects, roleRef=role),
    ]


def _gateway(made: Launch, scenario: Scenario, app: str, model: str) -> Manifest:
    flags = [flag for flag in sglang.gateway_flags(made, scenario, {}) if flag[0] != "host"]
    selectors = {role: [f"{name}={value}" for name, value in _labels(app, role).items()] for role in roles(scenario)}
    flags += [("host", _ANYWHERE), ("model-path", model), ("service-discovery", True)]
    flags += [("service-discovery-port", FIRST_PORT), ("service-discovery-namespace", Expanded("$(NAMESPACE)"))]
    for role, selector in selectors.items():
        flags.append(("selector" if role == "aggregated" else f"{role}-selector", selector))
    container = {
        "name": "gateway",
        "image": IMAGE,
        "command": container_words(command_words(sglang.GATEWAY, flags)),
        "env": [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [{"containerPort": GATEWAY_PORT}],
    }
    pod = {"serviceAccountName": f"{app}-gateway", "containers": [container]}
    labels = _labels(app, "gateway")
    return _deployment(f"{app}-gateway", labels, 1, _template(labels, pod, {}))


def _service(app: str) -> Manifest:
    labels = _labels(app, "gateway")
    spec = {"selector": labels, "ports": [{"port": GATEWAY_PORT, "targetPort": GATEWAY_PORT}]}
    return _manifest("v1", "Service", f"{app}-gateway", labels, spec=spec)


def _job(app: str, command: list[str]) -> Manifest:
    pod = {"restartPolicy": "Never", "containers": [{"name": "load", "image": IMAGE, "command": command}]}
    spec = {"backoffLimit": 0, "template": {"spec": pod}}
    return _manifest("batch/v1", "Job", f"{app}-load", _labels(app, "load"), spec=spec)
