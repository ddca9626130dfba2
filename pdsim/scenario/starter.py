"""Writes a first scenario file: the starter scenario with the user's choices, and with a comment on each section."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import Any

from pdsim.dataclass import dataclass
from pdsim.scenario.building.cluster import build
from pdsim.scenario.load_options import LoadOptions
from pdsim.scenario.loading import apply_change, parse_scenario
from pdsim.scenario.yaml_file import ConfigError, read_yaml, to_yaml
from pdsim.system.catalog import load_gpu, load_model
from pdsim.workload.trace_file import TraceError
from pdsim.workload.trace_kind import trace_kind

_COMMENTS = {
    "name": "Shown in tables.",
    "model": "`pdsim catalog` lists models and GPUs.",
    "page_size": "Tokens of KV in one page of GPU memory.",
    "prefill": "Servers that compute prompts. All are alike.",
    "decode": "Servers that generate the answers, from the KV that prefill sends them. All are alike.",
    **{f"{role}.instances": "servers" for role in ("prefill", "decode")},
    **{f"{role}.tp": "GPUs of each server (tensor parallelism)" for role in ("prefill", "decode")},
    "workload": "The requests: a trace. Its path is relative to this file.",
    "workload.use": "format of the trace",
    "workload.num_requests": "the first of the trace",
    "workload.input_tokens": "prompt",
    "workload.output_tokens": "answer",
    "client": "When requests are sent, whether or not earlier requests are answered.",
    "client.concurrency": "requests in flight",
    "client.arrivals.rate": "requests per second, on average",
}
"""Comments by field, for a scenario with a trace in an open loop."""
_COMMENTS_BY_USE = {
    "random_lengths": {
        "workload": "The requests: generated, with lengths in tokens. Prompts share no prefix.",
        "workload.use": "",
        "workload.num_requests": "how many",
    },
    "closed_loop": {"client": "When requests are sent: this many at the start, then one after each answer."},
}
"""Comments by the name of a workload or client, which replace those of _COMMENTS."""

OPTIONAL = """\
# More fields, with their defaults; pdsim fields has all of them.
# seed: 0  # changes the draws of lengths and arrivals
# router: cache_aware  # chooses the servers of a request; also round_robin, least_loaded, dynamo_kv, random
# network: {transport: mooncake-rdma}  # moves KV; add bandwidth: 50 GB/s, of one link in one direction
# cost: kernels  # times of operators that were measured; {profile: FILE} has those of your server
"""
_NUM_OF_TRACE = 5000
"""Number of requests of a trace that a first scenario uses. To answer a question with this many takes a minute or two.
"""


@dataclass(frozen=True, kw_only=True)
class StarterOptions(LoadOptions):
    """Choices for a first scenario. None: the starter scenario's value."""

    gpu: str | None = None
    """GPU of all servers, by its name in pdsim catalog."""
    prefill: int | None = None
    """Number of prefill servers."""
    decode: int | None = None
    """Number of decode servers."""
    tp: int | None = None
    """Number of GPUs of each server (tensor parallelism) [the fewest that hold the model]."""
    trace: Path | None = None
    """Trace instead of generated requests, in any format that scenarios read."""
    input_tokens: int | None = None
    """Fixed prompt length of generated requests, in tokens."""
    output_tokens: int | None = None
    """Fixed output length of generated requests, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None and any((self.input_tokens, self.output_tokens, self.isl, self.osl)):
            raise ConfigError("--trace has the lengths of its requests: leave out --input-tokens and --output-tokens")


def starting_point() -> dict[str, Any]:
    """The starter scenario as plain data. Commands start from it if the user names no file."""
    data: dict[str, Any] = read_yaml(Path(str(files("pdsim.scenario") / "starter.yaml")))
    return data


def first_scenario(options: StarterOptions, changes: Sequence[str], *, file: Path) -> dict[str, Any]:
    """Makes a scenario that can run, as plain data. Raises CatalogError if the model or the GPU is unknown, and
    ConfigError if no number of GPUs holds the model or another choice is wrong.

    file: path of the scenario, where relative paths start. Without `tp`, servers get the smallest power of two of GPUs
    that hold the model and the longest request.
    """
    chosen = _chosen(options, file)
    gpu = load_gpu(chosen["prefill"]["gpu"])
    load_model(chosen["model"])
    sizes = [2**i for i in range(gpu.gpus_per_server.bit_length())]
    for tp in sizes if options.tp is None else [options.tp]:
        data = deepcopy(chosen)
        for role in ("prefill", "decode"):
            data[role]["tp"] = tp
        for change in changes:
            apply_change(data, change)
        try:
            build(parse_scenario(data, base=file.parent, where=str(file)))
        except ConfigError as wrong:
            problem = wrong
        else:
            return data
    raise problem


def _chosen(options: StarterOptions, file: Path) -> dict[str, Any]:
    data = starting_point()
    data["name"] = file.stem
    data["model"] = options.model or data["model"]
    for role, count in (("prefill", options.prefill), ("decode", options.decode)):
        instances = data[role]["instances"] if count is None else count
        data[role] = {"instances": instances, "gpu": options.gpu or data[role]["gpu"]}
    workload, has_times = (data["workload"], False) if options.trace is None else workload_of_trace(options.trace)
    if options.trace is not None and Path(workload["path"]).is_relative_to(file.parent.absolute()):
        workload["path"] = str(Path(workload["path"]).relative_to(file.parent.absolute()))
    sizes = {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens}
    given = options.lengths if options.trace is None or options.requests is not None else {}
    data["workload"] = workload | given | {field: value for field, value in sizes.items() if value is not None}
    if options.client is not None:
        data["client"] = options.client
    elif has_times:
        data["client"] = {"use": "open_loop"}
    return data


def workload_of_trace(trace: Path) -> tuple[dict[str, Any], bool]:
    """Settings of a workload that reads the first requests of a trace, and True if the trace has sending times. Raises
    ConfigError if no workload can read the trace.
    """
    try:
        kind = trace_kind(trace)
    except TraceError as wrong:
        raise ConfigError(f"--trace: {wrong}") from None
    return {"use": kind.use, "path": str(trace.absolute()), "num_requests": _NUM_OF_TRACE}, kind.has_times


def commented(data: Mapping[str, Any]) -> str:
    """The text of a scenario file, with comments on sections and on fields that need one."""
    comments = dict(_COMMENTS)
    for part in (data["workload"], data["client"]):
        comments |= _COMMENTS_BY_USE.get(part.get("use", ""), {}) if isinstance(part, Mapping) else {}
    lines = ["# A scenario of pdsim: a cluster, and the requests that it serves.", *_lines(data, comments)]
    return "\n".join([*lines, "", OPTIONAL])


def _lines(data: Mapping[str, Any], comments: Mapping[str, str], path: str = "") -> Iterator[str]:
    margin = "  " * path.count(".")
    for field, value in data.items():
        comment = comments.get(f"{path}{field}", "")
        if not path:
            yield from ("", f"# {comment}") if comment else ("",)
        beside = f"  # {comment}" if comment and path else ""
        if isinstance(value, Mapping) and value:
            yield f"{margin}{field}:{beside}"
            yield from _lines(value, comments, f"{path}{field}.")
        else:
            text = indent(to_yaml({field: value}).rstrip(), margin)
            yield text if "\n" in text else text + beside
