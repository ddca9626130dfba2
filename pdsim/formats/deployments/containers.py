"""Finds containers in manifests and in values of charts, with their replicas, hosts, GPUs and roles."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.inputs import InputError, shown

_ROLES = ("prefill", "decode")
_GPU_LABELS = ("pdsim/gpu", "nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
_PARALLEL = {
    "tensor": "tensor-parallel-size",
    "data": "data-parallel-size",
    "pipeline": "pipeline-parallel-size",
    "dataLocal": "data-parallel-size-local",
}
"""vLLM's option for each parallel size in the values of llm-d's and KServe's charts."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Replicas, hosts, GPUs and role of a container, as its manifest or chart says."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables: values by name."""
    replicas: int = 1
    """Number of copies of the server that start."""
    hosts: int = 1
    """Number of hosts on which each replica runs."""
    gpus: int | None = None
    """Number of GPUs on each host. None: not given."""
    gpu: str | None = None
    """Name of the GPU in a label of nodes. None: not given."""
    role: str | None = None
    """Role of the container, prefill or decode, if the name, a label or the component type of an enclosing object (such
    as a Deployment) contains it. None: not given.
    """
    parallel: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes in the values of a chart, by the option that the chart adds to the command."""


@dataclass(frozen=True)
class Container(Pods):
    where: str
    """Where the container stands, for messages: the file, and the object in it."""
    words: list[str] = field(default_factory=list)
    """The words of the container's command and arguments. Empty: the image decides."""
    engine: str | None = None
    """The program that the chart or the image starts if the command names none. None: not known."""
    model: str | None = None
    """Model that the chart gives in addition to the command, by name or path. None: the chart gives no model."""
    slices: int = 1
    """Number of copies of the container in each replica: the product of the fields `slices` of all objects around the
    container.
    """
    framework: str | None = None
    """What the container runs in a DynamoGraphDeployment: an engine's worker, such as dynamo.sglang, or the frontend.
    None: no object around the container says so.
    """


_OF_IMAGES = {
    "vllm-runtime": "dynamo.vllm",
    "sglang-runtime": "dynamo.sglang",
    "tensorrtllm-runtime": "dynamo.trtllm",
    "trtllm-runtime": "dynamo.trtllm",
    "vllm-openai": "vllm",
    "llm-d": "vllm",
}
"""Programs that container images start, by the image's name."""


def containers_of(document: Any, where: str) -> Iterator[Container]:
    """Yields all containers in a parsed manifest or values of a chart, in order. where: names the file in messages."""
    yield from _inside(document, Container(where))


def _inside(found: Any, around: Container) -> Iterator[Container]:
    if isinstance(found, list):
        for i, one in enumerate(found):
            yield from _inside(one, replace(around, where=f"{around.where}[{i}]"))
    if not isinstance(found, dict):
        return
    around = _described(found, around)
    for name, inside in found.items():
        path = replace(around, where=f"{around.where}: {name}" if around.where else str(name))
        if name in ("containers", "mainContainer"):
            for one in inside if isinstance(inside, list) else [inside]:
                if isinstance(one, dict):
                    yield _container(one, path)
        elif (name == "workerTemplate" and "leaderTemplate" in found) or name == "initContainers":
            continue
        elif name == "command" and "image" in found and "containers" not in found and _is_compose(found):
            yield _container(_of_compose(found), around)
        elif name == "modelSpec" and isinstance(inside, list):
            yield from (_of_stack(one, path) for one in inside if isinstance(one, dict))
        else:
            yield from _inside(inside, _named(str(name), path))


def _is_compose(found: Mapping[str, Any]) -> bool:
    return not {"name", "resources"} & found.keys() or "deploy" in found


def _of_compose(found: Mapping[str, Any]) -> dict[str, Any]:
    """Turns a service of Docker Compose into a container of Kubernetes: image, command, args, env, resources. The
    service's command becomes args, because it has the arguments of the program that the image starts.
    """
    words = found["command"]
    if isinstance(words, str):
        try:
            words = shlex.split(words)
        except ValueError:  # which the reader of its lines explains
            words = [words]
    deploy = found.get("deploy")
    counts = [one["count"] for one in _objects(deploy) if isinstance(one.get("count"), int)]
    env = found.get("environment")
    resources = {"limits": {"gpu": counts[0]}} if counts else None
    return {
        "image": found["image"], "command": found.get("entrypoint"), "args": words, "env": env, "resources": resources
    }  # fmt: skip


def _objects(found: Any) -> Iterator[Mapping[str, Any]]:
    """Yields all mappings in a document, at any depth, an outer mapping before those inside it."""
    if isinstance(found, dict):
        yield found
    for one in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _objects(one)


def _of_stack(found: Mapping[str, Any], around: Container) -> Container:
    """The container that a model in the values of vLLM's production stack describes. found: the model's values. around:
    settings of the enclosing objects, which the container inherits.
    """
    words = [str(found["modelURL"])] if found.get("modelURL") else []
    config = found.get("vllmConfig")
    for name, value in config.items() if isinstance(config, dict) else ():
        flag = re.sub(r"(?=[A-Z])", "-", str(name)).lower()
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, str | int | float):
            words += [f"--{flag}", str(value)]
        elif name == "extraArgs":
            words += _words(value)
    replicas, gpus = (found.get(name) for name in ("replicaCount", "requestGPU"))
    return replace(
        around,
        words=words,
        engine="vllm",
        replicas=replicas if isinstance(replicas, int) else 1,
        gpus=gpus if isinstance(gpus, int) else None,
    )


def engine_of_image(image: str) -> str | None:
    """The program that a container image starts. None: not known."""
    return _OF_IMAGES.get(image.rsplit("/", 1)[-1].partition(":")[0])


def _named(name: str, around: Container) -> Container:
    """Returns `around` with the role whose name `name` contains. Returns `around` unchanged if `name` contains no role,
    or several.
    """
    found = [role for role in _ROLES if role in name.lower()]
    return replace(around, role=found[0]) if len(found) == 1 else around


def _described(found: Mapping[str, Any], around: Container) -> Container:
    """Settings for the containers inside the mapping `found`: those of its enclosing objects (around), and those that
    the mapping itself has, which take precedence (`slices` are multiplied). Raises InputError if `replicas` is neither
    a whole number of at least 0 nor a mapping or list.
    """
    for text in _names(found):
        around = _named(text, around)
    changes: dict[str, Any] = {}
    for name, ours in (("replicas", "replicas"), ("size", "hosts"), ("nodeCount", "hosts"), ("numberOfNodes", "hosts")):
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            changes[ours] = value
        elif name == "replicas" and value is not None and not isinstance(value, dict | list):
            raise InputError(f"replicas: expected a whole number of at least 0, found {shown(value)}")
    if isinstance(found.get("slices"), int):
        changes["slices"] = around.slices * found["slices"]
    if found.get("create") is False:
        changes["replicas"] = 0
    if isinstance(multinode := found.get("multinode"), dict) and isinstance(multinode.get("nodeCount"), int):
        changes["hosts"] = multinode["nodeCount"]
    if isinstance(selector := found.get("nodeSelector"), dict):
        changes["gpu"] = next((str(selector[label]) for label in _GPU_LABELS if label in selector), around.gpu)
    if (gpus := _gpus(found.get("resources"))) is not None:
        changes["gpus"] = gpus
    if isinstance(sizes := found.get("parallelism"), dict):
        sizes = {_PARALLEL[name]: size for name, size in sizes.items() if name in _PARALLEL and isinstance(size, int)}
        changes["parallel"] = sizes
    if isinstance(artifacts := found.get("modelArtifacts") or found.get("model"), dict):
        named = artifacts.get("name") or artifacts.get("uri")
        changes["model"] = named.removeprefix("hf://") if isinstance(named, str) else around.model
    if isinstance(found.get("backendFramework"), str):
        changes["framework"] = f"dynamo.{found['backendFramework']}"
    if "frontend" in (found.get("componentType"), found.get("type")):
        changes["framework"] = "frontend"
    if isinstance(envs := found.get("envs"), list):
        changes["variables"] = {**around.variables, **_variables(envs)}
    return replace(around, **changes)


def _names(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields strings of a manifest's object that may contain the name of a role: name, labels, component type, role."""
    metadata = found.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    labels = metadata.get("labels")
    texts = [metadata.get("name"), *(labels.values() if isinstance(labels, dict) else ())]
    texts += [found.get(name) for name in ("componentType", "subComponentType", "type", "role")]
    texts += [found.get("name")] if found.get("name") in _ROLES else []
    yield from (text for text in texts if isinstance(text, str))


def _gpus(resources: Any) -> int | None:
    if not isinstance(resources, dict):
        return None
    for part in (resources.get("limits"), resources.get("requests")):
        if isinstance(part, dict):
            for name, count in part.items():
                if str(name).rsplit("/", 1)[-1] in ("gpu", "gpu_count") and str(count).isdecimal():
                    return int(count)
    return None


def _variables(envs: Any) -> dict[str, str]:
    if isinstance(envs, dict):
        return {str(name): str(value) for name, value in envs.items()}
    if not isinstance(envs, list):
        return {}
    found = dict(one.split("=", 1) for one in envs if isinstance(one, str) and "=" in one)
    return found | {
        str(one["name"]): str(one["value"])
        for one in envs
        if isinstance(one, dict) and "name" in one and "value" in one
    }


def _words(found: Any) -> list[str]:
    if isinstance(found, str):
        return [found]
    return [str(one) for one in found] if isinstance(found, list) else []


def _of_charts(around: Container) -> dict[str, str]:
    """Environment variables, by name, that llm-d's chart and LeaderWorkerSets set in containers. around: settings that
    these containers inherit.
    """
    sizes = around.parallel
    found = {"LWS_GROUP_SIZE": max(around.hosts, sizes.get("data-parallel-size", 1)), "LWS_WORKER_INDEX": 0}
    if "tensor-parallel-size" in sizes:
        found["TP_SIZE"] = sizes["tensor-parallel-size"]
    return {name: str(value) for name, value in found.items()}


def _container(found: Mapping[str, Any], around: Container) -> Container:
    words = [*_words(found.get("command")), *_words(found.get("args"))]
    engine = "vllm" if found.get("modelCommand") in ("vllmServe", "imageDefault") else None
    if engine is None and not found.get("command") and (not words or words[0].startswith("-")):
        own = engine_of_image(str(found.get("image", ""))) or around.framework
        engine = "frontend" if around.framework == "frontend" else own
    if engine in ("vllm", "dynamo.vllm") and around.model is not None and not {"--model"} & set(words):
        words = [around.model, *words]
    gpus = _gpus(found.get("resources"))
    variables = {**_of_charts(around), **_variables(found.get("env"))}
    return replace(
        around,
        words=words,
        engine=engine,
        replicas=around.replicas * around.slices,
        gpus=around.gpus if gpus is None else gpus,
        variables={**around.variables, **variables},
    )
