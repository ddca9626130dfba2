"""Finds the workload that can read a trace, by the fields of its first record."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pdsim.workload import trace_fields as names
from pdsim.workload.prompts import has_text
from pdsim.workload.trace_file import Line, TraceError, is_parquet, open_trace, records
from pdsim.workload.trace_rows import rows_of

READS = {
    "mooncake_trace": "Mooncake, AIPerf, Dynamo and its request traces, `pdsim export`: `input_length`, with or "
    "without `hash_ids`",
    "agentic_mooncake_trace": "DynoSim: `wait_for`",
    "bailian_trace": "Qwen's traces of Bailian: `chat_id`",
    "azure_trace": "Azure: `ContextTokens`",
    "burstgpt_trace": "BurstGPT: `Request tokens`",
    "request_table": "records of AIPerf and inference-perf, Vidur, LLMServingSim, Splitwise, details of SGLang's and "
    "vLLM's clients, tables of your own",
    "chat_trace": "messages or prompts: OpenAI's batches, AIPerf's turns, vLLM's custom data, captured bodies",
    "sharegpt": "ShareGPT: `conversations`",
    "weka_trace": "Weka and AgentX: sessions with `requests`, or a folder of them",
    "applied_compute_trace": "Applied Compute: `tool_call_latency`",
}
"""For each workload: the tools and formats that it reads, and the field by which it recognises a file."""
_WAITS = '"wait_for"'


class TraceKind(NamedTuple):
    use: str
    """Name of the workload that reads the trace, for the field `use` of a scenario's workload."""
    has_times: bool
    """True: requests have arrival times, at which an open loop sends them."""


def trace_kind(path: Path) -> TraceKind:
    """Returns the workload that can read a trace, and whether the trace has arrival times. Raises TraceError if no
    workload can read the trace.
    """
    if path.is_dir():
        return TraceKind("weka_trace", has_times=False)
    first = next(records(path), None)
    if first is None:
        raise TraceError(f"{path}: no requests in it")
    fields = first.fields
    if isinstance(fields.get("requests"), list):
        return TraceKind("weka_trace", has_times=False)
    if "tool_call_latency" in fields:
        return TraceKind("applied_compute_trace", has_times=False)
    if "conversations" in fields:
        return TraceKind("sharegpt", has_times=False)
    row = next(rows_of(path), None)
    if row is None:
        raise TraceError(f"{path}: no requests in it: no event is a request_end")
    if row.where != first.where:  # a turn of the session, or the first of Dynamo's events that is a request
        first = row
    has_times = row.quantity(names.ARRIVAL) is not None
    return TraceKind(_use_of(row, first, path), has_times)


def _use_of(row: Line, first: Line, path: Path) -> str:
    if "chat_id" in row.fields and "hash_ids" in row.fields:
        return "bailian_trace"
    if "ContextTokens" in row.fields:
        return "azure_trace"
    if "Request tokens" in row.fields:
        return "burstgpt_trace"
    if "request_id" in row.fields and "hash_ids" in row.fields and _has_waits(path):
        return "agentic_mooncake_trace"
    if row.quantity(names.TOKEN_IDS) is None and has_text(first.fields):
        return "chat_trace"
    if row.quantity(names.INPUT) is None and row.quantity(names.TOKEN_IDS) is None:
        some = ", ".join(islice(names.INPUT.names, 4))
        there = ", ".join(map(str, islice(first.fields, 20)))
        raise TraceError(
            f"{first.where}: no request of a trace: neither prompt tokens ({some} or the like) nor a text (messages, "
            f"prompt or the like); it has {there}"
        )
    return "mooncake_trace" if "input_length" in row.fields else "request_table"


def _has_waits(path: Path) -> bool:
    if is_parquet(path):
        return any(line.get("wait_for") for line in records(path))
    with open_trace(path) as file:
        return any(_WAITS in line for line in file)
