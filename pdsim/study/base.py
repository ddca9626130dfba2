"""The scenario from which a question or a plan starts, with its load and its SLO."""

import json
import warnings
from collections.abc import Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.loading import Changes, apply_change, load_scenario, parse_scenario, set_field
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.cost import ENDS, GROUPS, Group
from pdsim.scenario.sections.servers import DecodeSettings, PrefillSettings
from pdsim.scenario.starter import starting_point, workload_of_trace
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.study.points.tasks import shown
from pdsim.study.verdict.slo import Slo
from pdsim.workload.client import Client, ClosedLoop, warm_up_requests
from pdsim.workload.request_spec import classes_of
from pdsim.workload.trace_file import LONGEST_LINE, InputWarning, is_parquet, num_parquet_rows, open_trace

NUM_SEEDS = 3
"""Default number of runs of each candidate. Each run has another seed of random numbers."""
MAX_GPUS = 32
"""Default limit of the number of GPUs in a planned cluster."""
ROUTERS = ("cache_aware", "least_loaded")
"""Routing policies that questions and plans try if a role has several instances. Questions (Base.routers) try no other
router if the scenario names one.
"""
VLLM_ROUTERS = ("cache_aware", "power_of_two")
"""Routing policies that a study tries for engine vllm, whose router has no least_loaded policy."""


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Options of a question that set the load and the SLO. If `trace` is None, the scenario keeps its load."""

    trace: Path | None = None
    """Trace file whose requests replace the scenario's workload, in any format that scenarios read."""
    slo: str = "ttft < 2 s and tpot < 50 ms for 90 %"
    """SLO as text: limits of ttft, tpot and e2e, with the share of requests that must meet them."""
    speedup: str = ""
    """Speed-ups of the trace that the question `capacity` tries, such as 0.5,1,2,4 [chosen until one meets the SLO and
    one misses the SLO].
    """

    def __post_init__(self) -> None:
        Slo.parse(self.slo)
        if any(not 0 < factor < inf for factor in self.speedups):
            raise ConfigError(f"--speedup {self.speedup}: expected numbers above 0")

    @property
    def speedups(self) -> list[float]:
        """The speed-ups of the trace that --speedup lists, each once, in ascending order. Raises ConfigError if
        --speedup lists anything but numbers.
        """
        try:
            return sorted({float(factor) for factor in self.speedup.split(",")}) if self.speedup else []
        except ValueError:
            raise ConfigError(f"--speedup {self.speedup}: expected numbers, such as 0.5,1,2,4") from None

    @property
    def wanted(self) -> Slo:
        return Slo.parse(self.slo)


@dataclass(frozen=True)
class Base:
    """The scenario that a question or a plan starts from."""

    path: Path
    """Path of the scenario file: the file of the user, or the file to which the built-in scenario was written."""
    changes: tuple[str, ...]
    """Changes of the scenario that the user gave, as "dotted.path=value", the notation of --set."""
    scenario: Scenario
    """The scenario of the file `path` after `changes`, with its load."""
    is_sample: bool
    """True: the load is the same for all seeds, because its requests come from a trace and are sent in an open loop
    without random arrivals (see is_sample).
    """
    own_aggregated: Changes | None = None
    """Settings of the user's aggregated servers. If they are given, `scenario` has one prefill and one decode server
    with these settings instead (_pair_of), because studies start from prefill and decode servers. None: the user's
    cluster is not aggregated.
    """
    of_starter: tuple[str, ...] | None = None
    """Changes that make this scenario from pdsim's built-in scenario, in the notation of --set. None: the scenario
    comes from the user's file.
    """

    @property
    def where(self) -> str:
        """Name of the scenario in error messages: its file, or "--set" if the scenario is the built-in one, changed or
        not.
        """
        return str(self.path) if self.of_starter is None else "--set"

    @property
    def load(self) -> tuple[str, float] | None:
        """The path and the value of the field that sets the load, such as ("client.arrivals.rate", 4.0). None: the
        scenario has no such field.
        """
        client, workload = self.scenario.client, self.scenario.workload
        arrivals = getattr(client, "arrivals", None)
        values = {"client.concurrency": getattr(client, "concurrency", None)}
        values["client.arrivals.rate"] = getattr(arrivals, "rate_per_s", None)
        if arrivals is None and not isinstance(client, ClosedLoop):
            values["workload.speedup"] = getattr(workload, "speedup", None)
        return next(((path, float(value)) for path, value in values.items() if value is not None), None)

    def with_load(self, value: float) -> Changes:
        """Changes that set the scenario's load to `value`: requests per second, the number of clients in a closed loop,
        or a trace's speed-up, depending on the scenario. The scenario must have a load that can be set: `load` is not
        None.
        """
        assert self.load is not None
        path, _ = self.load
        units = {"client.concurrency": round(value), "client.arrivals.rate": f"{value:g} /s"}
        return {path: units.get(path, value)}

    def scaled(self, factor: float) -> Changes:
        """Returns changes of the scenario that multiply its load by `factor`: the request rate, the number of clients
        in a closed loop, or a trace's speed-up. The scenario must have a load that can be set: `load` is not None.
        """
        assert self.load is not None
        return self.with_load(self.load[1] * factor)

    def one_at_a_time(self, changes: Changes) -> Changes:
        """Returns `changes`, and changes of the client and the router by which a single client sends each request after
        its previous request has ended. No request then waits for another, and the router refuses none.
        """
        one: Changes = {**changes, "client": {"use": "closed_loop", "concurrency": 1}}
        has_shedding = self.changed(changes).router.shedding is not None
        return {**one, "router.shedding": None} if has_shedding else one

    @property
    def pace(self) -> str:
        """Text that says when requests are sent: "at their own times" (a trace's recorded times, or times that cannot
        be set), "all at once" (the requests have no times), "4 a second" (a rate), or "32 at a time" (the number of
        clients in a closed loop).
        """
        if self.load is None or self.keeps_times:
            return pace_of((spec.arrival_ns, bool(spec.after)) for spec in requests_of(self.scenario))
        return f"{self.load[1]:g} {'at a time' if isinstance(self.scenario.client, ClosedLoop) else 'a second'}"

    @property
    def keeps_times(self) -> bool:
        """True if the load is a trace whose requests are sent at their recorded times, divided by the speed-up."""
        return self.load is not None and self.load[0] == "workload.speedup"

    def with_changes(self, changes: Changes) -> "Base":
        """A copy of this base in which further fields of the scenario are changed."""
        added = (*self.changes, *(f"{path}={shown(value)}" for path, value in changes.items()))
        return replace(self, changes=added, scenario=load_scenario(self.path, added))

    @property
    def jittered(self) -> list[Changes]:
        return jittered_messages(self.scenario)

    @property
    def ends(self) -> dict[str, Changes]:
        """Changes that set all step times to one end of their range. The keys are "fastest" and "slowest". Empty: the
        step times were measured on a server.
        """
        own = self.scenario.corner
        return {
            end: {"corner": {**dict.fromkeys(GROUPS, end), **own} if own else end}
            for end in ENDS
            if self.scenario.uncertain
        }

    @property
    def alone(self) -> dict[Group, list[Changes]]:
        """For each group of step times that were not measured: two changes, which set this group alone to its fastest
        and to its slowest values. Empty: there are fewer than two such groups.
        """
        groups, own = self.scenario.uncertain, self.scenario.corner or {}
        if len(groups) == 1:
            return {}
        return {group: [{"corner": {**own, group: end}} for end in ENDS] for group in groups}

    @cached_property
    def classes(self) -> list[str]:
        return sorted(set(classes_of(requests_of(self.scenario)).values()))

    @property
    def first_classes(self) -> list[str]:
        """Classes of the requests that have the highest priority."""
        priorities = self.scenario.priorities
        most = max((priorities.get(name, 0) for name in self.classes), default=0)
        return [name for name in self.classes if priorities.get(name, 0) == most]

    @property
    def other_classes(self) -> list[str]:
        """The empty name, which stands for requests without a class and is always in the list, followed by the classes
        that do not have the highest priority (first_classes).
        """
        return ["", *(name for name in self.classes if name not in self.first_classes)]

    def names(self, path: str) -> bool:
        """True if the scenario's file, or the user's changes, give a value to the field at `path`."""
        section: Any = self._data() | ({"aggregated": self.own_aggregated} if self.own_aggregated else {})
        for name in path.split("."):
            if not isinstance(section, dict) or name not in section:
                return False
            section = section[name]
        return True

    @property
    def aggregated(self) -> Changes:
        """Changes that make an aggregated cluster: the user's own, if the user's cluster is aggregated. Otherwise each
        server has the GPU type and TP size of a decode server and the prefill limits (chunk size and others) of a
        prefill server, and there are as many servers as the GPUs of all prefill and decode servers suffice for.
        """
        if self.own_aggregated is not None:
            return {"prefill": None, "decode": None, "aggregated": self.own_aggregated}
        prefill, decode = self.scenario.pair
        settings = {
            "gpu": decode.gpu,
            "tp": decode.tp,
            "instances": self.scenario.num_role_gpus // decode.tp,
            "chunked_prefill_tokens": prefill.chunked_prefill_tokens,
            "max_prefill_tokens": prefill.max_prefill_tokens,
            "long_prefill_tokens": prefill.long_prefill_tokens,
            "long_prefill_adaptive": prefill.long_prefill_adaptive,
            "chunked_media": prefill.chunked_media,
            "prefill_max_requests": prefill.prefill_max_requests,
        }
        return {"prefill": None, "decode": None, "aggregated": settings}

    @property
    def router_names(self) -> tuple[str, ...]:
        return VLLM_ROUTERS if self.scenario.engine == "vllm" else ROUTERS

    def routers(self, most_instances: int) -> dict[str, Changes]:
        """The routers to try. Keys: text to add at the end of a candidate's label, such as ", least_loaded", or "" if
        only the scenario's router is tried. Values: changes that select the router. most_instances: largest number of
        instances of a role. Only the scenario's router is tried if most_instances is 1, because all routers then act
        alike, or if the user names a router.
        """
        if most_instances == 1 or self.names("router"):
            return {"": {}}
        return {f", {router}": {"router": router} for router in self.router_names}

    def changed(self, changes: Changes) -> Scenario:
        """The scenario with these changes, checked like a scenario file. Raises ConfigError if a field or a value is
        wrong.
        """
        data = self._data()
        for field, value in changes.items():
            set_field(data, field, deepcopy(value), where=field)
        return parse_scenario(data, base=self.path.parent, where=str(self.path))

    def _data(self) -> dict[str, Any]:
        return _with_changes(self.path, self.changes)


def pace_of(times: Iterable[Hashable]) -> str:
    """Text that says when requests are sent that wait neither for a rate nor for a client. times: for each request, its
    sending time, or whatever sets this time. If all are equal, the requests are sent at once.
    """
    return "at their own times" if len(set(times)) > 1 else "all at once"


def warm_up_text(client: Client, num_requests: int) -> str:
    """Says how many of a run's first requests warm up the servers and are left out of the results. Empty: none is left
    out. client: the scenario's client, which sets this number. num_requests: all requests of the run.
    """
    count = warm_up_requests(client, num_requests)
    return f"; the first {count:,} warm up and do not count" if count else ""


def jittered_messages(scenario: Scenario) -> list[Changes]:
    """Several changes, each for one run. Each makes the latency of messages 5 % or 10 % shorter or longer (JITTERS).
    Differences between the numbers of these runs show how much depends on chance.
    """
    latency_ns = scenario.network.message_latency
    return [{"network.message_latency": f"{max(1, round(latency_ns * (1 + one)))} ns"} for one in JITTERS]


def is_sample(scenario: Scenario) -> bool:
    """True if the load is one sample of real traffic: a trace whose requests are sent in an open loop without random
    arrivals, at their recorded times or, if the trace has none, at once. All seeds then give the same load.
    """
    times, is_trace = getattr(scenario.client, "arrivals", None), hasattr(scenario.workload, "path")
    return is_trace and times is None and not isinstance(scenario.client, ClosedLoop)


def base_of(
    path: Path | None,
    options: AskOptions,
    changes: Sequence[str],
    *,
    folder: Path,
    starter: Changes,
    takes_aggregated: bool = False,
) -> Base:
    """Reads the scenario file `path`. Without a file, writes pdsim's built-in scenario with the changes `starter` into
    `folder`. `changes`, in the notation of --set, and the trace of `options` apply to either scenario.
    takes_aggregated: False: a scenario with aggregated servers is refused. Raises ConfigError if the scenario is wrong
    or refused.
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
    own_aggregated = None
    if scenario.aggregated is not None:
        if not takes_aggregated:
            raise ConfigError(
                f"{path}: questions are about prefill and decode instances, and this cluster is aggregated; "
                "`pdsim plan` compares it with clusters of prefill and decode instances"
            )
        own_aggregated = _with_changes(path, changes)["aggregated"]
        _warn_of_settings_without_pair(path, own_aggregated)
        changes = (*changes, *(f"{field}={json.dumps(value)}" for field, value in _pair_of(own_aggregated).items()))
        scenario = load_scenario(path, changes)
    if hasattr(scenario.workload, "path"):
        requests_of(scenario)  # so that its own mistakes are named as such
    return Base(path, changes, scenario, is_sample(scenario), own_aggregated, of_starter)


def _pair_of(aggregated: Changes) -> Changes:
    """Changes that replace aggregated servers by a prefill and a decode server with the same settings, except that the
    decode server keeps the default settings of its prefix cache and host cache.
    """
    fields = {name: value for name, value in aggregated.items() if name != "instances"}
    of_decode = {name: value for name, value in fields.items() if not name.startswith(("radix_cache", "host_cache"))}
    return {
        "aggregated": None,
        "prefill": {name: value for name, value in fields.items() if name in PrefillSettings.model_fields},
        "decode": {name: value for name, value in of_decode.items() if name in DecodeSettings.model_fields},
    }


def _warn_of_settings_without_pair(path: Path, aggregated: Changes) -> None:
    """Warns of those settings of aggregated servers that neither prefill nor decode servers have. path: the scenario
    file, for the message.
    """
    known = PrefillSettings.model_fields.keys() | DecodeSettings.model_fields.keys()
    if lost := [f"aggregated.{name}" for name in aggregated if name not in known]:
        names = ", ".join(lost)
        warnings.warn(
            f"{path}: {names}: prefill and decode servers have no such setting, so the plan tries them without",
            InputWarning,
            stacklevel=2,
        )


def _with_changes(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Reads a scenario file, and applies changes in the notation of --set. Returns the fields as nested dicts and
    lists, without defaults.
    """
    data: dict[str, Any] = read_yaml(path)
    for change in changes:
        apply_change(data, change)
    return data


def _trace_changes(path: Path | None) -> list[str]:
    if path is None:
        return []
    workload, has_times = workload_of_trace(path)
    made = [f"workload={json.dumps(workload)}"]
    return [*made, "client=open_loop"] if has_times else made


def trace_lines(path: Path) -> int:
    """Number of requests of a trace file, if the file has one line (in Parquet: one row) per request. A CSV file's head
    line does not count. 0 if the trace is empty, a JSON list or a folder.
    """
    if path.is_dir():
        return 0
    if is_parquet(path):
        return num_parquet_rows(path)
    with open_trace(path) as file:
        while (first := file.readline(LONGEST_LINE)).isspace():
            pass
        if not first or first.lstrip().startswith("["):
            return 0
        return sum(bool(line.strip()) for line in file) + first.lstrip().startswith("{")
