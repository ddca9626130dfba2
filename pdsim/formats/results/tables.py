"""Reads results in the form in which tools print them: the report of a client on a terminal, and the CSV of AIPerf and
GenAI-Perf.

The result has the fields that the same tools write as JSON.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pdsim.scenario.yaml_file import ConfigError

HEAD = "Serving Benchmark Result"
"""First line of a report that a client prints."""
_COUNTS = {
    "successful requests": "completed",
    "max request concurrency": "max_concurrency",
    "maximum request concurrency": "max_concurrency",
    "benchmark duration": "duration",
    "total input tokens": "total_input_tokens",
    "total generated tokens": "total_output_tokens",
    "request throughput": "request_throughput",
    "input token throughput": "input_throughput",
    "output token throughput": "output_throughput",
    "total token throughput": "total_throughput",
    "concurrency": "concurrency",
    "accept length": "accept_length",
}
_LINE = re.compile(r"([A-Z][A-Za-z0-9 ]*?)\s*(?:\([^)]*\))?:\s+([\d,]+(?:\.\d+)?)\s*$")
_TIME = re.compile(r"(mean|median|std|p\d+) (ttft|tpot|itl|e2el|e2e latency)")


def printed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the reports of SGLang's and vLLM's clients in a text, in the order in which they were printed."""
    found: dict[str, Any] | None = None
    for line in lines:
        if HEAD in line:
            if found:
                yield found
            found = {}
        elif found is not None and (told := _LINE.search(line)) is not None:
            name, value = told[1].lower(), float(told[2].replace(",", ""))
            if name in _COUNTS:
                found.setdefault(_COUNTS[name], value)
            elif _TIME.fullmatch(name):
                found.setdefault(f"{name.replace(' ', '_')}_ms", value)
    if found:
        yield found


def tabled(text: str, where: str) -> dict[str, Any]:
    """The metrics in a CSV of AIPerf or GenAI-Perf: unit and statistics of each metric, by its name in the tools' JSON.
    The CSV consists of tables with a head each, between empty lines. Raises ConfigError if the text is no CSV, or has
    no table of metrics. where: names the file in messages.
    """
    metrics: dict[str, Any] = {}
    head: list[str] = []
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as wrong:
        raise ConfigError(f"{where}: no CSV: {wrong}") from None
    for row in rows:
        cells = [cell.strip() for cell in row]
        if not any(cells):
            head = []
        elif not head:
            head = [{"value": "avg"}.get(cell.lower(), cell.lower()) for cell in cells]
        elif head[0] == "metric":
            label, _, unit = cells[0].partition("(")
            values = {name: _number(cell) for name, cell in zip(head[1:], cells[1:], strict=False) if cell}
            metrics[label.strip().lower().replace(" ", "_")] = {"unit": unit.rstrip(") "), **values}
    if not metrics:
        raise ConfigError(f"{where} is no table of AIPerf or GenAI-Perf, which begins with Metric,avg")
    return {"aiperf_version": "", **metrics}


def _number(cell: str) -> float | str:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return cell
