"""Imports a deployment as a scenario in plain data, with lists of what was read, ignored and assumed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.formats.deployments import encoders, trtllm
from pdsim.formats.deployments.environment import of_environment, of_hold, of_host_memory
from pdsim.formats.deployments.flags import read_flags
from pdsim.formats.deployments.loads import is_beside, load_beside, load_of
from pdsim.formats.deployments.measured_fields import take_measured_fields, with_measured_fields
from pdsim.formats.deployments.names import gpu_named, model_named, model_of, noted_gpus
from pdsim.formats.deployments.processes import Process, merged, read_processes
from pdsim.formats.deployments.readers import Read, Value, difference, differences, parsed
from pdsim.formats.deployments.routers import router_of
from pdsim.inputs import parse_yaml, read_text
from pdsim.scenario.loading import apply_change
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.servers import AggregatedSettings, DecodeSettings, PrefillSettings, ServerSettings
from pdsim.scenario.starter import starting_point
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.catalog import load_gpu, load_model

_SERVERS = ("sglang", "vllm", "dynamo.sglang", "dynamo.vllm", *trtllm.PROGRAMS)
_TP_FLAGS = {"tp", "tp-size", "tensor-parallel-size"}
_USUAL_GPU = "h100"
_HEAD = 5000
"""Number of characters, from the beginning of a manifest, in which its version is looked for."""


@dataclass
class Imported:
    """A scenario that was made of a deployment, as plain data (`data`). understood: texts on options that were read.
    aside: texts on options that were ignored. assumed: texts on assumptions.
    """

    data: dict[str, Any] = field(default_factory=dict)
    understood: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    withheld: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of speculative decoding and HiSparse, by role. The scenario lacks them until the user gives the number of
    tokens that a step accepts, or the rate of misses, which a deployment does not have."""

    def take(self, path: str, value: Any) -> None:
        """Sets a field of the scenario, by its dotted path."""
        inner = self.data
        *outer, last = path.split(".")
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = value


@dataclass
class _Server:
    process: Process
    read: Read
    model: str
    checkpoint: str | None
    role: str | None
    port: str


def import_deployment(paths: Sequence[Path], *, model: str | None = None, gpu: str | None = None) -> Imported:
    """Imports a deployment from files, or from all files of folders. Returns the scenario, with lists of what was read,
    ignored and assumed. model, gpu: names in the catalog. model None: the deployment must name a model. gpu None: the
    GPU that the deployment names, or else an H100. Raises ConfigError if the files start no server, name no known model
    or give a wrong value, or if one scenario cannot describe all servers; InputError if a file cannot be read.
    """
    files = list(_files(paths))
    beside = [path for path in files if is_beside(path) and not _is_manifest(path)]
    commands = [path for path in files if path.suffix != ".txt" and path not in beside]
    processes = list(_processes(commands))
    found = Imported()
    told = trtllm.roles_of(processes)
    found.aside += told.aside
    started = [one for one in merged(processes) if one.program in _SERVERS and one.replicas]
    found.assumed += [f"{one.where}: {one.note}" for one in started if one.note]
    servers = _chosen([_read(process, told.of_ports) for process in started], found)
    encode = encoders.taken([one.read for one in servers])
    encoding = [one for one in servers if one.role == "encode"]
    servers = [one for one in servers if one.role != "encode"]
    ports = {one.port for one in servers}
    if any(port in told.of_ports for port in ports) or not any(one.role for one in servers):
        unknown = (f"{role} at port {port}" for port, role in told.of_ports.items() if port not in ports)
        found.aside += [f"{server}: the files do not start it" for server in unknown]
    if not servers:
        raise ConfigError(f"{', '.join(map(str, paths))}: the files start no server of SGLang, vLLM or TensorRT-LLM")
    _take_model(found, servers, model)
    by_role = _by_role(servers, found)
    notes = noted_gpus(read_text(path) for path in files if path.suffix == ".txt")
    for role, group in by_role.items():
        _take_role(found, role, group, gpu or notes.get(role))
    _take_encoders(found, encoding, encode, gpu or notes.get("encode"))
    for one in servers:
        for path, value in of_environment(one.process.variables, found.data.get("network", {})).items():
            found.take(path, value)
    if len(by_role) > 1 and "transport" not in found.data.get("network", {}):
        _take_usual_transport(found, servers)
    if routers := {role: policy for role, policy in told.routers.items() if role == "prefill" or len(by_role) > 1}:
        found.data["router"] = routers
    else:
        _take_router(found, processes, is_pair=len(by_role) > 1)
    if beside:
        load, assumed = load_beside(beside[0])
        found.data |= load
        found.assumed += [assumed] if assumed else []
        found.understood.append(f"load of {beside[0]}")
        found.aside += [f"{path}: only one load is read" for path in beside[1:]]
    else:
        _take_load(found, processes)
    found.data = _in_order(found.data)
    return found


def _processes(files: Sequence[Path]) -> Iterator[Process]:
    """Yields the processes that the files start. A configuration file of `trtllm-serve disaggregated` describes several
    servers; the file is read where a command names it, or by itself if no file has commands.
    """
    read = [(path, read_processes(path, files)) for path in files]
    has_commands = any(processes for _, processes in read)
    started = trtllm.started_by([(path.parent, one) for path, processes in read for one in processes])
    for path, processes in read:
        for process in processes:
            is_trtllm = process.program in trtllm.PROGRAMS
            yield from trtllm.expanded(process, path.parent, started) if is_trtllm else [process]
        if not has_commands and path.suffix in (".yaml", ".yml"):
            yield from trtllm.of_orchestrator_file(parse_yaml(read_text(path), str(path)), str(path))


def _take_usual_transport(found: Imported, servers: Sequence[_Server]) -> None:
    transport = "mooncake-rdma" if found.data["engine"] == "sglang" else "nixl-rdma"
    found.take("network.transport", transport)
    program = servers[0].process.program
    found.assumed.append(f"network.transport: {transport}: the default of {program}, because no flag names another")


def _in_order(data: dict[str, Any]) -> dict[str, Any]:
    """The data with its sections in the order of the scenario's fields."""
    order = list(Scenario.model_fields)
    return dict(sorted(data.items(), key=lambda item: order.index(item[0])))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist")
        yield from sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]


def _is_manifest(path: Path) -> bool:
    return path.suffix == ".json" and '"apiVersion"' in read_text(path)[:_HEAD]


_GRAPH = "graph.yaml"
"""Name of the manifest that `pdsim launch` writes beside scripts of the same servers."""


def _chosen(servers: Sequence[_Server], found: Imported) -> Sequence[_Server]:
    """Returns the servers. If scripts and a graph.yaml start the same servers, as files of `pdsim launch` do, returns
    only the servers of the scripts, and adds a note to `found`. Raises ConfigError if the two start different servers.
    """
    scripts = [one for one in servers if ".sh, line" in one.process.where]
    others = [one for one in servers if one not in scripts]
    if not scripts or not others or not all(_GRAPH in one.process.where for one in others):
        return servers
    if differs := _difference(others, scripts):
        graph = others[0].process.where.partition(_GRAPH)[0] + _GRAPH
        said = f"starts other servers than the scripts beside it: {differs}"
        raise ConfigError(f"{graph}: {said}; give the scripts or {_GRAPH}")
    found.aside.append(f"{_GRAPH}: the same as the scripts beside it")
    return scripts


def _difference(others: Sequence[_Server], scripts: Sequence[_Server]) -> str:
    """Names the first difference between servers of graph.yaml (others) and of scripts. Empty: they are the same."""
    roles = dict.fromkeys(one.role for one in (*others, *scripts))
    for role in roles:
        theirs, ours = ([one for one in servers if one.role == role] for servers in (others, scripts))
        counts = [sum(one.process.replicas for one in servers) for servers in (theirs, ours)]
        if counts[0] != counts[1]:
            return f"number of {role or 'aggregated'} servers: {counts[0]} instead of {counts[1]}"
        more, fewer = _numbers(theirs), _numbers(ours)
        if more == fewer:
            continue
        one = next(one for one in theirs if more[_settings(one)] > fewer[_settings(one)])
        other = next(one for one in ours if more[_settings(one)] < fewer[_settings(one)])
        pairs = [(f"{role or 'aggregated'}: {text}", beside) for text, beside in differences(one.read, other.read)]
        pairs = [(one.process.program, other.process.program), (one.model, other.model), *pairs]
        return next((f"{text} instead of {beside}" for text, beside in pairs if text != beside), "other settings")
    return ""


def _numbers(servers: Sequence[_Server]) -> Counter[str]:
    """Numbers of equal servers. Keys: text of the program, model and settings of these servers."""
    numbers = Counter[str]()
    for one in servers:
        numbers[_settings(one)] += one.process.replicas
    return numbers


def _settings(server: _Server) -> str:
    settings = [sorted(fields.items()) for fields in (server.read.server, server.read.common)]
    return repr((server.process.program, server.model, settings))


def _read(process: Process, of_ports: Mapping[str, str]) -> _Server:
    """Reads the options of a server. of_ports: role of the server at each port, as an orchestrator's file gives it."""
    alone, flags = parsed(process.words)
    sizes: dict[str, Value] = {name: str(size) for name, size in process.parallel.items() if name not in flags}
    try:
        read = read_flags(process.program, {**sizes, **flags})
    except ValueError as wrong:
        raise ConfigError(f"{process.where}: {wrong}") from None
    names = model_of(alone, flags)
    port = str(flags.get("port", ""))
    role = read.server.pop("role", None) or of_ports.get(port) or process.role
    return _Server(process, read, *names, role if role in ("prefill", "decode", "encode") else None, port)


def _take_model(found: Imported, servers: Sequence[_Server], given: str | None) -> None:
    names = dict.fromkeys(one.model for one in servers if one.model)
    if given is None and not names:
        raise ConfigError("no server says its model: give --model NAME")
    if len(names) > 1:
        found.aside.append(f"models that are ignored, because a scenario has one: {', '.join(list(names)[1:])}")
    loaded = next((one.checkpoint for one in servers if one.checkpoint), given)
    if given is not None:
        found.data |= {"model": given} | ({} if loaded == given else {"checkpoint": loaded})
        return
    name, dtype, assumed = model_named(next(iter(names)))
    found.data |= {"model": name} | ({} if loaded in (name, None) else {"checkpoint": loaded})
    found.understood.append(f"model {next(iter(names))}")
    found.assumed += [assumed] if assumed else []
    if dtype is not None and load_model(name).weight_dtype != dtype:
        found.data["weight_dtype"] = dtype


def _by_role(servers: Sequence[_Server], found: Imported) -> dict[str, list[_Server]]:
    """Returns the servers by role, and sets the engine in `found`. If a server is for prefill, all servers that are not
    for prefill count as decode; otherwise all servers are aggregated. Raises ConfigError if engines differ, or if no
    server is left for decode.
    """
    engines = {one.process.program.removeprefix("dynamo.") for one in servers}
    if len(engines) > 1:
        raise ConfigError(f"servers of {' and '.join(sorted(engines))}: pdsim simulates one engine at a time")
    engine = found.data["engine"] = engines.pop()
    if engine == "trtllm":
        found.data["engine"] = "vllm"
        found.assumed.append("engine: vllm: its scheduler stands for TensorRT-LLM's, which pdsim does not model")
    if not any(one.role == "prefill" for one in servers):
        return {"aggregated": list(servers)}
    prefill = [one for one in servers if one.role == "prefill"]
    decode = [one for one in servers if one.role != "prefill"]
    if not decode:
        raise ConfigError("servers of prefill, and none of decode: give the files of both")
    return {"prefill": prefill, "decode": decode}


def _take_role(found: Imported, role: str, group: Sequence[_Server], gpu: str | None) -> None:
    first = group[0]
    if first.process.program in trtllm.PROGRAMS:
        trtllm.finish(first.read, role)
    fields, copies = server_fields(first, role, found)
    differing = [(one.process.where, text) for one in group[1:] if (text := difference(one.read, first.read))]
    found.aside += [f"{where}: {text}, because the first server stands for all" for where, text in differing]
    instances = sum(one.process.replicas for one in group) * copies
    label = first.process.gpu
    named = gpu or (gpu_named(label) if label else None)
    if named is None:
        said = f"{label} is not in the catalog" if label else "no file names it"
        found.assumed.append(f"{role}.gpu: {_USUAL_GPU}: {said}; --gpu NAME sets it")
    found.data[role] = {"instances": instances, "gpu": named or _USUAL_GPU, **fields}
    if fields.get("dp", 1) > 1 and fields["tp"] > load_gpu(found.data[role]["gpu"]).gpus_per_server:
        found.data[role].setdefault("moe_a2a_backend", "none")  # the engines' default; that of scenarios is deepep
    if (share := found.data[role].pop("free_fraction", None)) is not None and "pool_tokens" not in fields:
        found.data[role]["mem_fraction"] = trtllm.share_of_all_memory(share, found.data, found.data[role], first.read)
        found.assumed.append(f"{role}.mem_fraction: {share:g} of the memory that the weights leave free")
    found.understood.append(f"{role}: {instances} of {' '.join(first.read.understood)}")
    found.aside += [f"{role}: {flag}" for flag in first.read.aside]
    found.assumed += [one for one in first.read.assumed if one not in found.assumed]
    for path, value in first.read.common.items():
        found.take(path, value)


def _take_encoders(found: Imported, group: Sequence[_Server], given: Mapping[str, Any], gpu: str | None) -> None:
    num_instances = sum(one.process.replicas * one.read.server.get("dp", 1) for one in group)
    variables = group[0].process.variables if group else {}
    section = encoders.encode_section(given, num_instances, variables, found.assumed)
    if not section:
        return
    label = group[0].process.gpu if group else None
    named = gpu or (gpu_named(label) if label else None)
    if named is None:
        named = found.data["prefill" if "prefill" in found.data else "aggregated"]["gpu"]
        found.assumed.append(f"encode.gpu: {named}: as the servers that compute prompts; no file names another")
    found.data["encode"] = {"gpu": named, **section}
    if group and "rank_chunk_tokens" in group[0].read.server:  # vLLM's
        found.data["encode"]["step_tokens"] = group[0].read.server["rank_chunk_tokens"]
    if any(one.read.server.get("tp", 1) > 1 for one in group):
        found.assumed.append("encode: one GPU each: pdsim does not divide an encode instance over several")
    if group:
        found.understood.append(f"encode: {num_instances} of {' '.join(group[0].read.understood)}")
        found.aside += [f"encode: {flag}" for flag in group[0].read.aside]


def server_fields(server: _Server, role: str, found: Imported) -> tuple[dict[str, Any], int]:
    """Returns (fields of the section of `role` that follow from a server's options, number of servers that the server's
    process starts). found: the scenario so far, to which assumptions are added.
    """
    given = dict(server.read.server)
    is_vllm = found.data["engine"] == "vllm"
    dp, copies = given.pop("dp", 1), 1
    if _TP_FLAGS & server.read.unknown and server.process.gpus:
        given["tp"] = max(1, server.process.gpus * server.process.hosts // (dp if is_vllm else 1))
        found.assumed.append(f"{role}.tp: the number of GPUs of its pods")
    tp = given.pop("tp", 1) * (dp if is_vllm else 1)
    has_dp_attention = given.pop("dp_attention", False)
    if not is_vllm and dp > 1 and not has_dp_attention:
        dp, copies = 1, dp
    if given.get("pp", 1) > 1 and is_vllm and (dp > 1 or role == "decode"):
        stages = given.pop("pp")
        tp *= stages
        beside = f"beside vLLM's dp {dp}" if dp > 1 else "on vLLM's decode servers"
        found.assumed.append(
            f"{role}.tp: {tp}: its {stages} pipeline stages count as tp: pdsim does not model stages {beside}"
        )
    fields: dict[str, Any] = {"tp": tp, **({"dp": dp} if dp > 1 else {})}
    has_experts = load_model(found.data["model"]).experts is not None
    _take_experts(given, fields, server.read.aside, is_vllm=is_vllm, has_experts=has_experts)
    if (chunk := given.pop("rank_chunk_tokens", None)) is not None:
        fields["chunked_prefill_tokens"] = chunk * dp
    if (blocks := given.pop("num_blocks", None)) is not None:
        given["pool_tokens"] = blocks * server.read.common.get("page_size", 16)
    if "pool_tokens" in given:  # of one GPU
        given["pool_tokens"] *= given.get("dcp", 1)
    if is_vllm and "max_running_requests" in given:
        given["max_running_requests"] *= dp
    if given.pop("has_priorities", False):
        server.read.aside.append("priorities: the load sets classes and their priorities")
    if withheld := take_measured_fields(given, server.read, role):
        found.withheld[role] = withheld
    given.pop("has_connector", None)
    common = {} if role == "decode" else server.read.common
    host_memory = of_host_memory(given, dp / tp, server.process.variables, server.read.aside, common)
    if host_memory and role == "decode":
        server.read.aside.append("host memory: vLLM's decode reads all KV from prefill")
    else:
        fields |= host_memory
    if role == "prefill":
        fields |= of_hold(server.process.variables) if is_vllm else {}
        given.pop("stream_interval", None)  # clients read decode's stream
    for name in [name for name in given if name not in (*_FIELDS[role], "free_fraction")]:
        server.read.aside.append(f"{name}: {role} has no such field")
        del given[name]
    return {**fields, **given}, copies


def _take_experts(
    given: dict[str, Any], fields: dict[str, Any], aside: list[str], *, is_vllm: bool, has_experts: bool
) -> None:
    """Sets `ep` in `fields`, the fields of a role, if the engine does not divide experts by the scenario's default.
    The default: each GPU has whole experts with data-parallel attention, else a part of every expert. given: fields
    that the options set; those on experts' division are taken out. SGLang's servers with an all-to-all library have
    whole experts (0.5.23, arg_groups/overrides.py:1611). aside: gets a note if such a library has no effect.
    """
    tp, dp = fields["tp"], fields.get("dp", 1)
    sends = given.get("moe_a2a_backend", "none") != "none"
    is_whole = given.pop("whole_experts", False) if is_vllm else given.pop("ep", 1) > 1 or sends
    if has_experts and is_whole != (dp > 1):
        fields["ep"] = tp if is_whole else 1
    given.pop("ep", None)
    if not (has_experts and is_whole and (dp > 1 or (tp > 1 and not is_vllm))):
        unused = given.pop("moe_a2a_backend", "none")
        aside += [f"{unused}: the server has no whole experts on several GPUs to send tokens to"] * (unused != "none")
    if not given.pop("eplb", False):
        given.pop("redundant_experts", None)
    elif has_experts and is_whole:
        given.setdefault("redundant_experts", 0)


def _fields() -> dict[str, frozenset[str]]:
    kinds: dict[str, type[ServerSettings]] = {
        "prefill": PrefillSettings,
        "decode": DecodeSettings,
        "aggregated": AggregatedSettings,
    }
    return {role: frozenset(kind.model_fields) for role, kind in kinds.items()}


_FIELDS = _fields()


def _take_router(found: Imported, processes: Sequence[Process], *, is_pair: bool) -> None:
    for process in processes:
        if process.program in ("gateway", "frontend"):
            _, flags = parsed(process.words)
            router, aside = router_of(process.program, flags, process.variables, is_pair=is_pair)
            found.aside += [f"{process.where}: {flag}" for flag in aside]
            if router:
                found.data["router"] = router
                found.understood.append(f"router of {process.where}")
            return
    found.assumed.append("router: cache_aware: the files start no gateway that pdsim can read")


def _take_load(found: Imported, processes: Sequence[Process]) -> None:
    for process in processes:
        if process.program.endswith("-load"):
            _, flags = parsed(process.words)
            try:
                load, aside = load_of(process.program, flags)
            except ValueError as wrong:
                found.aside.append(f"{process.where}: load: {wrong}")
                continue
            found.aside += [f"{process.where}: {flag}" for flag in aside]
            found.data |= load
            found.understood.append(f"load of {process.where}")
            return
    start = starting_point()
    found.data |= {"workload": start["workload"], "client": start["client"]}
    found.assumed.append(
        "workload, client: those of `pdsim init`: the files send no load; add a trace or a client's result"
    )


def changed(found: Imported, changes: Sequence[str]) -> dict[str, Any]:
    """The scenario as plain data, after changes in the notation of --set. Speculation and HiSparse each need a number
    that must be measured. If the user has set this number, the scenario includes the fields of the feature; otherwise
    `found.aside` names them.
    """
    data = found.data
    for change in changes:
        apply_change(data, change)
    for role, withheld in found.withheld.items():
        if isinstance(servers := data.get(role), dict):
            data[role], notes = with_measured_fields(servers, withheld)
            found.aside += [f"{role}: {note}" for note in notes]
    return data
