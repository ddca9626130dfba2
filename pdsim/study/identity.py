"""Everything that the result of a point depends on: points of equal identity are computed once."""

import json
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdsim.scenario.build import requests_of
from pdsim.scenario.component import describe_component
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import resolve
from pdsim.system.catalog import CatalogError, load_gpu, load_model, load_transport

_ROOMS = ("policy", "core", "system", "cost", "workload", "metrics", "scenario", "sim")
"""Packages whose code decides results."""


class Identifier:
    """Remembers the digests of workloads: most points of a sweep share theirs."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def identity(self, scenario: Scenario) -> str:
        """Identity as JSON. Raises ConfigError if the scenario cannot be resolved or its requests cannot be made."""
        return _to_json(scenario, self._workload_digest(scenario), resolve(scenario))

    def _workload_digest(self, scenario: Scenario) -> str:
        described = json.dumps([describe_component(scenario.workload), scenario.seed])
        if described not in self._digests:
            digest = sha256()
            for spec in requests_of(scenario):
                digest.update(repr(spec).encode())
            self._digests[described] = digest.hexdigest()
        return self._digests[described]


def identity_of_impossible(scenario: Scenario) -> str:
    """Identity of a scenario that no cluster can be: it is only told apart."""
    return _to_json(scenario, json.dumps(describe_component(scenario.workload)), scenario)


def workload_of(identity: str) -> str:
    """The digest of its requests."""
    digest: str = json.loads(identity)["workload"]
    return digest


def scenario_of(identity: str) -> dict[str, Any]:
    """The resolved scenario as plain data, without its workload."""
    fields: dict[str, Any] = json.loads(identity)["scenario"]
    return fields


def key_of(identity: str) -> str:
    return sha256(identity.encode()).hexdigest()[:32]


def _to_json(scenario: Scenario, workload: str, resolved: Scenario) -> str:
    fields = resolved.model_dump(mode="json", exclude={"name", "description", "workload"})
    parts = {
        "pdsim": _revision(),
        "scenario": fields,
        "workload": workload,
        "catalog": _catalog(scenario),
        "modules": {name: _file_digest(name) for name in sorted(set(_modules(fields)))},
    }
    return json.dumps(parts, sort_keys=True)


@cache
def _revision() -> str:
    """Version and a digest of the code: a change that moves numbers is often made before the version is."""
    digest = sha256()
    folder = Path(__file__).parent.parent
    for room in _ROOMS:
        for path in sorted((folder / room).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{version('pdsim')}+{digest.hexdigest()[:16]}"


def _catalog(scenario: Scenario) -> dict[str, str]:
    """The entries that it names, as they stand; those that are missing are left out."""
    loaders: dict[str, Any] = {"models": load_model, "transports": load_transport, "gpus": load_gpu}
    found: dict[str, str] = {}
    for kind, name in scenario.entries:
        try:
            found[name] = sha256(repr(loaders[kind](name)).encode()).hexdigest()[:16]
        except CatalogError:
            continue
    return found


def _modules(described: Any) -> Iterator[str]:
    """Modules of a user's own components: "my_policies:Mine" in what describes a scenario."""
    if isinstance(described, dict):
        described = list(described.values())
    if isinstance(described, list):
        for part in described:
            yield from _modules(part)
    elif isinstance(described, str) and ":" in described:
        module = described.partition(":")[0]
        if module in sys.modules and not module.startswith("pdsim."):
            yield module


@cache
def _file_digest(module: str) -> str:
    path = getattr(sys.modules[module], "__file__", None)
    return sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
