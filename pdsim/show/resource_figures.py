"""Figures of instances and transfers: what is full, and what is busy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pdsim.metrics.plots import (
    NUM_BINS,
    binned,
    draw_levels,
    pages_in_use,
    plain_log_axis,
    running_requests,
    waiting_requests,
)
from pdsim.metrics.records import RunRecords, TransferRecord
from pdsim.metrics.usage import moving_span
from pdsim.show.style import FULL, SERIES, legend, new_figure, percent_axis, tidy


def occupancy(records: RunRecords) -> Figure:
    """Of every instance over time: requests in its batch, those that wait, and its KV pages in use."""
    figure = new_figure(FULL, 5.2)
    panels: Any = figure.subplots(3, 1, sharex=True)
    measures = (("running", running_requests), ("waiting", waiting_requests), ("KV pages in use", pages_in_use))
    for ax, (title, value) in zip(panels, measures, strict=True):
        draw_levels(ax, records.levels, title, value)
        tidy(ax, "time, s" if ax is panels[-1] else "", title)
    panels[-1].set_ylim(0, 1.02)
    percent_axis(panels[-1].yaxis)
    legend(panels[0])
    return figure


def transfers(records: RunRecords) -> Figure:
    """Speed by size, coloured by what held the bytes up most; links and the staging ring over time."""
    figure = new_figure(FULL, 3.4)
    speed, links = figure.subplots(1, 2, width_ratios=(1, 1.25))
    sent = [t for t in records.transfers if t.num_bytes and t.end_ns > t.start_ns]
    _draw_speed(speed, sent)
    end_ns = max((t.end_ns for t in records.transfers), default=0)
    paths = sorted({(t.source, t.target) for t in sent})
    for i, (source, target) in enumerate(paths[: len(SERIES)]):
        spans = [moving_span(t) for t in sent if (t.source, t.target) == (source, target)]
        _draw_count(links, spans, end_ns, f"{source} → {target}", SERIES[i])
    waits = [(t.queued_ns, t.start_ns) for t in records.transfers if t.needs == "ring" and t.start_ns > t.queued_ns]
    if waits:
        _draw_count(links, waits, end_ns, "waits for the ring", SERIES[5], "--")
    tidy(links, "time, s", "transfers at once")
    links.set_ylim(0)
    links.margins(x=0.01)
    legend(links)
    return figure


def _draw_speed(ax: Any, sent: Sequence[TransferRecord]) -> None:
    groups: dict[str, list[TransferRecord]] = {}
    for transfer in sent:
        groups.setdefault(held_by(transfer), []).append(transfer)
    for i, (name, group) in enumerate(sorted(groups.items())):
        sizes = [t.num_bytes / 1e6 for t in group]
        speeds = [t.num_bytes / (t.end_ns - t.start_ns) for t in group]
        ax.plot(sizes, speeds, ".", ms=4, alpha=0.6, color=SERIES[i % len(SERIES)], label=name, rasterized=True)
    if sent:
        sizes = [t.num_bytes / 1e6 for t in sent]
        speeds = [t.num_bytes / (t.end_ns - t.start_ns) for t in sent]
        plain_log_axis(ax, "x", min(sizes), max(sizes))
        plain_log_axis(ax, "y", min(speeds), max(speeds))
    tidy(ax, "size of a transfer, MB", "GB/s, from start to end")
    legend(ax)


def held_by(transfer: TransferRecord) -> str:
    """What most of its time went to."""
    moving_ns = transfer.end_ns - moving_span(transfer)[0]
    parts = {
        "bytes move": moving_ns,
        "set-up": transfer.setup_ns,
        "behind others": transfer.line_ns,
        "descriptors": transfer.posting_ns,
    }
    return max(parts, key=lambda name: parts[name])


def _draw_count(
    ax: Any, spans: Sequence[tuple[int, int]], end_ns: int, label: str, color: str, line: str = "-"
) -> None:
    """How many of the spans hold, over time."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    counts = np.cumsum([change for _, change in changes]).tolist()
    times, means = binned([(at, count) for (at, _), count in zip(changes, counts, strict=True)], end_ns, NUM_BINS)
    ax.plot(times, means, drawstyle="steps-mid", lw=1.1, color=color, linestyle=line, label=label)
