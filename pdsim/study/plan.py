"""Turns the fields that points change into tasks: one for each point and seed, checked before anything runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdsim.scenario.cost import ENDS, GROUPS
from pdsim.scenario.loading import apply_change, load_scenario, parse_scenario, set_field
from pdsim.scenario.yaml_file import ConfigError, read_yaml
from pdsim.study.design import Changes
from pdsim.study.identity import Identifier, identity_of_impossible, key_of
from pdsim.study.planning.slo import Slo
from pdsim.system.catalog import CatalogError, lookups_remembered, own_entries


@dataclass(frozen=True)
class Task:
    """Work to compute one point with one seed."""

    key: str
    identity: str
    data: dict[str, Any]
    """A scenario as plain data, in which paths are relative to base."""
    base: Path
    slo: Slo | None = None
    """The run ends when it is sure that it misses it."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """The user's own entries of the catalog, for workers on other machines."""


@dataclass(frozen=True)
class Point:
    number: int
    changes: Changes
    tasks: dict[int, Task]
    """Tasks by seed."""
    end: str = ""
    """End of the times that nobody measured, at which it is simulated; empty: at their best known."""


class Planner:
    """Numbers points as they come. Points of equal fields are one."""

    def __init__(self, where: Path, scenario: Path, *, changes: Sequence[str], seeds: Sequence[int] | None) -> None:
        self._where = where
        base = load_scenario(scenario, changes)  # so that its own mistakes are named as such
        self._base = scenario.parent.absolute()
        self._data: dict[str, Any] = read_yaml(scenario)
        for change in changes:
            apply_change(self._data, change)
        self._seeds = (base.seed,) if seeds is None else tuple(dict.fromkeys(seeds))
        self._identifier = Identifier()
        self._points: dict[str, Point] = {}
        """Points by their fields."""
        self._first_error: ConfigError | None = None
        self._any_is_possible = False

    @property
    def points(self) -> list[Point]:
        return list(self._points.values())

    @lookups_remembered()
    def plan(self, designed: Iterable[Changes]) -> list[Point]:
        """Raises ConfigError for a field or value that is wrong, and if no point at all is possible."""
        planned = [self._point(changes) for changes in designed]
        if self._first_error is not None and not self._any_is_possible:
            raise ConfigError(f"{self._where}: no point is possible; the first: {self._first_error}")
        return planned

    def at_ends(self, point: Point) -> list[Point]:
        """The point at its fastest and at its slowest; none where its times are certain."""
        task = next(iter(point.tasks.values()))
        if not parse_scenario(task.data, base=self._base).uncertain:
            return []
        return [self._at_end(point, end) for end in ENDS]

    def _at_end(self, point: Point, end: str) -> Point:
        changes = {**point.changes, **{f"corner.{group}": end for group in GROUPS}}
        where = f"{self._where}, point {point.number}, {end}"
        tasks = {seed: self._task(changes, seed, where) for seed in point.tasks}
        return Point(point.number, point.changes, tasks, end)

    def _point(self, changes: Changes) -> Point:
        fields = json.dumps(changes, sort_keys=True, default=str)
        if fields not in self._points:
            number = len(self._points) + 1
            where = f"{self._where}, point {number} ({described(changes)})"
            tasks = {seed: self._task(changes, seed, where) for seed in self._seeds}
            self._points[fields] = Point(number, changes, tasks)
        return self._points[fields]

    def _task(self, changes: Changes, seed: int, where: str) -> Task:
        data = deepcopy(self._data)
        for path, value in {**changes, "seed": seed}.items():
            set_field(data, path, deepcopy(value), where=where)
        scenario = parse_scenario(data, base=self._base, where=where)
        try:
            identity = self._identifier.identity(scenario)
            self._any_is_possible = True
        except ConfigError as impossible:  # its row says why
            identity = identity_of_impossible(scenario)
            self._first_error = self._first_error or impossible
        try:
            entries = own_entries(scenario.entries)
        except CatalogError:  # its row says why
            entries = {}
        return Task(key_of(identity), identity, data, self._base, entries=entries)


def described(changes: Changes) -> str:
    """Changes as --set takes them."""
    return ", ".join(f"{path}={shown(value)}" for path, value in changes.items()) or "the base scenario"


def shown(value: Any) -> str:
    """A value as a file has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
