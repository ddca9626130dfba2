"""Tasks: one simulation for each point and seed. Planner.plan checks all the tasks that it makes, before any of them is
run. Tasks with equal inputs are computed once.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.metrics.explanation.stages import ALL_STAGES
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import summarize
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.loading import Changes, apply_change, load_scenario, parse_scenario, set_field
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import describe_component
from pdsim.scenario.sections.cost import ENDS, GROUPS
from pdsim.scenario.yaml_file import ConfigError, read_yaml
from pdsim.study.verdict.slo import Slo
from pdsim.system.catalog import CatalogError, load_gpu, load_model, load_transport, lookups_remembered, own_entries

_PACKAGES = ("policy", "core", "system", "cost", "workload", "metrics", "scenario", "sim")
"""Packages whose code determines the numbers of a run."""
_HEAD = ("key", "status", "message", "saturated", "gpus", "warnings", "failures")
_TAIL = ("ttft_ns", "e2e_ns", "output_tokens", "own_itl_ms", "identity", "classes")
"""Last columns of a run's row: times and tokens of each finished request, from which other SLOs are judged without a
new run; the run's identity (Task.identity); and the classes of all requests, finished ones first. Requests that warm
up are left out.
"""


@dataclass(frozen=True)
class Task:
    """The simulation of one point with one seed. `identity` is JSON text of everything on which the numbers of a whole
    run depend. `key`, a digest of `identity` and of the options `slo` and `own_itl`, names the result file.
    """

    key: str
    identity: str
    data: dict[str, Any]
    """The scenario as nested dicts and lists. Relative paths in it start at the folder `base`."""
    base: Path
    slo: Slo | None = None
    """The run ends as soon as it can no longer meet this SLO. None: the run goes on to its end."""
    own_itl: bool = False
    """True: the result has percentiles of the gaps between each request's own tokens."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Text of each catalog file that the user wrote, by the file's path within a catalog folder, such as
    models/NAME.yaml. Workers on other machines do not have these files.
    """


@dataclass(frozen=True)
class Done:
    """The result of a task, and the CPU and wall seconds that the task took."""

    key: str
    """Key of the task (Task.key)."""
    row: Mapping[str, Any]
    """The task's row of results: one value, or list of values, per column."""
    cpu_s: float = 0.0
    """CPU time in s that the task took in its worker."""
    wall_s: float = 0.0
    """Wall time in s that the task took."""


@dataclass(frozen=True)
class Point:
    number: int
    """Number of the point in the order of the study, from 1."""
    changes: Changes
    """Changes of the base scenario that make the point."""
    tasks: dict[int, Task]
    """The tasks of the point, by seed."""
    end: str = ""
    """"fastest" or "slowest": the point has the step times of that end of their range. "repeat_N": the point is the
    N-th repetition of a run, with slightly faster or slower messages. Empty: neither.
    """


class Planner:
    """Makes the points of a study and numbers them. Points with equal changes are one point."""

    def __init__(
        self, where: str, scenario: Path, *, changes: Sequence[str], seeds: Sequence[int] | None, own_itl: bool = False
    ) -> None:
        """where: names the study in messages. changes: of the scenario file, in the notation of --set. seeds: of random
        numbers; each point is run once with each seed. None: the scenario's own seed. own_itl: True: results have
        percentiles of the gaps between each request's own tokens.
        """
        self._where = where
        self._own_itl = own_itl
        base = load_scenario(scenario, changes)  # so that its own mistakes are named as such
        self._base = scenario.parent.absolute()
        self._data: dict[str, Any] = read_yaml(scenario)
        for change in changes:
            apply_change(self._data, change)
        self._seeds = (base.seed,) if seeds is None else tuple(dict.fromkeys(seeds))
        self._digests: dict[str, str] = {}
        """Digest of all requests of a run, by workload and seed as JSON text. Most points have the same workload."""
        self._points: dict[str, Point] = {}
        """Points by their changes, as JSON."""
        self._first_error: ConfigError | None = None
        self._any_is_possible = False

    @property
    def points(self) -> list[Point]:
        return list(self._points.values())

    def forget(self) -> None:
        """Forgets all points. Later points are numbered from 1 again."""
        self._points.clear()

    @lookups_remembered()
    def plan(self, designed: Iterable[Changes]) -> list[Point]:
        """One point for each of the given changes. Raises ConfigError if a field or value is wrong, or if no point can
        run.
        """
        planned = [self._point(changes) for changes in designed]
        if self._first_error is not None and not self._any_is_possible:
            raise ConfigError(f"{self._where}: no point can run; the first fails: {self._first_error}")
        return planned

    def at_ends(self, point: Point) -> list[Point]:
        """Two copies of the point: one with the fastest step times of the range, one with the slowest. Empty: the step
        times were measured on a server.
        """
        if not self.scenario(point).uncertain:
            return []
        at_end = {end: {f"corner.{group}": end for group in GROUPS} for end in ENDS}
        return [self.varied(point, end, changes) for end, changes in at_end.items()]

    def varied(self, point: Point, end: str, changes: Changes) -> Point:
        """A copy of the point with further changes, under the point's number. end: the copy's Point.end, such as
        `fastest` or `repeat_1`.
        """
        where = f"{self._where}, point {point.number}, {end}"
        return replace(point, tasks=self._tasks({**point.changes, **changes}, list(point.tasks), where), end=end)

    def scenario(self, point: Point) -> Scenario:
        """The scenario of a point, with the point's first seed."""
        return parse_scenario(next(iter(point.tasks.values())).data, base=self._base)

    def has(self, changes: Changes) -> bool:
        """True if a point with these changes was planned."""
        return _fields(changes) in self._points

    def _point(self, changes: Changes) -> Point:
        fields = _fields(changes)
        if fields not in self._points:
            number = len(self._points) + 1
            where = f"{self._where}, point {number} ({described(changes)})"
            self._points[fields] = Point(number, changes, self._tasks(changes, self._seeds, where))
        return self._points[fields]

    def _tasks(self, changes: Changes, seeds: Sequence[int], where: str) -> dict[int, Task]:
        """The tasks of a point with these changes, by seed. The scenario is read and checked once for all seeds. where:
        names the point in messages.
        """
        data = deepcopy(self._data)
        for path, value in {**changes, "seed": seeds[0]}.items():
            set_field(data, path, deepcopy(value), where=where)
        scenario = parse_scenario(data, base=self._base, where=where)
        try:
            workloads = [self._digest(scenario.model_copy(update={"seed": seed})) for seed in seeds]
            resolved = resolve(scenario)
            self._any_is_possible = True
        except ConfigError as impossible:  # its row says why; it is only told apart
            workloads = [json.dumps(describe_component(scenario.workload))] * len(seeds)
            resolved = scenario
            self._first_error = self._first_error or impossible
        try:
            entries = own_entries(scenario.entries)
        except CatalogError:  # its row says why
            entries = {}
        parts = _identity_parts(scenario, resolved)
        tasks = {}
        for seed, workload in zip(seeds, workloads, strict=True):
            fields = {**parts["scenario"], "seed": seed}
            identity = json.dumps({**parts, "scenario": fields, "workload": workload}, sort_keys=True)
            key = key_of(f"{identity} own ITL" if self._own_itl else identity)
            own_data = {**data, "seed": seed}
            tasks[seed] = Task(key, identity, own_data, self._base, own_itl=self._own_itl, entries=entries)
        return tasks

    def _digest(self, scenario: Scenario) -> str:
        """The digest of a scenario's requests. Raises ConfigError if the workload cannot make its requests."""
        described = json.dumps([describe_component(scenario.workload), scenario.seed])
        if described not in self._digests:
            digest = sha256()
            for spec in requests_of(scenario):
                digest.update(repr(spec).encode())
            self._digests[described] = digest.hexdigest()
        return self._digests[described]


def _fields(changes: Changes) -> str:
    return json.dumps(changes, sort_keys=True, default=str)


def described(changes: Changes) -> str:
    """Text of changes, in the notation of --set: "prefill.tp=2, page_size=16". No changes: "the base scenario"."""
    return ", ".join(f"{path}={shown(value)}" for path, value in changes.items()) or "the base scenario"


def shown(value: Any) -> str:
    """Text of a value, as it can be written in scenario files: a string without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def key_of(identity: str) -> str:
    return sha256(identity.encode()).hexdigest()[:32]


def _identity_parts(scenario: Scenario, resolved: Scenario) -> dict[str, Any]:
    """Everything on which the numbers of a point's runs depend, except its requests and seeds. Runs with equal parts,
    requests and seeds give equal results. resolved: the scenario with all defaults filled in.
    """
    fields = resolved.model_dump(mode="json", exclude={"name", "description", "checkpoint", "workload"})
    return {
        "pdsim": _revision(),
        "scenario": fields,
        "catalog": _catalog(scenario),
        "modules": {name: _file_digest(name) for name in sorted(set(_modules(fields)))},
    }


@cache
def _revision() -> str:
    """The version of pdsim, with a digest of its code. The digest is needed because a run's results often change with
    the code while the version stays the same.
    """
    digest = sha256()
    folder = Path(str(files("pdsim")))
    for package in _PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{version('pdsim')}+{digest.hexdigest()[:16]}"


def _catalog(scenario: Scenario) -> dict[str, str]:
    """Digests of the contents of the catalog entries that a scenario names, by entry name. Entries that do not exist
    are left out.
    """
    loaders: dict[str, Any] = {"models": load_model, "transports": load_transport, "gpus": load_gpu}
    found: dict[str, str] = {}
    for kind, name in scenario.entries:
        try:
            found[name] = sha256(repr(loaders[kind](name)).encode()).hexdigest()[:16]
        except CatalogError:
            continue
    return found


def _modules(described: Any) -> Iterator[str]:
    """Names of the modules that define the user's own components. described: a scenario as nested dicts and lists, in
    which a user's component is named as "my_policies:Mine".
    """
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


@cache
def metrics() -> dict[str, type]:
    """Type of each numeric column in a run's row of results, by the column's name. Such columns have the numbers of the
    summary and of its section `pdsim`, the GPU-hours, the mean of each stage, and the number of transfer descriptors.
    """
    summary = summarize(RunRecords(), extra={"events": 0, "warm_up_requests": 0})
    numbers = summary | summary.pop("pdsim")
    found: dict[str, type] = {name: int if isinstance(value, int) else float for name, value in numbers.items()}
    found["gpu_hours"] = float
    return {**found, "descriptors": int, **{f"mean_{stage}_ms": float for stage in ALL_STAGES}}


def with_all_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with all columns of results, and no others. Missing values become None. Whole numbers in columns of
    floats become floats.
    """
    found: dict[str, Any] = {name: row.get(name) for name in (*_HEAD, *metrics(), *_TAIL)}
    floats = {name for name, kind in metrics().items() if kind is float and found[name] is not None}
    return found | {name: float(found[name]) for name in floats}
