"""Figures. Each function returns a matplotlib Figure and touches no global state."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pdsim.metrics.records import LevelRecord, RequestRecord, RunRecords
from pdsim.metrics.summary import ttft_ms

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

_BARS = (
    ("request_throughput", "requests/s", 1.0),
    ("output_throughput", "output tokens/s", 1.0),
    ("median_ttft_ms", "median TTFT, s", 1e-3),
    ("p99_ttft_ms", "p99 TTFT, s", 1e-3),
    ("mean_tpot_ms", "mean TPOT, ms", 1.0),
    ("median_e2e_latency_ms", "median latency, s", 1e-3),
)


def comparison(summaries: Mapping[str, Mapping[str, Any]], runs: Mapping[str, RunRecords]) -> Figure:
    """Throughput and latency of several runs side by side, and their TTFT."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 4)
    for ax, (field, title, scale) in zip(axes[:, :3].flat, _BARS, strict=True):
        values = [summary[field] * scale for summary in summaries.values()]
        bars = ax.bar(range(len(values)), values, color=[COLORS[i % len(COLORS)] for i in range(len(values))])
        ax.bar_label(bars, fmt="%.3g", fontsize=8)
        ax.set_xticks(range(len(values)), list(summaries), rotation=20, ha="right", fontsize=8)
        ax.set_title(title, fontsize=10)
        ax.margins(y=0.15)
    grid = axes[0, 3].get_gridspec()
    for ax in axes[:, 3]:
        ax.remove()
    draw_ttft_cdf(figure.add_subplot(grid[:, 3]), {label: run.requests for label, run in runs.items()})
    return figure


def overview(records: RunRecords) -> Figure:
    """One run: TTFT, and what runs and how full the pools are over time."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    cdf, running, pages = figure.subplots(3, 1)
    draw_ttft_cdf(cdf, {"": records.requests})
    draw_levels(running, records.levels, "requests", _running)
    draw_levels(pages, records.levels, "KV pages in use, of the pool", _use)
    pages.set_ylim(0, 1.02)
    return figure


def draw_ttft_cdf(ax: Any, runs: Mapping[str, Sequence[RequestRecord]]) -> None:
    for i, (label, requests) in enumerate(runs.items()):
        values = sorted(ttft_ms(r) / 1e3 for r in requests if r.outcome == "finished")
        fractions = [(n + 1) / len(values) for n in range(len(values))]
        ax.plot(values, fractions, drawstyle="steps-post", color=COLORS[i % len(COLORS)], label=label)
    ax.set_xscale("log")
    ax.set_xlabel("TTFT, s")
    ax.set_ylabel("fraction of requests")
    ax.set_ylim(0, 1)
    ax.grid(alpha=0.3)
    if any(runs):
        ax.legend(fontsize=8)


def draw_levels(ax: Any, levels: Sequence[LevelRecord], title: str, value: Any) -> None:
    """One line per instance, constant between its records."""
    names = sorted({level.instance_id for level in levels})
    for i, name in enumerate(names):
        own = [level for level in levels if level.instance_id == name]
        times = [level.time_ns / 1e9 for level in own]
        ax.plot(times, [value(level) for level in own], drawstyle="steps-post", label=name, lw=0.9, color=COLORS[i % 8])
    ax.set_xlabel("time, s")
    ax.set_ylabel(title)
    ax.grid(alpha=0.3)
    if names:
        ax.legend(fontsize=8, ncols=4)


def _running(level: LevelRecord) -> float:
    return level.levels.num_running


def _use(level: LevelRecord) -> float:
    now = level.levels
    return now.num_used_pages / (now.num_used_pages + now.num_evictable_pages + now.num_free_pages)
