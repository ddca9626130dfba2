"""Computes how busy instances are while the cluster is loaded."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pdsim.dataclass import dataclass
from pdsim.metrics.columns import NEVER, Array, Columns, columns
from pdsim.metrics.explanation.time_spans import TimeSpans
from pdsim.metrics.records import Records, TransferRecord


class Window(NamedTuple):
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return max(1, self.end_ns - self.start_ns)


@dataclass(frozen=True)
class InstanceUsage:
    """Use of one instance in a time window, by default loaded_window. Shares are of the window's time."""

    instance_id: str
    computing: float
    """Share of the time in which the instance runs prefill forwards or mixed steps, or encodes media."""
    decoding: float
    """Share of the time in which the instance runs decode steps."""
    lacks_pages: float
    """Share of the time in which the first request of the queue, or a retracted request, waits for KV pages."""
    lacks_slots: float
    """Share of the time in which the first request of the queue, or a request whose KV has arrived, waits for a slot in
    the batch (max_running_requests).
    """
    mean_pages_used: float
    """Mean share of the KV pool that requests hold."""
    mean_running: float
    """Mean number of running requests."""
    mean_waiting: float
    """Mean number of requests that wait: in the queue, for a slot in the batch, or for memory after a retraction."""
    link_busy: float
    """Share of the time in which KV moves from or to the instance."""


USAGE_COLUMNS: Mapping[str, tuple[str, Callable[[InstanceUsage], float]]] = {
    "busy": (".0%", lambda use: use.computing + use.decoding),
    "no page": (".0%", lambda use: use.lacks_pages),
    "no slot": (".0%", lambda use: use.lacks_slots),
    "pages used": (".0%", lambda use: use.mean_pages_used),
    "link": (".0%", lambda use: use.link_busy),
    "running": (",.1f", lambda use: use.mean_running),
    "waiting": (",.1f", lambda use: use.mean_waiting),
}
"""Columns of tables of instances: a title, with the number's format and a function that gives the number."""


def loaded_window(records: Records) -> Window:
    """The time from the first to the last moment at which the cluster has at least half its mean number of requests.
    Leaves out the start and the end of a run.
    """
    arrivals_ns, ends_ns = columns(records, "requests")["arrival_ns"], columns(records, "requests")["end_ns"]
    if not len(arrivals_ns):
        return Window(0, 0)
    ends_ns = np.where(ends_ns == NEVER, _last_ns(records), ends_ns)  # a request that never ended stays
    moments_ns = np.concatenate((arrivals_ns, ends_ns))
    changes = np.repeat((1, -1), len(arrivals_ns))
    order = np.lexsort((changes, moments_ns))
    moments_ns, levels = moments_ns[order], np.cumsum(changes[order])[:-1]
    lengths_ns = np.diff(moments_ns)
    half = float((levels * lengths_ns.astype(float)).sum()) / max(1, int(moments_ns[-1] - moments_ns[0])) / 2
    loaded = np.flatnonzero(levels >= half)
    lasting = loaded[lengths_ns[loaded] > 0]
    start_ns = int(moments_ns[lasting[0] if len(lasting) else 0])
    return Window(start_ns, max(start_ns, int(moments_ns[loaded[-1] + 1 if len(loaded) else -1])))


def instance_usage(records: Records, window: Window | None = None) -> list[InstanceUsage]:
    """Usage of each instance in the window, sorted by name; None: in `loaded_window`. If the run did not record the
    instances' queues and pools, only computing, decoding and link_busy are known, and the other shares and means are 0.
    """
    window = loaded_window(records) if window is None else window
    steps, levels, moves = _by_instance(records, "steps"), _by_instance(records, "levels"), _moves(records)
    none = TimeSpans()
    return [
        _instance_usage(name, steps.get(name), levels.get(name), moves.get(name, none), window)
        for name in sorted({*steps, *levels})
    ]


def _instance_usage(
    name: str, steps: Columns | None, levels: Columns | None, moves: TimeSpans, window: Window
) -> InstanceUsage:
    busy = {"prefill": 0, "decode": 0} if steps is None else _busy_ns(steps, window)
    sums = dict.fromkeys(_HELD, 0.0) if levels is None else _held(levels, window)
    fraction = {key: value / window.length_ns for key, value in (sums | busy).items()}
    return InstanceUsage(
        instance_id=name,
        computing=fraction["prefill"],
        decoding=fraction["decode"],
        lacks_pages=fraction["pages"],
        lacks_slots=fraction["slots"],
        mean_pages_used=fraction["used"],
        mean_running=fraction["running"],
        mean_waiting=fraction["waiting"],
        link_busy=moves.between(window.start_ns, window.end_ns) / window.length_ns,
    )


def _busy_ns(steps: Columns, window: Window) -> dict[str, int]:
    """Time in ns that an instance computes in the window. Keys: prefill (with mixed steps and encoding) and decode.
    steps: the records of the instance's steps. Only the first pipeline stage is counted; later stages are equally busy.

    A mixed step has two records, one of prefill and one of decode. Only the record of prefill counts.
    """
    is_prefill, starts_ns = ~steps.having("kind", "decode"), steps["start_ns"]
    is_single = steps["num_steps"] == 1
    durations_ns = np.where(is_prefill | is_single, steps["first_ns"], steps["duration_ns"])
    overlaps_ns = _overlaps_ns(window, starts_ns, starts_ns + durations_ns)
    is_decode = ~is_prefill & ~np.isin(starts_ns, starts_ns[is_prefill])
    return {"prefill": int(overlaps_ns[is_prefill].sum()), "decode": int(overlaps_ns[is_decode].sum())}


_HELD = ("used", "running", "waiting", "pages", "slots")


def _held(levels: Columns, window: Window) -> dict[str, float]:
    """Sums over the window of one instance's values. Keys: used (used pages, as share of the pool), running and waiting
    (numbers of requests), pages and slots (1 while a request waits for pages or slots, else 0). Each value is
    multiplied by the ns for which it lasted. levels: the instance's rows of the table of levels.
    """
    times_ns = levels["time_ns"]
    durations_ns = _overlaps_ns(window, times_ns, np.append(times_ns[1:], window.end_ns))
    used, retracted, ready = levels["num_used_pages"], levels["num_retracted"], levels["num_ready"]
    values = (
        used / (used + levels["num_evictable_pages"] + levels["num_free_pages"]),
        levels["num_running"],
        levels["num_queued"] + ready + retracted,
        levels.having("blocked_by", "pages") | (retracted > 0),
        levels.having("blocked_by", "slots") | (ready > 0),
    )
    return dict(zip(_HELD, (float((durations_ns * value).sum()) for value in values), strict=True))


def _overlaps_ns(window: Window, starts_ns: Array, ends_ns: Array) -> Array:
    overlaps_ns: Array = np.maximum(0, np.minimum(ends_ns, window.end_ns) - np.maximum(starts_ns, window.start_ns))
    return overlaps_ns


def moving_span(transfer: TransferRecord) -> tuple[int, int]:
    """Begin and end in ns of the time in which a transfer's bytes move. Set-up, queue and posting come before."""
    held_ns = transfer.setup_ns + transfer.line_ns + transfer.posting_ns
    return transfer.start_ns + held_ns, transfer.end_ns


def moving_starts_ns(transfers: Columns) -> Array:
    """For each transfer: the time in ns when its bytes begin to move (see moving_span)."""
    found: Array = transfers["start_ns"] + transfers["setup_ns"] + transfers["line_ns"] + transfers["posting_ns"]
    return found


def _moves(records: Records) -> dict[str, TimeSpans]:
    """For each instance: the times in which KV moves from or to it (see moving_span)."""
    transfers = columns(records, "transfers")
    starts_ns = moving_starts_ns(transfers)
    found: dict[str, TimeSpans] = {}
    for end in ("source", "target"):
        codes, names = transfers.words(end)
        for code, name in enumerate(names):
            here = codes == code
            moves = TimeSpans(starts_ns[here], transfers["end_ns"][here])
            found[name] = found[name].united(moves) if name in found else moves
    return found


def _by_instance(records: Records, table: str) -> dict[str, Columns]:
    rows = columns(records, table)
    codes, names = rows.words("instance_id")
    return {name: rows.where(np.flatnonzero(codes == code)) for code, name in enumerate(names)}


def _last_ns(records: Records) -> int:
    steps, requests = columns(records, "steps"), columns(records, "requests")
    seen_ns = np.maximum(requests["arrival_ns"], requests["end_ns"])
    return int(max((steps["start_ns"] + steps["duration_ns"]).max(initial=0), seen_ns.max(initial=0)))
