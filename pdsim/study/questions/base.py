"""The scenario that a question starts from: a file of the user's, or one made of flags."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pdsim.scenario.loading import apply_change, load_scenario, parse_scenario, set_field
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError, read_yaml, write_yaml
from pdsim.study.design import Changes
from pdsim.study.questions.asked import DEFAULTS, Asked, flag
from pdsim.system.catalog import UnknownNameError, load_gpu, load_model
from pdsim.system.memory import Layout, LayoutError
from pdsim.workload.clients import ClosedLoop
from pdsim.workload.synthetic import PrefixPool, RandomLengths
from pdsim.workload.trace_file import TraceError, open_trace

_SPREAD = 0.2
"""Of lengths given as one number: requests of one length would go through the cluster in step."""
_WEIGHTS = 0.6
"""Of the GPU's memory at most, where tp is not given."""
_NUM_OF_TRACE = 5000
"""Requests that a question is answered with in a minute or two."""
_SIGNS = {
    "chat_id": "bailian_trace",
    "hash_ids": "mooncake_trace",
    "tool_call_latency": "applied_compute_trace",
    "ContextTokens": "azure_trace",
    "Request tokens": "burstgpt_trace",
}
"""Fields of first lines, the rarer ones first; a table of requests has none of them."""
_WAITS = '"wait_for"'
_LONGEST_LINE = 2**20
_WITHOUT_TIMES = ("applied_compute_trace", "sharegpt")
"""Sent as generated loads are."""


@dataclass(frozen=True)
class Base:
    path: Path
    changes: tuple[str, ...]
    """As --set takes them."""
    scenario: Scenario
    is_sample: bool
    """Its requests are a record, with their times: other seeds say nothing new."""

    @property
    def is_generated(self) -> bool:
        """Lengths are the workload's settings."""
        return isinstance(self.scenario.workload, RandomLengths | PrefixPool)

    def changed(self, changes: Changes) -> Scenario:
        """As a point of a sweep has it."""
        data = read_yaml(self.path)
        for change in self.changes:
            apply_change(data, change)
        for field, value in changes.items():
            set_field(data, field, deepcopy(value), where=field)
        return parse_scenario(data, base=self.path.parent, where=str(self.path))


def base_of(asked: Asked, folder: Path, changes: tuple[str, ...], defaults: Mapping[str, Any]) -> Base:
    """Writes scenario.yaml into the folder where none is given. Raises ConfigError."""
    if asked.scenario is None:
        path = folder / "scenario.yaml"
        data = _described(asked, {**DEFAULTS, **defaults, **asked.given()})
        for change in changes:
            apply_change(data, change)
        changes, scenario = (), parse_scenario(data, base=folder, where="--set")
        write_yaml(data, path)
    else:
        path = asked.scenario
        changes = (*(f"{field}={json.dumps(value)}" for field, value in _load_changes(asked).items()), *changes)
        scenario = load_scenario(path, changes)
    if scenario.aggregated is not None:
        raise ConfigError(f"{path}: questions are about prefill and decode instances; this cluster is aggregated")
    times = getattr(scenario.client, "arrivals", None)
    is_sample = hasattr(scenario.workload, "path") and times is None and not isinstance(scenario.client, ClosedLoop)
    return Base(path, changes, scenario, is_sample)


def _load_changes(asked: Asked) -> dict[str, Any]:
    """Of a scenario's own load."""
    made: dict[str, Any] = {}
    if asked.trace is not None:
        made["workload"] = _trace(asked.trace, asked.requests or _NUM_OF_TRACE)
        if made["workload"]["use"] not in _WITHOUT_TIMES:
            made["client"] = "open_loop"
    elif asked.requests is not None:
        made["workload.num_requests"] = asked.requests
    if asked.rate is not None or asked.concurrency is not None:
        made["client"] = _client(asked.given())
    return made


def _described(asked: Asked, values: Mapping[str, Any]) -> dict[str, Any]:
    tp = asked.tp or _least_tp(values["model"], values["gpu"])
    servers = values["gpus"] // tp
    if servers < 2 or values["gpus"] % tp:  # noqa: PLR2004
        raise ConfigError(
            f"--gpus {values['gpus']}: prefill and decode need a server of {tp} GPUs each: a multiple of {tp}, "
            f"{2 * tp} at least"
        )
    workload = _workload(asked, values)
    is_recorded = asked.trace is not None and workload["use"] not in _WITHOUT_TIMES
    has_times = is_recorded and asked.rate is None and asked.concurrency is None
    server = {"gpu": values["gpu"], "tp": tp}
    profile = {} if asked.profile is None else {"cost": {"profile": str(asked.profile.absolute())}}
    return {
        "name": "asked",
        **profile,
        "model": values["model"],
        "page_size": 64,
        "prefill": {"instances": servers // 2, **server},
        "decode": {"instances": servers - servers // 2, **server},
        "workload": workload,
        "client": "open_loop" if has_times else _client(values),
    }


def _workload(asked: Asked, values: Mapping[str, Any]) -> dict[str, Any]:
    if asked.trace is not None:
        return _trace(asked.trace, asked.requests or _NUM_OF_TRACE)
    lengths = {
        "num_requests": values["requests"],
        "input_tokens": _lengths("input_tokens", values["input_tokens"]),
        "output_tokens": _lengths("output_tokens", values["output_tokens"]),
    }
    if not values["prefix_tokens"]:
        return {"use": "random_lengths", **lengths}
    prefixes = {"num_prefixes": values["prefixes"], "prefix_tokens": values["prefix_tokens"]}
    return {"use": "prefix_pool", **prefixes, **lengths}


def _client(values: Mapping[str, Any]) -> Any:
    if "rate" in values:
        return {"use": "open_loop", "arrivals": {"use": "poisson", "rate": f"{values['rate']} /s"}}
    return {"use": "closed_loop", "concurrency": values["concurrency"]}


def _lengths(name: str, text: str) -> dict[str, Any]:
    low, dash, high = text.partition("-")
    if not low.strip().isdigit() or (dash and not high.strip().isdigit()) or int(low) < 1:
        raise ConfigError(f"{flag(name)} {text}: expected tokens, such as 4096 or 2048-8192")
    if dash:
        return {"use": "uniform", "low": int(low), "high": int(high)}
    return {"use": "uniform", "low": round(int(low) * (1 - _SPREAD)) or 1, "high": round(int(low) * (1 + _SPREAD))}


def _trace(path: Path, num_requests: int) -> dict[str, Any]:
    try:
        kind = _kind(path)
    except TraceError as wrong:
        raise ConfigError(f"--trace: {wrong}") from None
    return {"use": kind, "path": str(path.absolute()), "num_requests": num_requests}


def _kind(path: Path) -> str:
    """By the first line; requests may wait for others from a later line on."""
    with open_trace(path) as file:
        first = file.readline(_LONGEST_LINE)
        kind = next((kind for sign, kind in _SIGNS.items() if sign in first), "request_table")
        if first.lstrip().startswith("["):
            kind = "sharegpt"
        elif kind == "mooncake_trace" and any(_WAITS in line for line in chain([first], file)):
            kind = "agentic_mooncake_trace"
    return kind


def trace_lines(path: Path) -> int:
    """Records of a trace, one a line; 0 of a JSON list."""
    with open_trace(path) as file:
        first = file.readline(_LONGEST_LINE)
        if first.lstrip().startswith("["):
            return 0
        return sum(bool(line.strip()) for line in chain([first], file)) - (not first.lstrip().startswith("{"))


def _least_tp(model: str, gpu: str) -> int:
    try:
        spec, device = load_model(model), load_gpu(gpu)
    except UnknownNameError as wrong:
        raise ConfigError(str(wrong)) from None
    for tp in (1, 2, 4, 8, 16):
        try:
            layout = Layout(model=spec, gpu=device, tp=tp, kv_dtype="bf16")
        except LayoutError:
            continue
        if layout.weight_bytes_per_rank <= _WEIGHTS * device.memory_bytes:
            return tp
    raise ConfigError(f"{model} does not fit on a server of {gpu}: give --tp, or a larger GPU")
