"""Commands, places of servers on hosts, and rules on the fields that a command can express. The launches of all engines
use them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, is_dataclass
from typing import Any, NamedTuple

from pdsim.dataclass import dataclass
from pdsim.launch.words import Expanded, Flags, command_words, shell_line
from pdsim.policy.routing import CacheAware
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.building.sizing import resolve, roles
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.component import component_name, settings_of
from pdsim.scenario.sections.faults import HealthSettings
from pdsim.scenario.sections.fields import Section
from pdsim.scenario.sections.servers import ServerSettings, Split
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model
from pdsim.workload.client import ClosedLoop, Poisson, warm_up_requests

HOST = "127.0.0.1"
GATEWAY_PORT = 8000
TRACE = "load.jsonl"
LOAD, AIPERF = ("aiperf", "profile"), "0.13.0"
"""The command that replays a trace, and the release of AIPerf whose flags are used."""
FIRST_PORT, FIRST_BOOTSTRAP_PORT = 30000, 8998


class Place(NamedTuple):
    """Where a server or an encode instance runs."""

    hosts: tuple[Expanded, ...]
    """Addresses of the hosts of the server or encode instance. The first host takes its requests. Each address may be a
    shell variable, such as $HOST0.
    """
    first_gpu: int
    """Index of the first GPU that the server or encode instance uses on each of its hosts."""
    number: int
    """Number of the server or encode instance among all servers and encode instances of the cluster, from 0."""

    @property
    def host(self) -> Expanded:
        """Address of the server's first host, which answers requests."""
        return self.hosts[0]

    @property
    def port(self) -> int:
        return FIRST_PORT + self.number

    @property
    def url(self) -> Expanded:
        return Expanded(f"http://{self.host}:{self.port}")


def places(scenario: Scenario) -> dict[str, list[Place]]:
    """Where each server and each encode instance runs, by role. Hosts are filled one after another; a host with another
    GPU, or with too few free GPUs, is skipped. If a server spans several hosts, no other server runs on them.
    """
    host = free = index = 0
    gpu: str | None = None
    found: dict[str, list[tuple[range, int, int]]] = {}
    groups: dict[str, tuple[str, int, int]] = {}
    for one, servers in scenario.roles.items():
        groups[one] = servers.gpu, servers.instances, servers.num_server_gpus
    if (encode := scenario.encode) is not None:
        groups["encode"] = encode.gpu, encode.instances, 1
    for role, (own, instances, num_gpus) in groups.items():
        spec = load_gpu(own)
        for _ in range(instances):
            if gpu is not None and (gpu != own or spec.num_hosts(free + num_gpus) > 1):
                host, free = host + 1, 0
            gpu, num_hosts = own, spec.num_hosts(num_gpus)
            found.setdefault(role, []).append((range(host, host + num_hosts), free, index))
            host, free, index = host + num_hosts - 1, free + num_gpus, index + 1
    names = [HOST] if host == 0 else [f"$HOST{i}" for i in range(host + 1)]
    return {
        role: [Place(tuple(Expanded(names[at]) for at in hosts), gpu_id, i) for hosts, gpu_id, i in all_at]
        for role, all_at in found.items()
    }


def spanned(scenario: Scenario, role: str) -> int:
    """Number of hosts on which one server of a role runs."""
    servers: ServerSettings = getattr(scenario, role)
    return load_gpu(servers.gpu).num_hosts(servers.num_server_gpus)


def one_host(tp: int, scenario: Scenario) -> str | None:
    """Check of `tp` for engines that pdsim launches on one host per server. Returns the reason for a refusal if a
    server with this tp spans several hosts. None: each such server fits on a host.
    """
    spanning = {role: spanned(scenario, role) for role in roles(scenario)}
    found = [count for role, count in spanning.items() if count > 1 and getattr(scenario, role).tp == tp]
    return f"a server on {found[0]} hosts is launched by --engine sglang, vllm or kubernetes only" if found else None


@dataclass
class Launch:
    """Commands and notes with which a user starts a cluster.

    commands: shell commands, in the order in which a user runs them. Keys: names of the started processes, such as
    prefill-0, gateway or load. notes: texts for the user, such as the servers of each role and the fields that no
    command expresses.
    """

    commands: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    manifests: dict[str, str] = field(default_factory=dict)
    """Text of YAML manifests for Kubernetes, by file name. With the engine kubernetes, manifests start the cluster, and
    commands at most send the load. With Dynamo, graph.yaml starts the frontend and workers instead of their commands.
    Empty: the engine has no manifests.
    """
    hosts: set[str] = field(default_factory=set)
    """Names of variables that stand for addresses of hosts in the commands. The user must set them."""

    def add(self, what: str, program: Sequence[str], flags: Iterable[tuple[str, Any]], **environment: object) -> None:
        """Adds a shell command. what: name of the process that the command starts; `commands` has the command under
        this name. program: first arguments of the command, such as the executable. flags: pairs of an option and its
        value (see `command_words`). environment: environment variables of the command.
        """
        words = command_words(program, flags)
        self.commands[what] = shell_line(words, environment)
        for word in (*words, *environment.values()):
            if isinstance(word, Expanded):
                self.hosts.update(re.findall(r"\$HOST\d+", word))


THRESHOLDS = {
    "cache-threshold": "match_threshold",
    "balance-abs-threshold": "balance_abs_threshold",
    "balance-rel-threshold": "balance_rel_threshold",
}
"""Settings of the policy cache_aware, by the router's option for each."""


def thresholds(policy: CacheAware) -> dict[str, float]:
    """Options of a router for the settings of cache_aware that differ from the defaults. SGLang's gateway and vLLM's
    router have the same options.
    """
    given = {flag: (getattr(policy, name), getattr(CacheAware, name)) for flag, name in THRESHOLDS.items()}
    return {flag: value for flag, (value, default) in given.items() if value != default}


def pace(client: Any) -> Flags:
    """Options with which a load generator sends requests like the scenario's client: at its mean rate, or with its
    number of requests in flight. client: an open or a closed loop. Empty: the client is an open loop without Poisson
    arrivals, or a closed loop with a ramp, for which not every load generator has options.
    """
    if isinstance(client, ClosedLoop):
        return [("max-concurrency", client.concurrency)] if client.ramp_ns is None else []
    return [("request-rate", client.arrivals.rate_per_s)] if isinstance(client.arrivals, Poisson) else []


def add_replay(made: Launch, scenario: Scenario, source: Sequence[str], model: str) -> None:
    """Adds two commands to `made`. The first exports the scenario's requests and their send times as a trace. The
    second lets AIPerf send the trace (options: AIPerf's docs/cli_options.md). source: words of a command line that name
    the scenario's file. model: name or path by which the engine finds the model.
    """
    made.add("trace", ["pdsim", "export", *source], [("to", "mooncake"), ("out", TRACE)])
    made.add("load", LOAD, replay_flags(scenario, model, f"http://{HOST}:{GATEWAY_PORT}", TRACE))


def replay_flags(scenario: Scenario, model: str, url: str, trace: str) -> Flags:
    """Options with which AIPerf sends a Mooncake trace. model: name of the model for the server. url: address of the
    server. trace: path of the trace's file.
    """
    client = scenario.client
    if isinstance(client, ClosedLoop):
        ramp = [] if client.ramp_ns is None else [("concurrency-ramp-duration", client.ramp_ns / 1e9)]
        times: Flags = [("concurrency", client.concurrency), *ramp, ("request-count", len(requests_of(scenario)))]
    else:
        times = [("fixed-schedule", True), ("fixed-schedule-auto-offset", True)]
    return [
        ("model", model),
        ("url", url),
        ("endpoint-type", "completions"),
        ("streaming", True),
        ("input-file", trace),
        ("custom-dataset-type", "mooncake_trace"),
        *times,
        ("extra-inputs", "ignore_eos:true"),
        ("random-seed", scenario.seed),
        ("output-artifact-dir", scenario.name),
    ]


ROLES = ("prefill", "decode", "aggregated")


class Aside(str):
    """The reason why a launch ignores a field. If the field has not its default value, the launch shows the reason as a
    note.
    """

    __slots__ = ()


Check = Callable[[Any, Scenario], str | None]
Rule = Check | Aside | str | None
"""What a launch does with a field. None: commands express it. Aside: the launch ignores the field, and adds a note if
its value is not the default. Text: the launch refuses any other value than the default; the text says why, and what is
possible. Check: a function of the value and the scenario. It returns None if commands express the value, otherwise the
reason for a refusal.
"""
DRIVES: dict[str, Rule] = {
    f"storage.{name}": Aside("the real cluster has its own drives and links")
    for name in ("drives", "size", "read_bandwidth", "write_bandwidth", "io_limit", "client_bandwidth", "latency")
}

TIMES = Aside("the real cluster has its own times and shares")
_OF_PAIRS = Aside("an aggregated cluster has one policy of routing and no transfers")
_DRAFTS = Aside("the draft model decides drafting and acceptance")
_OF_DRAFTS = ("accept_length", "draft_model", "draft_layers", "draft_vocabulary", "drafting")
_SAID = (
    *("name", "seed", "model", "context_tokens", "page_size", *ROLES, "cost.graph_sizes", "workload", "client"),
    *("*.instances", "*.gpu", "*.tp", "*.dp", "*.ep", "*.mem_fraction", "*.pool_tokens", "*.radix_cache"),
    *("*.redundant_experts", "*.max_running_requests", "*.chunked_prefill_tokens", "*.overlap", "*.attention_backend"),
    *("checkpoint", "*.moe_a2a_backend"),
    *("*.load_balance_method", "*.mamba_radix_cache_strategy", "*.mamba_track_interval"),
    *("*.speculative_algorithm", "*.speculative_num_steps", "*.speculative_eagle_topk", "*.speculative_draft_tokens"),
)


def _only_resolved(role: str, name: str) -> Check:
    """Makes the rule of other engines for a field that only SGLang's servers have. The rule accepts None and the value
    that pdsim fills in by itself, which the scenario of a run folder has, and refuses all other values.
    """

    def refusal(value: Any, scenario: Scenario) -> str | None:
        unset = scenario.model_copy(update={role: getattr(scenario, role).model_copy(update={name: None})})
        is_resolved = value in (None, getattr(getattr(resolve(unset), role), name))
        return None if is_resolved else "only SGLang has this setting; leave it out"

    return refusal


def _only_with_faults(value: Any, scenario: Scenario) -> str | None:
    """The rule of other engines for `health`, which only SGLang has. The rule accepts None and, in a scenario with
    faults, the defaults, which pdsim fills in by itself, so that the scenario of a run folder has them.
    """
    is_resolved = value is None or (scenario.faults and value == HealthSettings())
    return None if is_resolved else "only SGLang has these settings; leave them out"


RULES: dict[str, Rule] = {
    "engine_version": Aside("a server follows the rules of the release that is installed"),
    "ignore_eos": Aside("the load sends ignore_eos, so that outputs are as long as the scenario says"),
    **dict.fromkeys(_SAID),
    **dict.fromkeys(("decode.retraction_backup", "network", "cost", "corner", "front_end"), TIMES),
    **dict.fromkeys((f"*.speculative_{name}" for name in _OF_DRAFTS), _DRAFTS),
    **dict.fromkeys(("router.prefill.seed", "router.decode.seed"), Aside("the router draws its own random numbers")),
    "description": Aside("for readers"),
    "router.counts": Aside("a gateway counts requests in its own way"),
    "*.expert_skew": Aside("a property of the load"),
    "network.staging": "only SGLang has a staging buffer; leave it out",
    "decode.returns_kv": "KV is returned in simulation only; leave it out",
    "elastic": "servers change their roles in simulation only; leave it out",
    "router.disaggregation": "pdsim launches no router that sends prompts to decode (llm-d's, Dynamo's); leave it out",
    "encode": "only --engine sglang and vllm launch encode instances; leave it out",
    "workload.images": "only --engine sglang and vllm launch loads with images; leave them out",
    "workload.audio_clips": "the benchmarks that are launched send no audio clips; leave them out",
    "faults": Aside("simulated failures have no flags"),
    "health": _only_with_faults,
    "prefill.optimistic_attempts": _only_resolved("prefill", "optimistic_attempts"),
    "decode.extra_slots": _only_resolved("decode", "extra_slots"),
}
"""Rules of fields, by path, for engines without a rule of their own for the field. In paths, * stands for any role. A
rule of a section also holds for fields in it that have no rule (_nearest has the exceptions).
"""


class Leaf(NamedTuple):
    path: str
    """Dotted path of the field, such as decode.admission."""
    value: Any
    """Value of the field. If the value is a component, such as a policy or a workload: the component's name."""
    is_default: bool
    """True: the field has its default value. For a section or a component: the default has the same type; the fields
    inside are leaves of their own.
    """


def leaves(section: Section, path: str = "") -> Iterator[Leaf]:
    """Yields the fields of a section, each with its path, its value and whether it has its default. If a field's value
    is a section or a component (a policy, cost model, workload or client), the field itself comes first, then the
    fields or settings of its value. The value of a component's field is the component's name.
    """
    for name, info in type(section).model_fields.items():
        value, default = getattr(section, name), info.get_default(call_default_factory=True)
        where = f"{path}.{name}" if path else name
        if isinstance(value, Section):
            yield Leaf(where, value, default is not None and type(default) is type(value))
            yield from leaves(value, where)
        elif is_dataclass(value):
            yield from _of_component(value, where, is_default=type(default) is type(value))
        else:
            yield Leaf(where, value, value == default)


def _of_component(component: Any, path: str, *, is_default: bool) -> Iterator[Leaf]:
    yield Leaf(path, component_name(component), is_default)
    kind: Any = type(component)
    for setting, name, _ in settings_of(kind):
        value = getattr(component, setting.name)
        if is_dataclass(value):
            yield from _of_component(value, f"{path}.{name}", is_default=False)
        else:
            yield Leaf(f"{path}.{name}", value, setting.default is not MISSING and value == setting.default)


def notes_on(scenario: Scenario, engine: str, rules: Mapping[str, Rule]) -> list[str]:
    """Notes on the servers of each role and the encode instances, on warm-up requests (if there are any), and on
    ignored fields that have not their default: one note per reason. engine: name of the engine in messages. rules: the
    engine's rules by field, which replace those in RULES. Raises ConfigError, which lists all fields that the engine
    cannot express.
    """
    rules = {**RULES, **rules}
    refused: list[str] = []
    aside: dict[str, list[str]] = {}
    for leaf in leaves(scenario):
        is_of_pairs = scenario.aggregated is not None and leaf.path.startswith(("router.decode", "network"))
        rule = _OF_PAIRS if is_of_pairs else _nearest(rules, leaf.path, f"{engine} has no such setting; leave it out")
        if isinstance(rule, Aside):
            if not leaf.is_default:
                aside.setdefault(rule, []).append(leaf.path)
        elif words := rule(leaf.value, scenario) if callable(rule) else None if leaf.is_default else rule:
            refused.append(f"{leaf.path}: {_as_given(scenario, leaf.path)}: {words}")
    if refused:
        raise ConfigError(f"--engine {engine} cannot launch {scenario.name}:\n  " + "\n  ".join(refused))
    ignored = [f"{', '.join(_outermost(paths))}: {why}" for why, paths in aside.items()]
    return [*_servers(scenario), *_warm_up_note(scenario), *ignored]


def _as_given(scenario: Scenario, path: str) -> Any:
    """The value of a field as a file would give it, with its unit. If the field names a policy, a load or another
    exchangeable part: the name.
    """
    found: Any = scenario.model_dump()
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else found  # a short form, such as 5 for a fixed length
    return found.get("use", "given") if isinstance(found, dict) else found


def _outermost(paths: Sequence[str]) -> list[str]:
    """Those of the paths that do not lie inside another of them."""
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _warm_up_note(scenario: Scenario) -> list[str]:
    """A note that the simulation leaves out warm-up requests, while load generators count them, so that their numbers
    differ. Empty: the simulation leaves out none.
    """
    count = warm_up_requests(scenario.client, len(requests_of(scenario)))
    if not count:
        return []
    ramp = getattr(scenario.client, "ramp_ns", None)
    at_start = "at once" if ramp is None else "as their number rises"
    simulated = f"the simulation leaves out the first {count:,} requests, which clients send {at_start}"
    return [f"client: {simulated}; load generators count them, as does --set client.warm_up_requests=0"]


def _servers(scenario: Scenario) -> list[str]:
    found = [
        f"{role}: instances {servers.instances}, {_sizes(servers.split)}, gpu {servers.gpu}"
        for role, servers in scenario.roles.items()
    ]
    if (encode := scenario.encode) is not None:
        found.append(f"encode: instances {encode.instances}, one GPU each, gpu {encode.gpu}")
    return found


def _sizes(split: Split) -> str:
    return ", ".join(f"{name} {size}" for name, size in split._asdict().items() if size > 1 or name == "tp")


def _nearest(rules: Mapping[str, Rule], path: str, missing: str) -> Rule:
    """The rule of the field at `path`, or of the innermost section around the field that has a rule. Rules that are
    functions apply to their own field only. missing: the rule if none is found.
    """
    inner = path
    while inner:
        role, dot, rest = inner.partition(".")
        for key in (inner, f"*.{rest}" if dot and role in ROLES else inner):
            if key in rules and (inner == path or not callable(rules[key])) and (inner == path or key not in ROLES):
                return rules[key]
        inner = inner.rpartition(".")[0]
    return missing


def one_of(names: Iterable[str], who: str) -> Check:
    known = tuple(names)
    return lambda value, _: None if value in known else f"{who} has {', '.join(known)}"


def weights(value: Any, scenario: Scenario) -> str | None:
    """Check of weight_dtype: the reason for a refusal, or None. Engines can cast a checkpoint to fp8 while they load it
    (--quantization fp8); other types need another checkpoint. value: of this field in the scenario.
    """
    if value in (None, "fp8", load_model(scenario.model).weight_dtype):
        return None
    return "an engine takes the checkpoint's weights, or fp8; leave it out and give --model-path of such a checkpoint"


def kv_cache_dtype(scenario: Scenario, names: Mapping[str, str], bf16: str) -> str | None:
    """Value of --kv-cache-dtype. None: the engine has no name for the scenario's KV type. names: the engine's names of
    KV types. bf16: the value for KV in bf16 if the checkpoint names another KV type, because the engine would use that
    type with `auto`.
    """
    is_other = scenario.kv_dtype == "bf16" and load_model(scenario.model).kv_dtype not in (None, "bf16")
    return bf16 if is_other else names.get(scenario.kv_dtype)


def quantization(scenario: Scenario) -> str | None:
    """Value of --quantization. None: the weights are those of the checkpoint."""
    is_other = scenario.weight_dtype == "fp8" and load_model(scenario.model).weight_dtype != "fp8"
    return "fp8" if is_other else None
