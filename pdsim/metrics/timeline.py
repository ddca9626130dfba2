"""A run as a Chrome trace, which Perfetto opens: instances as processes, work as slices, levels as counters.

Slices of one track never overlap. A request is an asynchronous slice with its stages inside, and so is a transfer.
Stages that take no time are left out.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdsim.metrics.explain import stages_of
from pdsim.metrics.records import RequestRecord, RunRecords

_REQUESTS = 1
_TRANSFERS = 2
_FIRST_INSTANCE = 10


def write_timeline(path: Path, records: RunRecords) -> None:
    """In one go: json.dump to a file encodes piece by piece, in Python."""
    trace = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(records))}
    text = json.dumps(trace, separators=(",", ":"), check_circular=False)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=3, mtime=0))


def trace_events(records: RunRecords) -> Iterator[dict[str, Any]]:
    """Chrome trace events; times in us."""
    names = sorted({step.instance_id for step in records.steps} | {level.instance_id for level in records.levels})
    process = {name: _FIRST_INSTANCE + i for i, name in enumerate(names)}
    shared = [(_REQUESTS, "requests"), (_TRANSFERS, "transfers")] if records.transfers else [(_REQUESTS, "requests")]
    for pid, name in [*shared, *((i, name) for name, i in process.items())]:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for step in records.steps:
        what = (
            f"{step.num_requests} prompts"
            if step.kind == "prefill"
            else f"batch {step.num_requests} x {step.num_steps}"
        )
        args = {"tokens": step.num_tokens, "context": step.num_context_tokens}
        place: dict[str, Any] = {
            "pid": process[step.instance_id],
            "tid": 1,
            "ts": step.start_ns / 1e3,
            "dur": step.duration_ns / 1e3,
        }
        yield {"ph": "X", "name": what, "cat": step.kind, **place, "args": args}
    shown: dict[tuple[int, str], dict[str, int]] = {}
    for level in records.levels:
        now, pid = level.levels, process[level.instance_id]
        pages = {"used": now.num_used_pages, "cached": now.num_evictable_pages}
        requests = {"queued": now.num_queued, "running": now.num_running}
        for name, args in (("KV pages", pages), ("requests", requests)):
            if shown.get((pid, name)) != args:
                shown[pid, name] = args
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": level.time_ns / 1e3, "args": args}
    for i, transfer in enumerate(records.transfers):
        place = {"cat": "transfer", "id": i, "pid": _TRANSFERS, "tid": process[transfer.target]}
        name = f"{transfer.source} -> {transfer.target}"
        args = {"request": transfer.request_id, "bytes": transfer.num_bytes}
        yield {"ph": "b", "name": name, "ts": transfer.start_ns / 1e3, **place, "args": args}
        yield {"ph": "e", "name": name, "ts": transfer.end_ns / 1e3, **place}
    for request in records.requests:
        if request.outcome == "finished":
            yield from _request_events(request)


def _request_events(request: RequestRecord) -> Iterator[dict[str, Any]]:
    place: dict[str, Any] = {"cat": "request", "id": request.request_id, "pid": _REQUESTS, "tid": request.request_id}
    name = f"request {request.request_id}"
    args = {"prompt": request.num_prompt_tokens, "output": request.num_output_tokens}
    yield {"ph": "b", "name": name, "ts": request.arrival_ns / 1e3, **place, "args": args}
    for stage, (first, last, _) in stages_of(request).items():
        begin_ns, end_ns = getattr(request, first), getattr(request, last)
        if begin_ns < end_ns:
            yield {"ph": "b", "name": stage, "ts": begin_ns / 1e3, **place}
            yield {"ph": "e", "name": stage, "ts": end_ns / 1e3, **place}
    yield {"ph": "e", "name": name, "ts": (request.end_ns or 0) / 1e3, **place}
