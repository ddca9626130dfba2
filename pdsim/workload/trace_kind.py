"""The format of a trace, known by its first line."""

from itertools import chain
from pathlib import Path

from pdsim.workload.trace_file import open_trace

LONGEST_LINE = 2**20
WITHOUT_TIMES = ("applied_compute_trace", "sharegpt")
"""Kinds whose requests have no arrival times."""
_SIGNS = {
    "chat_id": "bailian_trace",
    "hash_ids": "mooncake_trace",
    "tool_call_latency": "applied_compute_trace",
    "ContextTokens": "azure_trace",
    "Request tokens": "burstgpt_trace",
}
"""Fields of first lines, the rarer ones first; a table of requests has none of them."""
_WAITS = '"wait_for"'


def trace_kind(path: Path) -> str:
    """Name of the workload that reads the file. Later lines tell whether requests wait for others."""
    with open_trace(path) as file:
        first = file.readline(LONGEST_LINE)
        kind = next((kind for sign, kind in _SIGNS.items() if sign in first), "request_table")
        if first.lstrip().startswith("["):
            kind = "sharegpt"
        elif kind == "mooncake_trace" and any(_WAITS in line for line in chain([first], file)):
            kind = "agentic_mooncake_trace"
    return kind
