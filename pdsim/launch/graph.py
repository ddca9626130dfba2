"""Writes a cluster as a DynamoGraphDeployment (nvidia.com/v1alpha1, ai-dynamo 1.6.1), from which Dynamo's operator
makes pods.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdsim.launch import manifests
from pdsim.launch.manifests import GPU_LABEL, Manifest
from pdsim.launch.words import container_words
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import ServerSettings

ANYWHERE = "0.0.0.0"  # noqa: S104  a pod listens for its peers
RELEASE = "1.6.1"
FRONTEND = "Frontend"


class Worker(NamedTuple):
    """The kind of worker that serves one role. Each worker of the kind runs in a pod of its own."""

    role: str
    """prefill, decode or aggregated."""
    servers: ServerSettings
    """Settings of the servers of `role` in the scenario."""
    words: Sequence[str]
    """Words of the command that starts a worker."""
    variables: Mapping[str, object]
    """Environment variables of the worker: values by name."""


def deployment(scenario: Scenario, engine: str, frontend: Sequence[str], workers: Sequence[Worker]) -> str:
    """Text of a DynamoGraphDeployment in YAML. engine: sglang or vllm, which decides on the image of the containers.
    frontend: words of the frontend's command. workers: one entry for each role.
    """
    app, image = manifests.app_name(scenario.name), f"nvcr.io/nvidia/ai-dynamo/{engine}-runtime:{RELEASE}"
    services = {FRONTEND: {"componentType": "frontend", "replicas": 1, "extraPodSpec": _pod(image, frontend)}}
    services |= {worker.role: _worker(image, worker) for worker in workers}
    spec = {"backendFramework": engine, "services": services}
    api, marks = "nvidia.com/v1alpha1", manifests.labels(app, "cluster")
    return manifests.text([manifests.manifest(api, "DynamoGraphDeployment", app, marks, spec=spec)])


def _worker(image: str, worker: Worker) -> Manifest:
    servers = worker.servers
    pod = {**_pod(image, worker.words), "nodeSelector": {GPU_LABEL: servers.gpu}}
    kind = {} if worker.role == "aggregated" else {"subComponentType": worker.role}
    return {
        "componentType": "worker",
        **kind,
        "replicas": servers.instances,
        "resources": {"limits": {"gpu": str(servers.num_server_gpus)}},
        **({"envs": manifests.variables(worker.variables)} if worker.variables else {}),
        "extraPodSpec": pod,
    }


def _pod(image: str, words: Sequence[str]) -> dict[str, Any]:
    command, args = words[:3], words[3:]
    return {"mainContainer": {"image": image, "command": [*command], "args": container_words(args)}}
