"""Shell commands by what they start, the GPUs and ports of servers, and the load that AIPerf replays."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdsim.policy.routing import CacheAware
from pdsim.scenario.build import requests_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import ServerSettings
from pdsim.scenario.sizing import roles
from pdsim.system.catalog import load_gpu
from pdsim.workload.arrivals import Poisson
from pdsim.workload.client_driver import ClosedLoop

HOST = "127.0.0.1"
GATEWAY_PORT = 8000
TRACE = "load.jsonl"
FIRST_PORT, FIRST_BOOTSTRAP_PORT = 30000, 8998

Flags = list[tuple[str, Any]]


class Place(NamedTuple):
    """Hosts and ports of a server."""

    hosts: tuple[str, ...]
    first_gpu: int
    number: int
    """Among the servers of all roles."""

    @property
    def host(self) -> str:
        """The host that answers requests."""
        return self.hosts[0]

    @property
    def port(self) -> int:
        return FIRST_PORT + self.number

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def places(scenario: Scenario) -> dict[str, list[Place]]:
    """Places by role. Hosts are filled in order; one that has another GPU, or too few left, is not used. A server that
    needs several has them to itself.
    """
    host = free = index = 0
    gpu: str | None = None
    found: dict[str, list[tuple[range, int, int]]] = {}
    for role in roles(scenario):
        servers: ServerSettings = getattr(scenario, role)
        spec = load_gpu(servers.gpu)
        for _ in range(servers.instances):
            if gpu is not None and (gpu != servers.gpu or spec.num_hosts(free + servers.num_server_gpus) > 1):
                host, free = host + 1, 0
            gpu, num_hosts = servers.gpu, spec.num_hosts(servers.num_server_gpus)
            found.setdefault(role, []).append((range(host, host + num_hosts), free, index))
            host, free, index = host + num_hosts - 1, free + servers.num_server_gpus, index + 1
    names = [HOST] if host == 0 else [f"$HOST{i}" for i in range(host + 1)]
    return {
        role: [Place(tuple(names[at] for at in hosts), gpu_id, i) for hosts, gpu_id, i in all_at]
        for role, all_at in found.items()
    }


def spanned(scenario: Scenario, role: str) -> int:
    """Hosts of one server of a role."""
    servers: ServerSettings = getattr(scenario, role)
    return load_gpu(servers.gpu).num_hosts(servers.num_server_gpus)


def one_host(tp: int, scenario: Scenario) -> str | None:
    """A rule of engines whose servers are launched on one host each."""
    spanning = {role: spanned(scenario, role) for role in roles(scenario)}
    found = [count for role, count in spanning.items() if count > 1 and getattr(scenario, role).tp == tp]
    return f"a server on {found[0]} hosts is launched by --engine sglang or kubernetes alone" if found else None


@dataclass
class Launch:
    """Shell commands by what they start, in order, and what of the scenario none of them says."""

    commands: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    manifests: dict[str, str] = field(default_factory=dict)
    """YAML by file, instead of commands."""

    def add(self, what: str, program: str, flags: Iterable[tuple[str, Any]], **environment: object) -> None:
        """A flag with True stands alone; one with None or False is not given."""
        words = [f"{name}={value}" for name, value in environment.items()] + program.split()
        for name, value in flags:
            if value is not None and value is not False:
                values = [] if value is True else value if isinstance(value, list) else [value]
                words += [f"--{name}", *map(str, values)]
        self.commands[what] = " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word in which the shell still sees variables."""
    if "$" not in word:
        return shlex.quote(word)
    return word if shlex.quote(word.replace("$", "")) == word.replace("$", "") else f'"{word}"'


def thresholds(policy: CacheAware) -> dict[str, float]:
    """Flags of a router's cache_aware, in SGLang's gateway and in vLLM's alike, where they are not its defaults."""
    names = {
        "cache-threshold": "match_threshold",
        "balance-abs-threshold": "balance_abs_threshold",
        "balance-rel-threshold": "balance_rel_threshold",
    }
    given = {flag: (getattr(policy, name), getattr(CacheAware, name)) for flag, name in names.items()}
    return {flag: value for flag, (value, default) in given.items() if value != default}


def pace(client: Any) -> Flags:
    """Flags of a load generator; none for arrivals that not all of them can send."""
    if isinstance(client, ClosedLoop):
        return [("max-concurrency", client.concurrency)]
    return [("request-rate", client.arrivals.rate_per_s)] if isinstance(client.arrivals, Poisson) else []


def add_replay(made: Launch, scenario: Scenario, source: str, model: str) -> None:
    """Adds the export of the requests with their times, and AIPerf, which sends them (its docs/cli_options.md)."""
    made.add("trace", f"pdsim export {source}", [("to", "mooncake"), ("out", TRACE)])
    client = scenario.client
    if isinstance(client, ClosedLoop):
        times: Flags = [("concurrency", client.concurrency), ("request-count", len(requests_of(scenario)))]
    else:
        times = [("fixed-schedule", True), ("fixed-schedule-auto-offset", True)]
    flags = [
        ("model", model),
        ("url", f"http://{HOST}:{GATEWAY_PORT}"),
        ("endpoint-type", "completions"),
        ("streaming", True),
        ("input-file", TRACE),
        ("custom-dataset-type", "mooncake_trace"),
        *times,
        ("extra-inputs", "ignore_eos:true"),
        ("random-seed", scenario.seed),
        ("output-artifact-dir", scenario.name),
    ]
    made.add("load", "aiperf profile", flags)
