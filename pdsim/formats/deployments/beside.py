"""Reads a load from a file that is given together with a deployment: a trace, or the result of a load generator."""

from pathlib import Path
from typing import Any

from pdsim.formats.results.reading import is_printed, read_results
from pdsim.inputs import InputError
from pdsim.scenario.starter import workload_of_trace
from pdsim.scenario.yaml_file import ConfigError

_SUFFIXES = (".json", ".jsonl", ".csv", ".gz")


def is_beside(path: Path) -> bool:
    """True if the file can give the load of a deployment: a trace or a result of a load generator by the file's name,
    or a report that a load generator printed.
    """
    return path.suffix in _SUFFIXES or is_printed(path)


def load_beside(path: Path) -> tuple[dict[str, Any], str]:
    """Reads a load from a file. Returns (the scenario's fields `workload` and `client`, a text with assumptions; empty:
    none). Raises ConfigError if the file is neither a trace nor a load generator's result with totals of requests,
    prompt tokens and output tokens.
    """
    try:
        summary = {} if path.suffix == ".gz" else read_results(path)[0].summary
    except InputError:
        summary = {}
    if _has_lengths(summary):
        return _of_summary(summary), f"workload: equal lengths, the means of {path.name}"
    try:
        workload, has_times = workload_of_trace(path)
    except ConfigError as wrong:
        raise ConfigError(f"{path} is no result of a client and no trace: {wrong}") from None
    client: dict[str, Any] = {"use": "open_loop"} if has_times else {"use": "closed_loop", "concurrency": 64}
    said = "" if has_times else f"client: 64 in flight: {path.name} has no times"
    return {"workload": workload, "client": client}, said


def _has_lengths(summary: dict[str, Any]) -> bool:
    return all(summary.get(name) for name in ("completed", "total_input_tokens", "total_output_tokens"))


def _of_summary(summary: dict[str, Any]) -> dict[str, Any]:
    count = round(summary["completed"])
    lengths = {f"{what}put_tokens": max(1, round(summary[f"total_{what}put_tokens"] / count)) for what in ("in", "out")}
    client: dict[str, Any] = {"use": "open_loop"}
    if summary.get("max_concurrency"):
        client = {"use": "closed_loop", "concurrency": round(summary["max_concurrency"]), "warm_up_requests": 0}
    elif summary.get("request_throughput"):
        client["arrivals"] = {"use": "poisson", "rate": f"{summary['request_throughput']:g} /s"}
    return {"workload": {"use": "random_lengths", "num_requests": count, **lengths}, "client": client}
