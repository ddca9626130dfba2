"""Figures of runs. Each function returns a matplotlib Figure, or draws on the given axes. No function changes
matplotlib's global state.
"""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pdsim.files import write_whole
from pdsim.metrics.columns import Array, Columns, columns
from pdsim.metrics.explanation.explain import mean_stage_ms
from pdsim.metrics.explanation.stages import ALL_STAGES
from pdsim.metrics.records import Records, RequestRecord
from pdsim.metrics.summary import ttft_ms

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Colours of runs: the palette of Okabe and Ito, which colour-blind readers can tell apart."""
STAGE_COLORS = (
    "#332288",
    "#AA4499",
    "#661100",
    "#6699CC",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
)
"""Colours of stages: Tol's muted palette, which shares no colour with the colours of runs."""
LINES = ("-", "--", "-.", ":")
NUM_BINS = 300
"""Number of time bins of a figure. With more, single bins could not be seen."""
_MANY = 6
"""Up to this many instances, each has a line with a label. With more instances, those of one role share a colour and a
label.
"""
_FEW, _SHORT = 4, 10
"""Largest number of runs, and largest length of their names, with horizontal labels under bars."""
_SMALL = 0.02
"""Stages shorter than this share of the longest bar are drawn as one stage."""
_WIDE = 30
"""If the largest value is more than this many times the smallest, an axis has labels at powers of ten only."""

_BARS = (
    ("request_throughput", "requests/s", 1.0),
    ("output_throughput", "output tokens/s", 1.0),
    ("mean_tpot_ms", "mean TPOT, ms", 1.0),
    ("median_ttft_ms", "median TTFT, s", 1e-3),
    ("p99_ttft_ms", "p99 TTFT, s", 1e-3),
    ("median_e2e_latency_ms", "median latency, s", 1e-3),
)


def write_figure(path: Path, figure: Figure) -> None:
    """Writes a figure as PNG, completely or not at all."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    write_whole(path, drawn.getvalue())


def comparison(summaries: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Records]) -> Figure:
    """Figure that compares throughput and latency of several runs. summaries, runs: summary and records of each run, by
    the run's name. Runs without records are drawn without stages and TTFT.
    """
    figure = Figure(figsize=(13, 7), layout="constrained")
    sides: Any = figure.subfigures(1, 2, width_ratios=(1.35, 1))
    bars, side = sides
    names = list(summaries)
    colors = [COLORS[i % len(COLORS)] for i in range(len(names))]
    crowded = len(names) > _FEW
    slanted = crowded or max(map(len, names)) > _SHORT
    for i, (ax, (field, title, scale)) in enumerate(zip(bars.subplots(2, 3).flat, _BARS, strict=True)):
        known = [summary.get(field) for summary in summaries.values()]
        values = [float("nan") if value is None else value * scale for value in known]
        labels = ["" if value != value else f"{value:,.0f}" if value >= 100 else f"{value:#.3g}" for value in values]  # noqa: PLR0124, PLR2004
        drawn = ax.bar(range(len(values)), values, color=colors)
        ax.bar_label(drawn, labels=labels, fontsize=8, rotation=90 if crowded else 0, padding=2)
        below = names if i >= len(_BARS) // 2 else [""] * len(names)
        ax.set_xticks(range(len(values)), below, fontsize=8, rotation=30 * slanted, ha="right" if slanted else "center")
        ax.set_yticks([])  # each bar says its value
        ax.set_title(title, fontsize=10)
        ax.margins(y=0.2 if crowded else 0.12)
    stages, cdf = side.subplots(2, 1)
    draw_stages(stages, runs)
    draw_ttft_cdf(cdf, {name: run.requests for name, run in runs.items()})
    return figure


def overview(records: Records) -> Figure:
    """Figure of one run: stages, TTFT, and over time the running requests, the waiting requests and the used KV
    pages.
    """
    figure = Figure(figsize=(11, 9))
    top = figure.add_gridspec(1, 2, left=0.075, right=0.985, bottom=0.73, top=0.93, wspace=0.1)
    below = figure.add_gridspec(3, 1, left=0.075, right=0.985, bottom=0.06, top=0.64, hspace=0.12)
    draw_ttft_cdf(figure.add_subplot(top[0]), {"": records.requests})
    draw_stages(figure.add_subplot(top[1]), {"": records})
    panels: Any = below.subplots(sharex=True)
    running, waiting, pages = panels
    levels = columns(records, "levels")
    draw_levels(running, levels, "requests running", running_requests)
    draw_levels(waiting, levels, "requests waiting", waiting_requests)
    draw_levels(pages, levels, "KV pages in use", pages_in_use)
    pages.set_ylim(0, 1.02)
    pages.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    pages.set_xlabel("time, s")
    if len(levels["time_ns"]):
        running.legend(fontsize=8, ncols=_MANY, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return figure


def draw_stages(ax: Any, runs: Mapping[str, Records]) -> None:
    """Draws the mean latency of each run as a bar of stages. Stages that are too short to see are drawn as one. ax:
    matplotlib axes. runs: records by the name of the run, which labels the bar.
    """
    times = {name: {stage: ms / 1e3 for stage, ms in mean_stage_ms(run).items()} for name, run in runs.items()}
    longest = max((sum(row.values()) for row in times.values()), default=0.0)
    seen = [s for s in ALL_STAGES if any(row.get(s, 0.0) > _SMALL * longest for row in times.values())]
    left = [0.0] * len(times)
    for stage in [*seen, "other"]:
        parts = [row.get(stage, sum(v for s, v in row.items() if s not in seen)) for row in times.values()]
        if stage == "other" and max(parts, default=0.0) < _SMALL * longest / 2:
            continue
        color = "#BBBBBB" if stage == "other" else STAGE_COLORS[list(ALL_STAGES).index(stage)]
        ax.barh(range(len(parts)), parts, left=left, color=color, label=stage, height=0.6)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    ax.set_yticks(range(len(times)) if any(times) else [], [name for name in times if name], fontsize=8)
    ax.set_ylim(len(times) - 0.3, -0.7)  # the first on top
    ax.set_xlabel("mean latency by stage, s")
    ax.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def draw_ttft_cdf(ax: Any, runs: Mapping[str, Sequence[RequestRecord]]) -> None:
    lowest, highest = float("inf"), 0.0
    for i, (label, requests) in enumerate(runs.items()):
        values = sorted(ttft_ms(r) / 1e3 for r in requests if r.outcome == "finished")
        if not values:
            continue
        lowest, highest = min(lowest, values[0]), max(highest, values[-1])
        fractions = [(n + 1) / len(values) for n in range(len(values))]
        style = {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i % len(LINES)], "label": label}
        ax.plot(values, fractions, drawstyle="steps-post", **style)
    ax.set_xlabel("TTFT, s")
    ax.set_ylabel("fraction of requests")
    ax.set_ylim(0, 1)
    ax.grid(alpha=0.3)
    if highest:
        plain_log_axis(ax, "x", lowest, highest)
    if any(runs):
        ax.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def draw_levels(ax: Any, levels: Columns, title: str, value: Callable[[Columns], Array]) -> None:
    """Draws a number of each instance over time, as a line with the means over short time bins. With many instances,
    the lines of one role share a colour and a label. ax: matplotlib axes. levels: rows of the table of levels. title:
    title of the y axis. value: computes the number for each row of `levels`.
    """
    times_ns, values = levels["time_ns"], value(levels)
    codes, names = levels.words("instance_id")
    last_ns = int(times_ns.max(initial=0))
    few = len(names) <= _MANY
    labels = {name: name if few else name.rstrip("0123456789.dp").rstrip("-") for name in sorted(names)}
    order = list(dict.fromkeys(labels.values()))
    shown = set()
    for name, label in labels.items():
        here = codes == names.index(name)
        times, means = binned(times_ns[here], values[here], last_ns)
        i = order.index(label)
        style = {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i % len(LINES)] if few else "-"}
        ax.plot(
            times,
            means,
            drawstyle="steps-mid",
            lw=1.1 if few else 0.6,
            label=None if label in shown else label,
            **style,
        )
        shown.add(label)
    ax.set_ylabel(title)
    ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))
    ax.margins(x=0.01)
    ax.grid(alpha=0.3)


def binned(times_ns: Array, values: Array, end_ns: int, num_bins: int = NUM_BINS) -> tuple[list[float], list[float]]:
    """The middles in s of num_bins equal time bins from 0 to end_ns, and the mean in each bin. times_ns: times of
    `values`, ascending. A value holds from its time until the next value's time. Before the first time, the value is 0.
    """
    width = max(1, end_ns) / num_bins
    at = np.minimum(np.append(times_ns, end_ns), end_ns)
    areas = np.concatenate(([0.0], np.cumsum(values * np.diff(at))))
    sums = np.diff(np.interp(np.arange(num_bins + 1) * width, at, areas))
    return [(i + 0.5) * width / 1e9 for i in range(num_bins)], (sums / width).tolist()


def plain_log_axis(ax: Any, which: Literal["x", "y"], lowest: float, highest: float) -> None:
    """Labels a logarithmic axis with plain numbers, such as 0.1, 1, 10. If the range from lowest to highest is short, 2
    and 5 have labels, too.
    """
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if highest > _WIDE * lowest else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def running_requests(levels: Columns) -> Array:
    return levels["num_running"]


def waiting_requests(levels: Columns) -> Array:
    waiting: Array = levels["num_queued"] + levels["num_ready"] + levels["num_retracted"]
    return waiting


def pages_in_use(levels: Columns) -> Array:
    used = levels["num_used_pages"]
    share: Array = used / (used + levels["num_evictable_pages"] + levels["num_free_pages"])
    return share
