"""A run as a Chrome trace, which Perfetto opens.

processes   requests; each instance; links, one for all
tracks      of an instance: its GPU, its transfer workers, and what it grants and merges
slices      forwards and decode steps, transfers with their parts; slices of one track nest
async       a request with its stages inside, and waits for the staging ring
arrows      grant to prefill, and the last KV of a request to its merge into the batch
counters    requests by state, KV pages, transfers in flight on each path

Stages and parts that take no time are left out. Events are in the order of their times.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

from pdsim.files import write_whole
from pdsim.metrics.explanation.stages import stage_spans
from pdsim.metrics.explanation.usage import moving_span
from pdsim.metrics.records import LevelRecord, Records, RequestRecord, StepRecord, TransferRecord

Event = dict[str, Any]

_REQUESTS, _LINKS, _FIRST_INSTANCE = 1, 2, 10
"""Process ids of the trace."""
_GPU, _GRANTS, _MERGES, _FIRST_WORKER = 1, 2, 3, 10
"""Track ids of an instance."""
_EVENTS_AT_ONCE = 4096
_POINT_NS = 1000
"""Length in ns with which the trace shows a decision (such as a grant or a merge), which takes no time. Shorter if the
next decision comes earlier.
"""


def write_timeline(path: Path, records: Records) -> None:
    """Writes the records of a run as a Chrome trace, completely or not at all. Encodes many events per call, which is
    faster than json.dump to a file.
    """
    events, packed = trace_events(records), BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=3, fileobj=packed, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for first in range(0, len(events), _EVENTS_AT_ONCE):
            text = json.dumps(events[first : first + _EVENTS_AT_ONCE], separators=(",", ":"), check_circular=False)
            file.write(("," if first else "").encode() + text[1:-1].encode())
        file.write(b"]}")
    write_whole(path, packed.getvalue())


def trace_events(records: Records) -> list[Event]:
    """Events of a Chrome trace. Events that name processes and tracks come first. Times are in us."""
    names = sorted(
        {step.instance_id for step in records.steps}
        | {level.instance_id for level in records.levels}
        | {name for transfer in records.transfers for name in (transfer.source, transfer.target)}
    )
    process = {name: _FIRST_INSTANCE + i for i, name in enumerate(names)}
    events: list[Event] = []
    for request in records.requests:
        if request.outcome == "finished":
            events += _request_events(request)
    for step in records.steps:
        events.append(_step_event(step, process[step.instance_id]))
    events += _transfer_events(records.transfers, process)
    events += _hand_over_events(records, process)
    events += _level_events(records.levels, process)
    events.sort(key=itemgetter("ts"))
    return [*_names(process, events), *events]


def _names(process: dict[str, int], events: Iterable[Event]) -> Iterator[Event]:
    """Events that name the processes and tracks of `events`. process: process id of each instance, by its name."""
    used = {(event["pid"], event["tid"]) for event in events}
    processes = {_REQUESTS: "requests", _LINKS: "links"} | {pid: name for name, pid in process.items()}
    tracks = {_GPU: "GPU", _GRANTS: "grants pages", _MERGES: "merges requests"}
    for pid, name in processes.items():
        mine = sorted(tid for process, tid in used if process == pid)
        if mine:
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for tid in mine if pid >= _FIRST_INSTANCE else ():
            title = tracks.get(tid, f"transfer worker {tid - _FIRST_WORKER}")
            if tid:
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}}


def _slice(name: str, category: str, pid: int, tid: int, start_ns: int, duration_ns: int, **args: Any) -> Event:
    place = {"pid": pid, "tid": tid, "ts": start_ns / 1e3, "dur": duration_ns / 1e3}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}


def _step_event(step: StepRecord, pid: int) -> Event:
    batch = {
        "prefill": f"{step.num_requests} prompts",
        "decode": f"batch {step.num_requests} x {step.num_steps}",
        "encode": f"media of {step.num_requests} requests",
    }[step.kind]
    sizes = {"tokens": step.num_tokens, "context": step.num_context_tokens}
    gpu_ns = step.first_ns if step.num_steps == 1 else step.duration_ns  # of the GPUs that take it first
    return _slice(batch, step.kind, pid, _GPU, step.start_ns, gpu_ns, **sizes)


def _request_events(request: RequestRecord) -> Iterator[Event]:
    place: Event = {"cat": "request", "id": request.request_id, "pid": _REQUESTS, "tid": request.request_id}
    name = f"request {request.request_id}"
    args = {"prompt": request.num_prompt_tokens, "output": request.num_output_tokens}
    yield {"ph": "b", "name": name, "ts": request.arrival_ns / 1e3, **place, "args": args}
    for stage, (begin_ns, end_ns) in stage_spans(request).items():
        if begin_ns < end_ns:
            yield {"ph": "b", "name": stage, "ts": begin_ns / 1e3, **place}
            yield {"ph": "e", "name": stage, "ts": end_ns / 1e3, **place}
    yield {"ph": "e", "name": name, "ts": (request.end_ns or 0) / 1e3, **place}


def _transfer_events(transfers: Sequence[TransferRecord], process: dict[str, int]) -> Iterator[Event]:
    """Yields the timeline's events of transfers: each transfer is a slice on the track of its worker, and contains
    slices for the causes of delay. A wait for the staging ring is shown at the target instance. Counters show the
    number of transfers in flight on each path. process: process id of each instance, by its name.
    """
    for i, transfer in enumerate(transfers):
        pid, tid = process[transfer.source], _FIRST_WORKER + transfer.worker
        sizes = {"bytes": transfer.num_bytes, "pages": transfer.num_pages, "descriptors": transfer.num_descriptors}
        name = f"request {transfer.request_id} to {transfer.target}"
        yield _slice(name, "transfer", pid, tid, transfer.start_ns, transfer.end_ns - transfer.start_ns, **sizes)
        start_ns = transfer.start_ns
        for part in ("setup", "line", "posting"):
            duration_ns = getattr(transfer, f"{part}_ns")
            if duration_ns:
                yield _slice(part, "transfer", pid, tid, start_ns, duration_ns)
            start_ns += duration_ns
        if transfer.needs == "ring" and transfer.queued_ns < transfer.start_ns:
            place = {"cat": "ring", "id": i, "pid": process[transfer.target], "tid": 0, "name": "waits for the ring"}
            yield {"ph": "b", "ts": transfer.queued_ns / 1e3, **place, "args": sizes}
            yield {"ph": "e", "ts": transfer.start_ns / 1e3, **place}
    paths: dict[str, Counter[int]] = defaultdict(Counter)
    for transfer in transfers:
        start_ns, end_ns = moving_span(transfer)
        if transfer.num_bytes and start_ns < end_ns:
            path = paths[f"{transfer.source} -> {transfer.target}"]
            path[start_ns] += 1
            path[end_ns] -= 1
    for name, changes in paths.items():
        moving = 0
        for time_ns in sorted(changes):
            moving += changes[time_ns]
            yield {"ph": "C", "name": name, "pid": _LINKS, "tid": 0, "ts": time_ns / 1e3, "args": {"moving": moving}}


def _hand_over_events(records: Records, process: dict[str, int]) -> Iterator[Event]:
    """Yields slices for the grants and merges of decode, and up to two arrows per finished disaggregated request. The
    first arrow leads from the grant to the prompt's first forward. If the forward began before the grant, the arrow
    leads to the request's last transfer unit, unless this unit began before the grant, too. The second arrow leads from
    the last transfer unit to the merge. process: process id of each instance, by its name.
    """
    done = [r for r in records.requests if r.outcome == "finished" and not r.is_aggregated]
    last_units = {unit.request_id: unit for unit in records.transfers if unit.is_last}
    for tid, name, moment in ((_GRANTS, "grants", "admitted_ns"), (_MERGES, "merges", "streamed_ns")):
        yield from _decisions(done, process, tid, name, moment)
    arrow = count()
    for request in done:
        decode, prefill = process[request.decode_id], process[request.prefill_id]
        unit = last_units.get(request.request_id)
        granted_ns, start_ns = request.admitted_ns or 0, request.prefill_start_ns or 0
        if granted_ns <= start_ns:
            yield from _arrow(next(arrow), "grant", (decode, _GRANTS, granted_ns), (prefill, _GPU, start_ns))
        elif unit is not None and granted_ns <= unit.start_ns:
            worker = (prefill, _FIRST_WORKER + unit.worker, unit.start_ns)
            yield from _arrow(next(arrow), "grant", (decode, _GRANTS, granted_ns), worker)
        if unit is not None:
            worker = (prefill, _FIRST_WORKER + unit.worker, unit.start_ns)
            yield from _arrow(next(arrow), "KV", worker, (decode, _MERGES, request.streamed_ns or 0))


def _decisions(
    requests: Sequence[RequestRecord], process: dict[str, int], tid: int, name: str, moment: str
) -> Iterator[Event]:
    """Slices for decisions of decode instances. Requests whose decision falls on one moment share a slice. process:
    process id of each instance, by its name. tid: track of the slices. moment: the record field with the time of the
    decision.
    """
    together: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for request in requests:
        together[request.decode_id][getattr(request, moment)].append(request.request_id)
    for instance_id, by_time in together.items():
        times = sorted(by_time)
        for time_ns, next_ns in zip(times, [*times[1:], times[-1] + _POINT_NS], strict=True):
            ids = by_time[time_ns]
            duration_ns = min(_POINT_NS, next_ns - time_ns)
            yield _slice(f"{name} {len(ids)}", name, process[instance_id], tid, time_ns, duration_ns, requests=ids)


def _arrow(number: int, name: str, begin: tuple[int, int, int], end: tuple[int, int, int]) -> Iterator[Event]:
    """An arrow between two slices. number: of the arrow, which no other arrow has. begin, end: process, track and time
    in ns of each slice.
    """
    for phase, (pid, tid, time_ns) in (("s", begin), ("f", end)):
        bound = {"bp": "e"} if phase == "f" else {}
        yield {
            "ph": phase,
            "name": name,
            "cat": name,
            "id": number,
            "pid": pid,
            "tid": tid,
            "ts": time_ns / 1e3,
            **bound,
        }


def _level_events(levels: Iterable[LevelRecord], process: dict[str, int]) -> Iterator[Event]:
    """Counters of the requests and pages of instances, with an event whenever a value changes. process: process id of
    each instance, by its name.
    """
    shown: dict[tuple[int, str], dict[str, int]] = {}
    for level in levels:
        now, pid = level.levels, process[level.instance_id]
        pages = {"used": now.num_used_pages, "cached": now.num_evictable_pages}
        requests = {
            "queued": now.num_queued,
            "transferring": now.num_transferring,
            "ready": now.num_ready,
            "running": now.num_running,
            "retracted": now.num_retracted,
        }
        for name, args in (("KV pages", pages), ("requests", requests)):
            if shown.get((pid, name)) != args:
                shown[pid, name] = args
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": level.time_ns / 1e3, "args": args}
