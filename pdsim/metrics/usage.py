"""Occupancy of instances while the cluster is loaded."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from pdsim.metrics.explain import TimeSpans
from pdsim.metrics.records import LevelRecord, RequestRecord, RunRecords, StepRecord, TransferRecord


class Window(NamedTuple):
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return max(1, self.end_ns - self.start_ns)

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns))


@dataclass(frozen=True)
class InstanceUsage:
    """Work of one instance, as fractions of the time in which the cluster was loaded."""

    instance_id: str
    computing: float
    """Share of time in prefill forwards."""
    decoding: float
    """Share of time in decode steps."""
    lacks_pages: float
    """Share of time in which the first request of its queue, or a retracted request, waits for KV pages."""
    lacks_slots: float
    """Share of time in which the first request of its queue, or an arrived request, waits for a place in the batch
    (max_running_requests)."""
    mean_pages_used: float
    """Mean share of the pool that requests hold."""
    mean_running: float
    mean_waiting: float
    """Mean number of requests in its queue, arrived requests without a place in the batch, and retracted requests."""
    link_busy: float
    """Share of time in which bytes move from or to the instance."""


USAGE_COLUMNS: Mapping[str, tuple[str, Callable[[InstanceUsage], float]]] = {
    "busy": (".0%", lambda use: use.computing + use.decoding),
    "no page": (".0%", lambda use: use.lacks_pages),
    "no slot": (".0%", lambda use: use.lacks_slots),
    "pages used": (".0%", lambda use: use.mean_pages_used),
    "link": (".0%", lambda use: use.link_busy),
    "running": (",.1f", lambda use: use.mean_running),
    "waiting": (",.1f", lambda use: use.mean_waiting),
}
"""Numbers that tables show of each instance, and their formats."""


def loaded_window(records: RunRecords) -> Window:
    """Time in which the cluster had at least half its mean number of requests, without start and end of the run."""
    last_ns = _last_ns(records)
    changes = sorted(change for request in records.requests for change in _changes(request, last_ns))
    if not changes:
        return Window(0, 0)
    moments_ns, levels = [at_ns for at_ns, _ in changes], accumulate(change for _, change in changes)
    spans = [(start_ns, end_ns, level) for (start_ns, end_ns), level in zip(pairwise(moments_ns), levels, strict=False)]
    area = sum(level * (end_ns - start_ns) for start_ns, end_ns, level in spans)
    half = area / max(1, moments_ns[-1] - moments_ns[0]) / 2
    loaded = [(start_ns, end_ns) for start_ns, end_ns, level in spans if level >= half]
    start_ns = next((start_ns for start_ns, end_ns in loaded if end_ns > start_ns), moments_ns[0])
    return Window(start_ns, max(start_ns, loaded[-1][1] if loaded else moments_ns[-1]))


def instance_usage(records: RunRecords, window: Window | None = None) -> list[InstanceUsage]:
    """Use of each instance. Without recorded levels, only its busy times."""
    window = loaded_window(records) if window is None else window
    steps, levels, moves = _by_instance(records)
    return [_instance_usage(name, steps[name], levels[name], moves[name], window) for name in sorted({*steps, *levels})]


def _instance_usage(
    name: str,
    steps: Sequence[StepRecord],
    levels: Sequence[LevelRecord],
    moves: Sequence[tuple[int, int]],
    window: Window,
) -> InstanceUsage:
    busy = {"prefill": 0, "decode": 0}
    computing = {step.start_ns for step in steps if step.kind == "prefill"}
    for step in steps:
        if step.kind == "decode" and step.start_ns in computing:
            continue  # a mixed step, which is counted as computing
        busy[step.kind] += window.overlap_ns(step.start_ns, step.start_ns + busy_ns(step))
    sums = dict.fromkeys(("pages", "slots", "used", "running", "waiting"), 0.0)
    until_ns = [*(row.time_ns for row in levels[1:]), window.end_ns]
    for row, next_ns in zip(levels, until_ns, strict=False):
        duration = window.overlap_ns(row.time_ns, next_ns)
        if not duration:
            continue
        now = row.levels
        total = now.num_used_pages + now.num_evictable_pages + now.num_free_pages
        sums["used"] += duration * now.num_used_pages / total
        sums["running"] += duration * now.num_running
        sums["waiting"] += duration * (now.num_queued + now.num_ready + now.num_retracted)
        sums["pages"] += duration * (now.blocked_by == "pages" or now.num_retracted > 0)
        sums["slots"] += duration * (now.blocked_by == "slots" or now.num_ready > 0)
    fraction = {key: value / window.length_ns for key, value in (sums | busy).items()}
    link_busy = TimeSpans(moves).within(window.start_ns, window.end_ns) / window.length_ns
    return InstanceUsage(
        instance_id=name,
        computing=fraction["prefill"],
        decoding=fraction["decode"],
        lacks_pages=fraction["pages"],
        lacks_slots=fraction["slots"],
        mean_pages_used=fraction["used"],
        mean_running=fraction["running"],
        mean_waiting=fraction["waiting"],
        link_busy=link_busy,
    )


def busy_ns(step: StepRecord) -> int:
    """Time of a row on the GPUs that take it first: pipeline stages behind them are as busy."""
    return step.first_ns if step.kind == "prefill" else step.duration_ns


def moving_span(transfer: TransferRecord) -> tuple[int, int]:
    """Time when its bytes moved, held up by nothing but links."""
    held_ns = transfer.setup_ns + transfer.line_ns + transfer.posting_ns
    return transfer.start_ns + held_ns, transfer.end_ns


def _by_instance(
    records: RunRecords,
) -> tuple[dict[str, list[StepRecord]], dict[str, list[LevelRecord]], dict[str, list[tuple[int, int]]]]:
    steps: dict[str, list[StepRecord]] = defaultdict(list)
    levels: dict[str, list[LevelRecord]] = defaultdict(list)
    moves: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in records.steps:
        steps[step.instance_id].append(step)
    for level in records.levels:
        levels[level.instance_id].append(level)
    for transfer in records.transfers:
        moves[transfer.source].append(moving_span(transfer))
        moves[transfer.target].append(moving_span(transfer))
    return steps, levels, moves


def _changes(request: RequestRecord, last_ns: int) -> list[tuple[int, int]]:
    """Changes of the number of requests in the cluster. One that never ended stays."""
    return [(request.arrival_ns, 1), (last_ns if request.end_ns is None else request.end_ns, -1)]


def _last_ns(records: RunRecords) -> int:
    ends = [step.start_ns + step.duration_ns for step in records.steps]
    return max(ends + [request.end_ns or request.arrival_ns for request in records.requests], default=0)
