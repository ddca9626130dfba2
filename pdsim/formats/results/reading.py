"""Reads files of results. Finds out by the fields which tool wrote a file."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.formats.results import clients, reports, tables
from pdsim.formats.results.fields import ResultFields
from pdsim.inputs import MOST_YAML_BYTES, InputError, parse_json, parse_yaml, read_text
from pdsim.scenario.yaml_file import ConfigError


class ImportedResult(NamedTuple):
    name: str
    """Name that the file gives to the result, or else the file's name without its suffix. From the second result of a
    file on, the result's number follows, as in NAME #2.
    """
    tool: str
    """Short name of the tool that wrote the file, such as SGLang, or "AIPerf's records"."""
    summary: dict[str, Any]
    """The numbers of the result, by the names and in the units of a run's summary: latencies in ms, duration in s."""


class Tool(NamedTuple):
    name: str
    """Name of the tool, for tables and messages."""
    file: str
    """Usual name of the file that the tool writes."""
    differs: str
    """Says how the tool's numbers differ from those of a summary: in meaning or unit, or because some are left out.
    Empty: they do not differ.
    """
    wrote: Callable[[ResultFields], Any]
    """Function that gets a result and returns a true value if this tool wrote it."""
    summary: Callable[[ResultFields], dict[str, float]]
    """Makes fields of a run's summary from a result: numbers by field, latencies in ms, duration in s."""
    label: Callable[[ResultFields], Any] = lambda _: None
    """Reads the name that the file gives to a result. Returns None if the file gives none."""


_RECORDS = "AIPerf's records"
TOOLS = (
    Tool(
        "AIPerf, GenAI-Perf",
        "`profile_export_aiperf.json`, `profile_export_genai_perf.json`, and their CSV",
        "`inter_token_latency` is TPOT; no ITL",
        lambda row: "aiperf_version" in row or {"request_latency", "records"} & row.objects,
        clients.aiperf,
    ),
    Tool(
        "InferenceX",
        "`agg_*.json`, one row or an array",
        "seconds; `intvty` is 1 / TPOT; rates per GPU",
        lambda row: "tput_per_gpu" in row,
        clients.inferencex,
        lambda row: row.get("infmax_model_prefix"),
    ),
    Tool(
        "inference-perf",
        "`summary_lifecycle_metrics.json`, `stage_*.json`",
        "seconds; totals of tokens are means times requests",
        lambda row: isinstance(row.get("successes"), dict),
        reports.inference_perf,
    ),
    Tool(
        "llm-d's benchmark reports",
        "YAML or JSON, 0.1 and 0.2",
        "totals of tokens are means times requests",
        reports.is_llm_d_report,
        reports.llm_d_report,
    ),
    Tool(
        "GuideLLM",
        "`benchmarks.json`, before 2 and 2",
        "successful requests; `inter_token_latency_ms` is TPOT weighted by gaps; `time_per_output_token_ms` holds the "
        "first token and is left out",
        lambda row: "metrics" in row and ("scheduler_metrics" in row or "args" in row),
        reports.guidellm,
        reports.load_of,
    ),
    Tool(
        "genai-bench",
        "one JSON per scenario and concurrency",
        "seconds, or `_time_unit`; no ITL; token rates are left out after a warm-up",
        lambda row: "aggregated_metrics" in row,
        reports.genai_bench,
    ),
    Tool(
        "DynoSim",
        "`--report-json` of `python -m dynamo.replay`",
        "duration counts from time 0; `token_gap`, if there, is ITL, and DynoSim's ITL is TPOT",
        reports.is_dynosim,
        reports.dynosim,
    ),
    Tool(
        "SGLang `bench_serving`",
        "JSON lines, or what it prints",
        "",
        lambda row: "mean_e2e_latency_ms" in row or "median_e2e_latency_ms" in row,
        clients.sglang,
        lambda row: row.get("tag"),
    ),
    Tool(
        "`vllm bench serve`",
        "JSON, or what it prints",
        "ITL is of chunks",
        lambda row: "mean_ttft_ms" in row or "median_ttft_ms" in row,
        clients.vllm,
        lambda row: row.get("label"),
    ),
)
"""The tools in the order in which their formats are tried: special formats come before general ones. A report of
DynoSim has all fields of SGLang's results, and a result of SGLang has those of vLLM's.
"""
SUFFIXES = (".json", ".jsonl", ".csv")
_PRINTED = (".txt", ".log", ".out", ".md")
_YAML = (".yaml", ".yml")
_OF_SCENARIOS = re.compile(r"^model\s*:", re.MULTILINE)


def is_printed(path: Path) -> bool:
    """True if the file is the text of a report that a client printed."""
    return path.suffix in _PRINTED and path.is_file() and tables.HEAD in read_text(path, "text")


def is_result(path: Path) -> bool:
    """True if a file counts as a file of results: each JSON and CSV by its suffix, a printed report, or a tool's result
    in YAML. A YAML file with a line that begins with `model:` is a scenario.
    """
    if is_printed(path):
        return True
    if path.suffix not in _YAML or not path.is_file():
        return path.suffix in SUFFIXES
    try:
        text = read_text(path, "YAML", MOST_YAML_BYTES)
        found = None if _OF_SCENARIOS.search(text) else parse_yaml(text, str(path))
    except (InputError, OSError):
        return False
    if isinstance(found, dict) and isinstance(found.get("benchmarks"), list):
        return True
    return isinstance(found, dict) and any(tool.wrote(ResultFields(found, "")) for tool in TOOLS)


def read_results(path: Path) -> list[ImportedResult]:
    """The results in a file: one per line, element or benchmark. AIPerf's records of single requests together give one
    result. Raises ConfigError if the file does not exist or has no results, or if no known tool wrote it.
    """
    rows = list(_rows(path))
    if rows and all(isinstance(row, dict) and {"metadata", "metrics"} <= row.keys() for row in rows):
        each = [ResultFields(row, f"{path}, line {number}") for number, row in enumerate(rows, start=1)]
        if summary := clients.aiperf_records(each):
            return [ImportedResult(path.stem, _RECORDS, summary)]
    found = [_imported(path, number, row) for number, row in enumerate(rows, start=1)]
    if not found:
        raise ConfigError(f"{path} has no results")
    return found


def _rows(path: Path) -> Iterator[Any]:
    """Yields the objects in a file of results. JSON or YAML: a single object, the elements of an array, the benchmarks
    of a GuideLLM report, or one object per line. CSV: one object. Text: one object per printed report. Infinity is
    accepted in JSON, because SGLang writes it.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    if path.suffix in _PRINTED:
        yield from tables.printed(read_text(path, "text").splitlines())
        return
    if path.suffix == ".csv":
        yield tables.tabled(read_text(path, "CSV"), str(path))
        return
    found = _yaml(path) if path.suffix in _YAML else _json(path)
    if isinstance(found, dict) and "benchmarks" in found:
        yield from reports.benchmarks_of(found, f"{path}")
    else:
        yield from found if isinstance(found, list) else [found]


def _yaml(path: Path) -> Any:
    return parse_yaml(read_text(path, "YAML", MOST_YAML_BYTES), str(path))


def _json(path: Path) -> Any:
    """The JSON value of a file. If each line has a value: the list of these values."""
    text = read_text(path, "JSON")
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        return [parse_json(line, f"{path}, line {number}", has_infinity=True) for number, line in lines]
    except (ValueError, RecursionError):
        return parse_json(text, str(path), has_infinity=True)  # which says what is wrong


def _imported(path: Path, number: int, row: Any) -> ImportedResult:
    result = ResultFields(row, f"{path}, result {number}")
    for tool in TOOLS:
        if tool.wrote(result):
            name = f"{tool.label(result) or path.stem}" + (f" #{number}" if number > 1 else "")
            return ImportedResult(name, _plain(tool.name), tool.summary(result))
    known = ", ".join(_plain(tool.name) for tool in TOOLS)
    raise ConfigError(f"{result.where} is no result of {known}: it has {', '.join(list(result)[:12]) or 'no fields'}")


_NAMES = {"SGLang `bench_serving`": "SGLang", "`vllm bench serve`": "vLLM", "AIPerf, GenAI-Perf": "AIPerf"}


def _plain(name: str) -> str:
    return _NAMES.get(name, name)
