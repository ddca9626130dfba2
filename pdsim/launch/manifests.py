"""Parts of Kubernetes manifests: names, labels, workloads, and Jobs that send a load."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.launch.commands import AIPERF, TRACE
from pdsim.launch.words import container_words
from pdsim.scenario.yaml_file import to_yaml

MOST_TRACE_BYTES = 1_000_000
"""Largest size in bytes of a trace that is put into a ConfigMap, which holds 1 MiB."""
GPU_LABEL = "pdsim/gpu"
"""Label of nodes by which pods find the GPU. The user sets it on the nodes."""
TRACE_FOLDER = "/load"
_REPLAYS_IN = "python:3.12"
Manifest = dict[str, Any]


def app_name(name: str) -> str:
    """The scenario's name, changed so that Kubernetes accepts it in names and labels: it begins with a letter, and has
    letters, digits and dashes.
    """
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).lstrip("-0123456789")[:40].strip("-") or "scenario"


def text(manifests: Sequence[Manifest]) -> str:
    return "---\n".join(map(to_yaml, manifests))


def labels(app: str, role: str) -> dict[str, str]:
    return {"app": app, "role": role}


def manifest(api: str, kind: str, name: str, marks: Mapping[str, str], **rest: Any) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": dict(marks)}, **rest}


def template(marks: Mapping[str, str], pod: Manifest, annotations: Mapping[str, str]) -> Manifest:
    return {"metadata": {"labels": dict(marks), **({"annotations": annotations} if annotations else {})}, "spec": pod}


def deployment(name: str, marks: Mapping[str, str], replicas: int, pods: Manifest) -> Manifest:
    spec = {"replicas": replicas, "selector": {"matchLabels": dict(marks)}, "template": pods}
    return manifest("apps/v1", "Deployment", name, marks, spec=spec)


def variables(given: Mapping[str, object]) -> list[Manifest]:
    """Environment variables of a container. Dollar signs in values are escaped, because Kubernetes replaces $(NAME).
    given: values by name.
    """
    return [
        {"name": name, "value": word}
        for name, word in zip(given, container_words(list(map(str, given.values()))), strict=True)
    ]


def job(app: str, container: Manifest, volumes: Sequence[Manifest] = ()) -> Manifest:
    pod = {"restartPolicy": "Never", "containers": [{"name": "load", **container}]}
    spec = {"backoffLimit": 0, "template": {"spec": {**pod, **({"volumes": [*volumes]} if volumes else {})}}}
    return manifest("batch/v1", "Job", f"{app}-load", labels(app, "load"), spec=spec)


def replay(app: str, words: Sequence[str], trace: str) -> str:
    """Manifests of a ConfigMap with a trace, and of a Job in which AIPerf sends it. app: prefix of their names. words:
    AIPerf's command. trace: text of the trace.
    """
    kept = manifest("v1", "ConfigMap", f"{app}-load", labels(app, "load"), data={TRACE: trace})
    install = f'pip install aiperf=={AIPERF} && exec "$@"'
    container = {
        "image": _REPLAYS_IN,
        "command": ["sh", "-c", install, "load", *container_words(words)],
        "volumeMounts": [{"name": "trace", "mountPath": TRACE_FOLDER}],
    }
    volume = {"name": "trace", "configMap": {"name": f"{app}-load"}}
    return text([kept, job(app, container, [volume])])
