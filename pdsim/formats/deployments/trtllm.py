"""Reads the commands of TensorRT-LLM: `trtllm-serve` with its options in YAML, and `trtllm-serve disaggregated -c
FILE`.

Names and defaults come from TensorRT-LLM's commands/serve.py, llmapi/llm_args.py (KvCacheConfig,
CacheTransceiverConfig) and llmapi/disagg_utils.py (extract_disagg_cfg).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.formats.deployments.flags import read_flags
from pdsim.formats.deployments.processes import Process
from pdsim.formats.deployments.readers import Read, parsed
from pdsim.formats.deployments.trtllm_flags import OPTION_FILES
from pdsim.inputs import MOST_YAML_BYTES, InputError, parse_yaml, read_text, shown, whole
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.memory import Layout

PROGRAMS = ("trtllm", "dynamo.trtllm")
_ORCHESTRATORS = ("disaggregated", "disaggregated_mpi_worker")
_OPTIONS = tuple(f"--{name}" for name in OPTION_FILES)
_SECTIONS = {"context_servers": "prefill", "generation_servers": "decode"}
_NO_SETTINGS = {"num_instances", "urls", "router", "hostname", "port"}
_ROUTERS = {"round_robin": "round_robin", "load_balancing": "least_loaded", "kv_cache_aware": "cache_aware"}
_OF_ORCHESTRATOR = {
    "context_servers", "generation_servers", "hostname", "port", "max_retries", "perf_metrics_max_requests",
    "return_perf_metrics", "perf_metrics_output_dir", "otlp_config", "node_id", "num_workers",
    "allow_request_chat_template", "gen_strip_message_history", "gen_tokids_ctxbytes", "disagg_coordinator_url",
}  # fmt: skip
_NOT_READ = ("conditional_disagg_config", "disagg_cluster", "schedule_style")
_USUAL_PORT = "8000"
"""Port of trtllm-serve without --port."""
_USUAL_PAGE, _USUAL_TOKENS, _USUAL_FRACTION = 32, 8192, 0.9
"""Defaults of tokens_per_block, max_num_tokens and free_gpu_memory_fraction."""


class Roles(NamedTuple):
    """Roles and routing policies of servers, as the file of an orchestrator (`trtllm-serve disaggregated`) has them."""

    of_ports: dict[str, str]
    """Role (prefill or decode) of the server at each port, by the port as text."""
    routers: dict[str, str]
    """Routing policies: pdsim's name of the policy, by prefill or decode. A role whose policy pdsim lacks is missing.
    """
    aside: list[str]
    """Texts on the file's sections and routing policies that pdsim ignores, or on a missing file. Each text begins with
    the place of the orchestrator's command.
    """


class Started(NamedTuple):
    """Servers that commands of trtllm-serve start, which the orchestrator does not start again."""

    ports: set[str]
    """Ports of the servers, as texts. An unset variable in a text: one of these ports is not known."""
    files: set[Path]
    """Files that `trtllm-serve disaggregated_mpi_worker` names: it starts the servers that these files describe."""


def started_by(processes: Sequence[tuple[Path, Process]]) -> Started:
    """Finds the servers that commands of trtllm-serve start. processes: each with the folder of its script."""
    found = Started(set(), set())
    for folder, process in processes:
        words = _words_of(process)
        if process.program == "trtllm" and words[:1] == ["disaggregated_mpi_worker"]:
            found.files.add((folder / _file_of(words)).absolute())
        elif process.program == "trtllm" and words[:1] != ["disaggregated"]:
            found.ports.add(str(parsed(words)[1].get("port", _USUAL_PORT)))
    return found


def _words_of(process: Process) -> list[str]:
    words = [part for word in process.words for part in _parts(word)]
    return words[1:] if words[:1] == ["serve"] else words


def _file_of(words: Sequence[str]) -> str:
    """The file that an orchestrator's command names. Empty: none."""
    return next((one for flag, one in pairwise(words) if flag.replace("_", "-") in ("-c", "--config-file")), "")


def expanded(process: Process, folder: Path, started: Started) -> list[Process]:
    """The process, with the options of the YAML files that it names. For an orchestrator: the servers that its file
    describes, then the orchestrator. The script may write these files itself. started: servers that commands start.
    """
    words = _words_of(process)
    if words[:1] and words[0] in _ORCHESTRATORS:
        name = _file_of(words)
        config = _options_of(process, folder, name)
        if config is None:
            why = (
                f"{name}: there is no such file beside the command" if name else "the command names no file by -c FILE"
            )
            lack = {f"aside {why}, so roles of servers are not known": ""}
            return [replace(process, program="trtllm-orchestrator", words=[], variables=lack)]
        described = replace(process, where=f"{process.where}: {name}")
        if words[0] == "disaggregated_mpi_worker":
            return _described(described, config, None)
        servers = _described(described, config, started.ports)
        return servers[-1:] if (folder / name).absolute() in started.files else servers
    for flag, name in list(pairwise(words)):
        if flag.replace("_", "-") in _OPTIONS and (options := _options_of(process, folder, name)) is not None:
            at = words.index(flag)
            words[at : at + 2] = []
            more = list(_flags_of(options))
            _check(more, name)
            words += more  # the file overwrites flags before it
    return [replace(process, words=words)]


def _check(words: Sequence[str], where: str) -> None:
    """Raises InputError if an option among `words` has a wrong value. words: options from a YAML file, as words of a
    command. where: the file, for the message.
    """
    try:
        read_flags("trtllm", parsed(words)[1])
    except ValueError as wrong:
        raise InputError(f"{where}: {wrong}") from None


def _parts(word: str) -> list[str]:
    flag, equals, value = word.partition("=")
    return [flag, value] if equals and flag.replace("_", "-") in (*_OPTIONS, "--config-file") else [word]


def _options_of(process: Process, folder: Path, name: str) -> dict[str, Any] | None:
    """The options in a YAML file of trtllm-serve or of its orchestrator. The deployment's script may write the file, or
    the file lies in the script's folder. None: there is no such file. Raises InputError if the file is no mapping of
    option names to values. name: name or path of the file, as the command has it.
    """
    written = process.written.get(name.removeprefix("./"))
    if written is None and not (name and (folder / name).is_file()):
        return None
    text = read_text(folder / name, "YAML", MOST_YAML_BYTES) if written is None else written
    found = parse_yaml(text, name)
    if not isinstance(found, dict):
        raise InputError(f"{name}: expected options of TensorRT-LLM by name")
    return found


def of_orchestrator_file(config: Any, where: str) -> list[Process]:
    """The servers that a configuration file of `trtllm-serve disaggregated` describes, with their settings, and the
    orchestrator itself. Empty: the file is of another kind. config: content of the file. where: names the file in
    messages.
    """
    if not isinstance(config, dict) or not _SECTIONS.keys() & config.keys():
        return []
    return _described(Process(where, "trtllm", []), config, None)


def _described(process: Process, config: Mapping[str, Any], ports: Collection[str] | None) -> list[Process]:
    """The servers whose settings an orchestrator's configuration file has, then the orchestrator itself. process: the
    orchestrator's command. config: content of the file. ports: ports of servers that other commands start; None: the
    file starts all servers. Raises InputError if context_servers or generation_servers is wrong.
    """
    for section in _SECTIONS:
        _check_section(config.get(section), f"{process.where}: {section}")
    orchestrator = replace(process, program="trtllm-orchestrator", words=[], variables=_about_servers(config))
    return [*_servers_of(process, config, ports), orchestrator]


def _check_section(servers: Any, where: str) -> None:
    """Checks context_servers or generation_servers in an orchestrator's file. Raises InputError if the section is no
    mapping, or if TensorRT-LLM refuses the number of instances or of URLs (llmapi/disagg_utils.py,
    extract_ctx_gen_cfgs). servers: content of the section; None: the file has no such section. where: names the section
    in messages.
    """
    if servers is None:
        return
    if not isinstance(servers, dict):
        raise InputError(f"{where}: expected fields such as num_instances and urls, found {shown(servers)}")
    count, urls = servers.get("num_instances", 1), servers.get("urls")
    try:
        count = whole(count)
    except ValueError:
        raise InputError(f"{where}.num_instances: expected a whole number, found {shown(count)}") from None
    if urls is not None and (not isinstance(urls, list) or len(urls) != count):
        raise InputError(f"{where}: expected as many urls as num_instances {count}, found {shown(urls)}")


def _servers_of(process: Process, config: Mapping[str, Any], ports: Collection[str] | None) -> Iterator[Process]:
    """Yields the servers whose settings an orchestrator's file has. Settings outside its sections apply to the servers
    of both sections. A section that is absent has no servers.

    ports: ports of servers that other commands start. A server with a URL counts only if its port is not among them,
    if all ports are known, and if its section has settings. None: the file starts all servers, and servers whose
    section gives their URLs, but no settings, have the settings outside the sections.
    """
    common = {name: value for name, value in config.items() if name not in (*_OF_ORCHESTRATOR, *_NOT_READ)}
    for section, role in _SECTIONS.items():
        own = _section(config, section)
        given = {**common, **own}
        urls = own.get("urls")
        has_settings = (given if ports is None or urls is None else own).keys() - _NO_SETTINGS - {"backend"}
        if not own or not has_settings:
            continue
        words = list(_flags_of({name: value for name, value in given.items() if name not in _NO_SETTINGS}))
        count = whole(given.get("num_instances", 1))
        if ports is not None and urls is not None:
            is_known = not any("$" in port for port in ports)
            count = sum(is_known and str(url).rpartition(":")[2] not in ports for url in urls)
        yield replace(process, program="trtllm", words=words, role=role, replicas=count)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _flags_of(options: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yields options as words of a command line. An option inside a nested mapping is named OUTER.INNER. before:
    beginning of all names, such as "OUTER.".
    """
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _flags_of(value, f"{before}{name}.")
        elif value is not None:
            yield f"--{before}{name}"
            yield from (str(one).lower() if isinstance(one, bool) else str(one) for one in _listed(value))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _about_servers(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns entries of Process.variables with the roles and routing policies of servers in an orchestrator's file,
    from which `roles_of` reads them. "port N": role of the server at this port. "router ROLE": routing policy of a
    role. "aside NAME": the file has a section of this name, which pdsim leaves out.
    """
    found: dict[str, str] = {}
    for section, role in _SECTIONS.items():
        servers = _section(config, section)
        urls = servers.get("urls")
        for url in urls if isinstance(urls, list) else ():
            found[f"port {str(url).rpartition(':')[2]}"] = role
        router = servers.get("router")
        found[f"router {role}"] = str(router.get("type", "round_robin")) if isinstance(router, dict) else "round_robin"
    return found | {f"aside {name}": "" for name in _NOT_READ if config.get(name)}


def roles_of(processes: Sequence[Process]) -> Roles:
    """Reads TensorRT-LLM's orchestrators (trtllm-orchestrator) among the processes. Returns the roles of servers by
    port, the routing policies, and notes on what pdsim does not understand.
    """
    found = Roles({}, {}, [])
    for process in processes:
        for text, value in process.variables.items() if process.program == "trtllm-orchestrator" else ():
            what, _, name = text.partition(" ")
            if what == "port":
                found.of_ports[name] = value
            elif what == "router" and value in _ROUTERS:
                found.routers[name] = _ROUTERS[value]
            else:
                found.aside.append(f"{process.where}: {name if what == 'aside' else f'router of {name}: {value}'}")
    return found


def finish(read: Read, role: str) -> None:
    """Completes the fields of a server of this role. attention_dp becomes dp, host memory of each rank becomes
    offload_bytes (host memory of all ranks of one DP rank), decode servers lose their chunk size, and missing fields
    get TensorRT-LLM's defaults. read: fields of the server so far, changed in place.
    """
    server, tp = read.server, read.server.get("tp", 1)
    if server.pop("attention_dp", False):
        server["dp"], server["tp"] = tp, 1
    if size := server.pop("rank_host_bytes", 0):  # of each rank
        server["offload_bytes"] = size * tp // server.get("dp", 1)
    read.common.setdefault("page_size", _USUAL_PAGE)
    server.setdefault("free_fraction", _USUAL_FRACTION)
    if role == "decode":
        server.pop("rank_chunk_tokens", None)
    else:
        server.setdefault("rank_chunk_tokens", _USUAL_TOKENS)
        if not server.pop("is_chunked", False):
            read.assumed.append("prompts longer than max_num_tokens are computed in chunks; TensorRT-LLM refuses them")


def share_of_all_memory(share: float, data: Mapping[str, Any], role: Mapping[str, Any], read: Read) -> float:
    """Share of a GPU's memory for weights and KV together. share: the part that the engine takes for KV, of the memory
    that the weights leave free. data: the scenario, with the model and weight_dtype. role: fields of the server's role,
    with its GPU and parallel sizes. read: options of the server, with kv_dtype.
    """
    model, dtype = load_model(data["model"]), data.get("weight_dtype")
    gpu, dp = load_gpu(role["gpu"]), role.get("dp", 1)
    layout = Layout(
        model=model if dtype is None else model.in_dtype(dtype),
        gpu=gpu,
        tp=role["tp"] // dp,
        dp=dp,
        has_whole_experts=dp > 1,
        kv_dtype=read.common.get("kv_dtype", "bf16"),
    )
    weights = layout.weight_bytes_per_rank / gpu.memory_bytes / role.get("pp", 1)
    return float(round(min(1.0, weights + share * max(0.0, 1 - weights)), 4))
