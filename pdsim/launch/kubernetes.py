"""Writes manifests that run a scenario on Kubernetes with SGLang: a Deployment per role, the gateway, and a Job with
the load.

The gateway finds the servers by their labels (service discovery of sglang_router, router_args.py at 05e589a). If the
servers of a role span several hosts, the role is a LeaderWorkerSet, in which only leaders have these labels
(kubernetes-sigs/lws; SGLang's docs/references/multi_node_deployment).
"""

from collections.abc import Sequence
from copy import deepcopy

from pdsim.launch import commands, manifests, sglang
from pdsim.launch.bench_serving import bench_flags
from pdsim.launch.commands import (
    FIRST_BOOTSTRAP_PORT,
    FIRST_PORT,
    GATEWAY_PORT,
    LOAD,
    TRACE,
    Launch,
    notes_on,
    replay_flags,
    spanned,
)
from pdsim.launch.gateway import gateway_flags
from pdsim.launch.manifests import GPU_LABEL, Manifest
from pdsim.launch.words import Expanded, command_words, container_words
from pdsim.scenario.building.sizing import resolve, roles
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import ServerSettings
from pdsim.system.catalog import load_gpu

IMAGE = "lmsysorg/sglang:latest"
_ANYWHERE = "0.0.0.0"  # noqa: S104  a pod listens for its peers
_OF_GROUP = ("$(LWS_LEADER_ADDRESS)", "$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)")
"""Environment variables that a LeaderWorkerSet sets in its pods."""
_OF_LOAD = "load:"
_BOOTSTRAP_ANNOTATION = "sglang.ai/bootstrap-port"


def launch(scenario: Scenario, source: Sequence[str], model: str) -> Launch:
    """Manifests of the servers and the gateway, and a Job with the load. If bench_serving cannot send the load,
    commands that send it take the place of the Job. source: words of a command line that name the scenario's file.
    model: name or path by which the engine finds the model. Raises ConfigError, which lists the fields that SGLang
    cannot express.
    """
    made = Launch(notes=[*notes_on(scenario, "kubernetes", sglang.RULES), *sglang.left_to_the_operator(scenario)])
    made.notes += sglang.store_note(scenario)
    given, scenario = scenario, resolve(scenario).model_copy(update={"health": scenario.health})
    app = manifests.app_name(given.name)
    cluster = [_servers(made, scenario, role, app, model) for role in roles(scenario)]
    cluster += [*_access(app), _gateway(made, scenario, app, model), _service(app)]
    made.notes.append(f"nodes: label those with each GPU: {GPU_LABEL}=NAME")
    made.manifests["cluster.yaml"] = manifests.text(cluster)
    flags, _ = bench_flags(scenario, f"{app}-gateway")
    if flags:
        command = container_words(command_words(sglang.LOAD, [*flags, ("model", model)]))
        made.manifests["load.yaml"] = manifests.text([manifests.job(app, {"image": IMAGE, "command": command})])
    else:
        commands.add_replay(made, given, source, model)
        forward = f"kubectl port-forward service/{app}-gateway {GATEWAY_PORT}"
        made.notes.append(f"{_OF_LOAD} in no manifest; run {forward}, then trace.sh and load.sh")
    return made


def replay_in_job(made: Launch, scenario: Scenario, model: str, trace: str) -> None:
    """Replaces the commands that send the load by a Job in which AIPerf sends a trace. If the trace is too large for a
    ConfigMap, adds a note instead. trace: text of the trace.
    """
    if len(trace.encode()) > manifests.MOST_TRACE_BYTES:
        made.notes.append(f"trace: {len(trace) / 1e6:.1f} MB, more than a ConfigMap holds")
        return
    app = manifests.app_name(scenario.name)
    url = f"http://{app}-gateway:{GATEWAY_PORT}"
    flags = replay_flags(scenario, model, url, f"{manifests.TRACE_FOLDER}/{TRACE}")
    made.manifests["load.yaml"] = manifests.replay(app, command_words(LOAD, flags), trace)
    made.commands.clear()
    made.notes = [note for note in made.notes if not note.startswith(_OF_LOAD)]


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
        gpu = load_gpu(servers.gpu)
        spans_domain = gpu.gpus_per_host is not None and gpu.num_hosts(servers.tp) > 1
        channel = "; its pods need a channel of the NVLink domain, such as a ComputeDomain gives"
        made.notes.append(
            f"{role}: a LeaderWorkerSet (lws 0.6 or later) of {num_hosts} hosts for each server"
            + (channel if spans_domain else "")
        )
    container = {
        "name": "sglang",
        "image": IMAGE,
        "command": container_words(command_words(sglang.SERVER, flags)),
        "env": manifests.variables(sglang.environment(scenario, role)),
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
    name, marks = f"{app}-{role}", manifests.labels(app, role)
    template = manifests.template(marks, pod, annotations)
    if num_hosts == 1:
        return manifests.deployment(name, marks, servers.instances, template)
    # Several pods for each server, of which the first answers.
    silent = {field: value for field, value in container.items() if field not in ("readinessProbe", "ports")}
    group = {
        "size": num_hosts,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": template,
        "workerTemplate": {"spec": deepcopy({**pod, "containers": [silent]})},
    }
    spec = {"replicas": servers.instances, "leaderWorkerTemplate": group}
    return manifests.manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, marks, spec=spec)


def _access(app: str) -> list[Manifest]:
    """The rights that the gateway needs to watch pods."""
    name, labels, api = f"{app}-gateway", manifests.labels(app, "gateway"), "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    role = {"kind": "Role", "name": name, "apiGroup": api}
    subjects = [{"kind": "ServiceAccount", "name": name}]
    return [
        manifests.manifest("v1", "ServiceAccount", name, labels),
        manifests.manifest(f"{api}/v1", "Role", name, labels, rules=rules),
        manifests.manifest(f"{api}/v1", "RoleBinding", name, labels, subjects=subjects, roleRef=role),
    ]


def _gateway(made: Launch, scenario: Scenario, app: str, model: str) -> Manifest:
    flags = [flag for flag in gateway_flags(made, scenario, {}) if flag[0] != "host"]
    selectors = {
        role: [f"{name}={value}" for name, value in manifests.labels(app, role).items()] for role in roles(scenario)
    }
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
    labels = manifests.labels(app, "gateway")
    return manifests.deployment(f"{app}-gateway", labels, 1, manifests.template(labels, pod, {}))


def _service(app: str) -> Manifest:
    labels = manifests.labels(app, "gateway")
    spec = {"selector": labels, "ports": [{"port": GATEWAY_PORT, "targetPort": GATEWAY_PORT}]}
    return manifests.manifest("v1", "Service", f"{app}-gateway", labels, spec=spec)
