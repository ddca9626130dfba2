"""Reads results of other tools; the fields of a result tell whose it is."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.calibration.interop import tools
from pdsim.scenario.yaml_file import ConfigError


class Imported(NamedTuple):
    name: str
    tool: str
    summary: dict[str, Any]


class _Tool(NamedTuple):
    name: str
    wrote: Callable[[tools.ResultFields], bool]
    label: Callable[[tools.ResultFields], str | None]
    """The name of the result in the file."""
    summary: Callable[[tools.ResultFields], dict[str, float]]


def _has_no_name(_: tools.ResultFields) -> None:
    return None


_TOOLS = (
    _Tool(
        "AIPerf",
        lambda row: "aiperf_version" in row or isinstance(row.get("request_latency"), dict),
        _has_no_name,
        tools.aiperf,
    ),
    _Tool(
        "InferenceX", lambda row: "tput_per_gpu" in row, lambda row: row.get("infmax_model_prefix"), tools.inferencex
    ),
    _Tool("GuideLLM", lambda row: "metrics" in row and "scheduler_metrics" in row, tools.load_of, tools.guidellm),
    _Tool("genai-bench", lambda row: "aggregated_metrics" in row, _has_no_name, tools.genai_bench),
    _Tool("DynoSim", tools.is_dynosim, _has_no_name, tools.dynosim),
    _Tool("SGLang", lambda row: "mean_e2e_latency_ms" in row, lambda row: row.get("tag"), tools.sglang),
    _Tool("vLLM", lambda row: "mean_ttft_ms" in row, lambda row: row.get("label"), tools.vllm),
)
"""DynoSim's report has SGLang's names, and SGLang's result has vLLM's: the more particular comes first."""


def read_results(path: Path) -> list[Imported]:
    """Results, a line, element or benchmark of the file each. Raises ConfigError for what no tool writes."""
    found = [_imported(path, number, row) for number, row in enumerate(_rows(path), start=1)]
    if not found:
        raise ConfigError(f"{path} has no results")
    return found


def _rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON object, an array, or lines of objects. Infinity, which SGLang writes, is read."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{path}: not JSON: {broken}") from None
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as wrong:
                    raise ConfigError(f"{path}, line {number}: not JSON: {wrong.msg}") from None
        return
    if isinstance(whole, dict) and {"metadata", "benchmarks"} <= whole.keys():
        yield from tools.benchmarks_of(whole, f"{path}")
    else:
        yield from whole if isinstance(whole, list) else [whole]


def _imported(path: Path, number: int, row: Any) -> Imported:
    result = tools.ResultFields(row, f"{path}, result {number}")
    for tool in _TOOLS:
        if tool.wrote(result):
            name = f"{tool.label(result) or path.stem}" + (f" #{number}" if number > 1 else "")
            return Imported(name, tool.name, tool.summary(result))
    raise ConfigError(
        f"{result.where} is no result of SGLang's bench_serving, vLLM's bench serve, AIPerf, InferenceX, GuideLLM, "
        f"genai-bench or DynoSim: it has {', '.join(list(result)[:12]) or 'no fields'}"
    )
