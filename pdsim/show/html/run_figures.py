"""Figures of runs: latencies, the stages of requests, instances over time, and transfers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pdsim.metrics import plots
from pdsim.metrics.columns import Array, Columns, columns, requests_at
from pdsim.metrics.explanation.explain import finished
from pdsim.metrics.explanation.stages import ALL_STAGES, stage_spans
from pdsim.metrics.explanation.usage import moving_starts_ns
from pdsim.metrics.records import Records
from pdsim.metrics.summary_rows import significant
from pdsim.show.html.figures import FULL, INK, MUTED, SERIES, FigureBlock, legend, new_figure, percent_axis, tidy

Runs = Mapping[str, Records]
"""The records of each run, by the name of the run."""

_MOST_ROWS = 60
"""Maximum number of requests in a figure that has a row per request."""
_MOST_POINTS = 400
"""Maximum number of points that a line has."""
_SLICES = 60
_FEW = 5
"""Minimum number of requests that arrive in a slice of time for which percentiles are drawn."""
_PERCENTILES = (50, 90, 99)


def ttft_ms(requests: Columns) -> Array:
    return _ms(requests["first_token_ns"] - requests["arrival_ns"])


def e2e_ms(requests: Columns) -> Array:
    return _ms(requests["end_ns"] - requests["arrival_ns"])


def tpot_ms(requests: Columns) -> Array:
    """Mean time in ms per output token after the first, of the requests that have at least two output tokens."""
    longer = requests.where(np.flatnonzero(requests["num_output_tokens"] > 1))
    means: Array = (e2e_ms(longer) - ttft_ms(longer)) / (longer["num_output_tokens"] - 1)
    return means


def _ms(durations_ns: Array) -> Array:
    durations_ms: Array = durations_ns / 1e6
    return durations_ms


def latency_distributions(runs: Runs) -> FigureBlock:
    """How TTFT, time per output token and latency are distributed over the requests of each run. Percentiles are
    marked.
    """
    figure = new_figure(FULL, 3.3)
    panels: Any = figure.subplots(1, 3, sharey=True)
    measures = (("TTFT, s", ttft_ms, 1e3), ("time per output token, ms", tpot_ms, 1.0), ("latency, s", e2e_ms, 1e3))
    for ax, (title, measure, scale) in zip(panels, measures, strict=True):
        _draw_distributions(ax, {name: np.sort(measure(finished(run)) / scale) for name, run in runs.items()})
        tidy(ax, title, "fraction of requests" if ax is panels[0] else "")
        percent_axis(ax.yaxis)
    if len(runs) > 1:
        legend(panels[0])
    caption = "The fraction of requests whose TTFT, time per output token or latency is at most the time on the axis."
    return FigureBlock("distributions", "Latency", caption, figure)


def _draw_distributions(ax: Any, by_name: Mapping[str, Array]) -> None:
    """Draws a line for each run: the share of requests up to each value. by_name: sorted values by the name of the run.
    ax: matplotlib's axes.
    """
    for i, (name, values) in enumerate(by_name.items()):
        if not len(values):
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
    least = min((values[0] if len(values) else 0.0 for values in by_name.values()), default=0.0)
    most = max((values[-1] for values in by_name.values() if len(values)), default=0.0)
    if least > 0:
        plots.plain_log_axis(ax, "x", least, most)
    ax.set_ylim(0, 1.02)


def ttft_over_time(records: Records) -> FigureBlock:
    """TTFT by the time of arrival: a point for each request, and percentiles for slices of time."""
    figure = new_figure(FULL, 3.0)
    ax: Any = figure.subplots()
    done = finished(records)
    at, ttft = done["arrival_ns"] / 1e9, ttft_ms(done) / 1e3
    ax.plot(at, ttft, ".", ms=2.5, color=MUTED, alpha=0.35, rasterized=True)
    edges = np.linspace(at.min(), at.max() + 1e-9, min(_SLICES, max(1, len(at) // (2 * _FEW))) + 1)
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


def request_stages(records: Records) -> FigureBlock:
    """A row for each request, with its stages from its arrival on. Of a long run, the requests in the middle
    are shown.
    """
    done = np.flatnonzero(columns(records, "requests").having("outcome", "finished"))
    first = max(0, (len(done) - _MOST_ROWS) // 2)
    chosen = requests_at(records, done[first : first + _MOST_ROWS])
    figure = new_figure(FULL, 1.2 + 0.06 * len(chosen))
    ax: Any = figure.subplots()
    spans = list(map(stage_spans, chosen))
    for stage, color in zip(ALL_STAGES, plots.STAGE_COLORS, strict=True):
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
    """Two figures side by side. Left: speed of each transfer by its size; the colour shows which part of the transfer
    took most of its time. Right: over time, number of transfers whose bytes move, for the first pairs of instances, and
    number of units that wait for room in the staging ring.
    """
    figure = new_figure(FULL, 3.4)
    speed, links = figure.subplots(1, 2, width_ratios=(1, 1.25))
    units = columns(records, "transfers")
    sent = units.where(np.flatnonzero((units["num_bytes"] > 0) & (units["end_ns"] > units["start_ns"])))
    _draw_speed(speed, sent)
    end_ns = int(units["end_ns"].max(initial=0))
    (sources, source_names), (targets, target_names) = sent.words("source"), sent.words("target")
    pairs = np.unique(np.stack([sources, targets], axis=1), axis=0).tolist()
    paths = sorted((source_names[source], target_names[target], source, target) for source, target in pairs)
    for i, (source, target, *codes) in enumerate(paths[: len(SERIES)]):
        here = (sources == codes[0]) & (targets == codes[1])
        spans_ns = moving_starts_ns(sent)[here], sent["end_ns"][here]
        _draw_count(links, *spans_ns, end_ns, f"{source} → {target}", SERIES[i])
    waits = units.where(np.flatnonzero(units.having("needs", "ring") & (units["start_ns"] > units["queued_ns"])))
    if len(waits["start_ns"]):
        _draw_count(links, waits["queued_ns"], waits["start_ns"], end_ns, "waits for the ring", SERIES[5], "--")
    tidy(links, "time, s", "transfers at once")
    links.set_ylim(0)
    links.margins(x=0.01)
    legend(links)
    caption = "Left: speed of each transfer, coloured by what took most of its time. Right: number of transfers whose "
    caption += "bytes move, and number of those that wait for the staging ring."
    return FigureBlock("transfers", "KV transfers", caption, figure)


_HOLDS = ("behind others", "bytes move", "descriptors", "set-up")
"""Names, in the legend of the figure of transfers, of what takes the longest part of a transfer unit's time."""


def _draw_speed(ax: Any, sent: Columns) -> None:
    sizes, speeds = sent["num_bytes"] / 1e6, sent["num_bytes"] / (sent["end_ns"] - sent["start_ns"])
    held = held_by(sent)
    for i, name in enumerate(name for name in _HOLDS if name in held):
        here = held == name
        style = {"ms": 4, "alpha": 0.6, "color": SERIES[i % len(SERIES)], "label": name, "rasterized": True}
        ax.plot(sizes[here], speeds[here], ".", **style)
    if len(sizes):
        plots.plain_log_axis(ax, "x", sizes.min(), sizes.max())
        plots.plain_log_axis(ax, "y", speeds.min(), speeds.max())
    tidy(ax, "size of a transfer, MB", "GB/s, from start to end")
    legend(ax)


def held_by(sent: Columns) -> Array:
    """For each transfer unit: the name of the stage in which it spent most of its time."""
    moving_ns = sent["end_ns"] - moving_starts_ns(sent)
    parts_ns = {
        "bytes move": moving_ns,
        "set-up": sent["setup_ns"],
        "behind others": sent["line_ns"],
        "descriptors": sent["posting_ns"],
    }
    names: Array = np.array(list(parts_ns))
    found: Array = names[np.argmax(np.stack(list(parts_ns.values())), axis=0)]
    return found


def _draw_count(
    ax: Any, begins_ns: Array, ends_ns: Array, end_ns: int, label: str, color: str, line: str = "-"
) -> None:
    """Draws a line of how many of the spans (begins_ns, ends_ns) are open at each time up to end_ns. ax: matplotlib's
    axes. label: text in the legend. color, line: colour and style of the line.
    """
    moments = np.stack([begins_ns, ends_ns], axis=1)
    changes = np.repeat([[1, -1]], len(moments), axis=0)
    order = np.argsort(moments, axis=None, kind="stable")
    times, means = plots.binned(moments.ravel()[order], np.cumsum(changes.ravel()[order]), end_ns)
    ax.plot(times, means, drawstyle="steps-mid", lw=1.1, color=color, linestyle=line, label=label)
