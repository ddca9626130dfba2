"""Figures of runs: latencies, the stages of requests, instances over time, and transfers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pdsim.metrics import plots
from pdsim.metrics.columns import columns
from pdsim.metrics.explanation.stages import STAGES, stage_spans
from pdsim.metrics.explanation.usage import moving_span
from pdsim.metrics.records import Records, RequestRecord, TransferRecord
from pdsim.metrics.summary import e2e_ms, tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import significant
from pdsim.show.html.figures import FULL, INK, MUTED, SERIES, FigureBlock, legend, new_figure, percent_axis, tidy

Runs = Mapping[str, Sequence[RequestRecord]]
"""The requests of each run, by the name of the run."""

_MOST_ROWS = 60
"""Maximum number of requests in a figure that has a row per request."""
_MOST_POINTS = 400
"""Maximum number of points that a line has."""
_SLICES = 60
_FEW = 5
"""If fewer requests than this arrive in a slice of time, no percentiles are drawn for the slice."""
_PERCENTILES = (50, 90, 99)


def finished(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [request for request in requests if request.outcome == "finished"]


def latency_distributions(runs: Runs) -> FigureBlock:
    """How TTFT, time per output token and latency are distributed over the requests of each run. Percentiles are
    marked.
    """
    figure = new_figure(FULL, 3.3)
    panels: Any = figure.subplots(1, 3, sharey=True)
    measures = (("TTFT, s", ttft_ms, 1e3), ("time per output token, ms", tpot_ms, 1.0), ("latency, s", e2e_ms, 1e3))
    for ax, (title, measure, scale) in zip(panels, measures, strict=True):
        values = {
            name: sorted(
                measure(r) / scale for r in finished(requests) if measure != tpot_ms or r.num_output_tokens > 1
            )
            for name, requests in runs.items()
        }
        _draw_distributions(ax, values)
        tidy(ax, title, "fraction of requests" if ax is panels[0] else "")
        percent_axis(ax.yaxis)
    if len(runs) > 1:
        legend(panels[0])
    caption = "The fraction of requests whose TTFT, time per output token or latency is at most the time on the axis."
    return FigureBlock("distributions", "Latency", caption, figure)


def _draw_distributions(ax: Any, by_name: Mapping[str, Sequence[float]]) -> None:
    for i, (name, values) in enumerate(by_name.items()):
        if not values:
            continue
        fractions = np.linspace(0, 1, min(len(values), _MOST_POINTS))
        style = {"color": SERIES[i % len(SERIES)], "linestyle": plots.LINES[i % len(plots.LINES)], "label": name}
        ax.plot(np.quantile(values, fractions), fractions, lw=1.6, **style)
        marks = np.percentile(values, _PERCENTILES)
        ax.plot(marks, [p / 100 for p in _PERCENTILES], "o", ms=4, color=style["color"])
        if len(by_name) == 1:
            for percent, mark in zip(_PERCENTILES, marks, strict=True):
                near = {"xytext": (6, -9), "textcoords": "offset points", "fontsize": 8, "color": MUTED}
                ax.annotate(f"p{percent} {mark:,.3g}", (mark, percent / 100), **near)
    known = [value for values in by_name.values() for value in (values[:1] or [0.0])]
    most = max((values[-1] for values in by_name.values() if values), default=0.0)
    if min(known, default=0.0) > 0:
        plots.plain_log_axis(ax, "x", min(known), most)
    ax.set_ylim(0, 1.02)


def ttft_over_time(requests: Sequence[RequestRecord]) -> FigureBlock:
    """TTFT by the time of arrival: a point for each request, and percentiles for slices of time."""
    figure = new_figure(FULL, 3.0)
    ax: Any = figure.subplots()
    done = finished(requests)
    at = np.array([r.arrival_ns / 1e9 for r in done])
    ttft = np.array([ttft_ms(r) / 1e3 for r in done])
    ax.plot(at, ttft, ".", ms=2.5, color=MUTED, alpha=0.35, rasterized=True)
    edges = np.linspace(at.min(), at.max() + 1e-9, min(_SLICES, max(1, len(done) // (2 * _FEW))) + 1)
    places = np.digitize(at, edges) - 1
    groups = [(i, ttft[places == i]) for i in range(len(edges) - 1)]
    seen = [(i, group) for i, group in groups if len(group) >= _FEW]
    middles = [(edges[i] + edges[i + 1]) / 2 for i, _ in seen]
    for percent, color in zip(_PERCENTILES, (SERIES[0], SERIES[2], SERIES[5]), strict=True):
        ax.plot(middles, [np.percentile(group, percent) for _, group in seen], color=color, lw=1.5, label=f"p{percent}")
    tidy(ax, "arrival, s", "TTFT, s")
    ax.set_ylim(0)
    ax.margins(x=0.01)
    legend(ax)
    caption = "A point for each request, by its arrival; lines are percentiles over slices of time."
    return FigureBlock("ttft-over-time", "TTFT over time", caption, figure)


def request_stages(requests: Sequence[RequestRecord]) -> FigureBlock:
    """A row for each request, with its stages from its arrival on. Of a long run, the requests in the middle
    are shown.
    """
    done = finished(requests)
    first = max(0, (len(done) - _MOST_ROWS) // 2)
    chosen = done[first : first + _MOST_ROWS]
    figure = new_figure(FULL, 1.2 + 0.06 * len(chosen))
    ax: Any = figure.subplots()
    spans = list(map(stage_spans, chosen))
    for stage, color in zip(STAGES, plots.STAGE_COLORS, strict=True):
        found = [(row, *of_request[stage]) for row, of_request in enumerate(spans) if stage in of_request]
        bars = [(row, begin / 1e9, (end - begin) / 1e9) for row, begin, end in found if end > begin]
        if bars:
            places, starts, widths = zip(*bars, strict=True)
            ax.barh(places, widths, left=starts, height=0.8, color=color, label=stage, lw=0)
    tidy(ax, "time, s", "requests, by arrival", grid="x")
    ax.set_yticks([])
    ax.set_ylim(len(chosen) - 0.4, -0.6)
    ax.margins(x=0.005)
    legend(ax)
    caption = "Each row is a request from arrival to end, by stage. Of many, those in the middle of the run are shown."
    return FigureBlock("requests", "Requests", caption, figure)


def stage_bars(runs: Runs) -> FigureBlock:
    """The mean latency of each run as a bar, divided into stages."""
    figure = new_figure(FULL, 1.2 + 0.4 * len(runs))
    ax: Any = figure.subplots()
    plots.draw_stages(ax, runs)
    tidy(ax, "mean latency, s", grid="x")
    ax.set_ylabel("")
    ax.get_legend().remove()
    legend(ax)
    ax.tick_params(axis="y", labelcolor=INK)
    return FigureBlock("stages", "Where the time goes", "Mean latency by stage; short stages are joined.", figure)


def critical_path(mean_ms: Mapping[str, float]) -> FigureBlock:
    """A bar for the mean time in ms of each part of the critical path, the longest on top."""
    parts = sorted(mean_ms.items(), key=lambda part: part[1])
    figure = new_figure(FULL, 0.9 + 0.25 * len(parts))
    ax: Any = figure.subplots()
    drawn = ax.barh([name for name, _ in parts], [value for _, value in parts], height=0.66, color=SERIES[0], lw=0)
    total = sum(mean_ms.values())
    labels = [f"{significant(value)} ms, {value / total:.1%}" for _, value in parts]
    ax.bar_label(drawn, labels, fontsize=8, color=MUTED, padding=4)
    tidy(ax, "mean of finished requests, ms", grid="x")
    ax.tick_params(axis="y", labelcolor=INK)
    ax.margins(x=0.14)
    caption = "Mean time of a request by what it waited for. The parts of a request add up to its latency."
    return FigureBlock("critical-path", "What requests wait for", caption, figure)


def occupancy(records: Records) -> FigureBlock:
    """Running requests, waiting requests and used KV pages of each instance over time."""
    figure = new_figure(FULL, 5.2)
    panels: Any = figure.subplots(3, 1, sharex=True)
    measures = (
        ("running", plots.running_requests),
        ("waiting", plots.waiting_requests),
        ("KV pages in use", plots.pages_in_use),
    )
    for ax, (title, value) in zip(panels, measures, strict=True):
        plots.draw_levels(ax, columns(records, "levels"), title, value)
        tidy(ax, "time, s" if ax is panels[-1] else "", title)
    panels[-1].set_ylim(0, 1.02)
    percent_axis(panels[-1].yaxis)
    legend(panels[0])
    caption = "Means over short bins of time, for each instance. Cached pages that no request uses do not count."
    return FigureBlock("occupancy", "Batches, queues and KV pages", caption, figure)


def transfers(records: Records) -> FigureBlock:
    """Speed of each transfer by its size. The colour shows what took longest. Beside it, over time: transfers in
    flight, and units that wait for room in the staging ring.
    """
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
    caption = "Left: speed of each transfer, coloured by what took most of its time. Right: number of transfers whose "
    caption += "bytes move, and those that wait for the staging ring."
    return FigureBlock("transfers", "KV transfers", caption, figure)


def _draw_speed(ax: Any, sent: Sequence[TransferRecord]) -> None:
    groups: dict[str, list[TransferRecord]] = {}
    for transfer in sent:
        groups.setdefault(held_by(transfer), []).append(transfer)
    for i, (name, group) in enumerate(sorted(groups.items())):
        ax.plot(
            *_sizes_and_speeds(group), ".", ms=4, alpha=0.6, color=SERIES[i % len(SERIES)], label=name, rasterized=True
        )
    if sent:
        sizes, speeds = _sizes_and_speeds(sent)
        plots.plain_log_axis(ax, "x", min(sizes), max(sizes))
        plots.plain_log_axis(ax, "y", min(speeds), max(speeds))
    tidy(ax, "size of a transfer, MB", "GB/s, from start to end")
    legend(ax)


def _sizes_and_speeds(sent: Sequence[TransferRecord]) -> tuple[list[float], list[float]]:
    """Size in MB and speed in GB/s of each transfer."""
    return [t.num_bytes / 1e6 for t in sent], [t.num_bytes / (t.end_ns - t.start_ns) for t in sent]


def held_by(transfer: TransferRecord) -> str:
    """Name of the stage in which a transfer unit spent most of its time."""
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
    """Draws how many of the spans (begin, end, in ns) are open at each time."""
    moments = np.array(spans, dtype=np.int64).reshape(-1, 2)
    changes = np.repeat([[1, -1]], len(moments), axis=0)
    order = np.argsort(moments, axis=None, kind="stable")
    times, means = plots.binned(moments.ravel()[order], np.cumsum(changes.ravel()[order]), end_ns)
    ax.plot(times, means, drawstyle="steps-mid", lw=1.1, color=color, linestyle=line, label=label)
