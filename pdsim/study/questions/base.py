"""The scenario that a question starts from, and the SLO."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from pdsim.scenario.build import requests_of
from pdsim.scenario.loading import apply_change, load_scenario, parse_scenario, set_field
from pdsim.scenario.schema import ENDS, GROUPS, Group, Scenario
from pdsim.scenario.starter import starting_point
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml
from pdsim.study.design import Changes
from pdsim.workload.client_driver import ClosedLoop
from pdsim.workload.request_spec import classes_of
from pdsim.workload.synthetic import PrefixPool, RandomLengths
from pdsim.workload.trace_file import LONGEST_LINE, WITHOUT_TIMES, TraceError, open_trace, trace_kind

NUM_SEEDS = 3
"""Runs of each arm."""
ROUTERS = ("cache_aware", "least_loaded")
"""Tried where there are several instances to choose from and the scenario says no router."""
_NUM_OF_TRACE = 5000
"""Requests that a question is answered with in a minute or two."""


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Load and SLO, where they are not the scenario's and the defaults."""

    trace: Path | None = None
    """Replaces the workload: a file in any format that scenarios read, known by its first line."""
    ttft_ms: float = 2000.0
    """SLO: time to the first token."""
    tpot_ms: float = 50.0
    """SLO: time per output token after the first."""
    attainment: float = 0.9
    """SLO: share of the requests that must meet both."""
    speedup: str = ""
    """Speed-ups of a trace that capacity tries, as 0.5,1,2,4 [as many as it needs]."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name):g}: a number above 0")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment {self.attainment:g}: a share, above 0 and at most 1")
        if any(not 0 < factor < inf for factor in self.speedups):
            raise ConfigError(f"--speedup {self.speedup}: numbers above 0")

    @property
    def speedups(self) -> list[float]:
        """Each once, the least first. Raises ConfigError."""
        try:
            return sorted({float(factor) for factor in self.speedup.split(",")}) if self.speedup else []
        except ValueError:
            raise ConfigError(f"--speedup {self.speedup}: expected numbers, such as 0.5,1,2,4") from None

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


@dataclass(frozen=True)
class Base:
    path: Path
    changes: tuple[str, ...]
    """Changes as --set takes them."""
    scenario: Scenario
    is_sample: bool
    """Its requests are a record, with their times: other seeds say nothing new."""
    of_starter: tuple[str, ...] | None = None
    """What makes it from the starter, as --set takes it; None: it has a file of its own."""

    @property
    def has_lengths(self) -> bool:
        """Lengths are settings of the workload."""
        return isinstance(self.scenario.workload, RandomLengths | PrefixPool)

    @property
    def own_speedup(self) -> float | None:
        """Speed-up of its own times; None: it has no times."""
        return getattr(self.scenario.workload, "speedup", None) if self.is_sample else None

    @property
    def ends(self) -> dict[str, Changes]:
        """Changes to the fastest and the slowest that it may be, where no server was measured; else none."""
        own = self.scenario.corner
        return {
            end: {"corner": {**dict.fromkeys(GROUPS, end), **own} if own else end}
            for end in ENDS
            if self.scenario.uncertain
        }

    @property
    def alone(self) -> dict[Group, list[Changes]]:
        """Changes to both ends of each group of times alone; none of a single group, whose ends are those of all."""
        groups, own = self.scenario.uncertain, self.scenario.corner or {}
        if len(groups) == 1:
            return {}
        return {group: [{"corner": {**own, group: end}} for end in ENDS] for group in groups}

    @cached_property
    def classes(self) -> list[str]:
        """Classes of its requests."""
        return sorted(set(classes_of(requests_of(self.scenario)).values()))

    @property
    def first_classes(self) -> list[str]:
        """Those of the highest priority."""
        priorities = self.scenario.priorities
        most = max((priorities.get(name, 0) for name in self.classes), default=0)
        return [name for name in self.classes if priorities.get(name, 0) == most]

    @property
    def other_classes(self) -> list[str]:
        """Requests without a class, too."""
        return ["", *(name for name in self.classes if name not in self.first_classes)]

    @property
    def names_router(self) -> bool:
        return "router" in self._data()

    def routers(self, most_instances: int) -> dict[str, Changes]:
        """Changes to each router to try, by what it adds to a label: one without a name if there is no choice."""
        if most_instances == 1 or self.names_router:
            return {"": {}}
        return {f", {router}": {"router": router} for router in ROUTERS}

    def changed(self, changes: Changes) -> Scenario:
        """The scenario as a point of a sweep has it."""
        data = self._data()
        for field, value in changes.items():
            set_field(data, field, deepcopy(value), where=field)
        return parse_scenario(data, base=self.path.parent, where=str(self.path))

    def _data(self) -> dict[str, Any]:
        """Plain data of its file and --set, without defaults."""
        data: dict[str, Any] = read_yaml(self.path)
        for change in self.changes:
            apply_change(data, change)
        return data


def base_of(path: Path | None, options: AskOptions, changes: Sequence[str], *, folder: Path, starter: Changes) -> Base:
    """Reads the scenario; without one, writes the starter with the question's own changes into the folder.

    Raises ConfigError.
    """
    changes = (*_trace_changes(options.trace), *changes)
    of_starter = None
    if path is None:
        path = folder / "scenario.yaml"
        data = starting_point()
        of_starter = (*(f"{field}={json.dumps(value)}" for field, value in starter.items()), *changes)
        for change in of_starter:
            apply_change(data, change)
        changes, scenario = (), parse_scenario(data, base=folder, where="--set")
        write_yaml(data, path)
    else:
        scenario = load_scenario(path, changes)
    if scenario.aggregated is not None:
        raise ConfigError(f"{path}: questions are about prefill and decode instances; this cluster is aggregated")
    times = getattr(scenario.client, "arrivals", None)
    is_sample = hasattr(scenario.workload, "path") and times is None and not isinstance(scenario.client, ClosedLoop)
    return Base(path, changes, scenario, is_sample, of_starter)


def _trace_changes(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        kind = trace_kind(path)
    except TraceError as wrong:
        raise ConfigError(f"--trace: {wrong}") from None
    workload = {"use": kind, "path": str(path.absolute()), "num_requests": _NUM_OF_TRACE}
    made = [f"workload={json.dumps(workload)}"]
    return made if kind in WITHOUT_TIMES else [*made, "client=open_loop"]


def trace_lines(path: Path) -> int:
    """Records of a trace, one a line; 0 of a JSON list."""
    with open_trace(path) as file:
        first = file.readline(LONGEST_LINE)
        if first.lstrip().startswith("["):
            return 0
        return sum(bool(line.strip()) for line in chain([first], file)) - (not first.lstrip().startswith("{"))
