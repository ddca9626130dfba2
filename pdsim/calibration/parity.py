"""Simulated against measured values of a matrix: on the diagonal they are equal."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdsim.calibration.validation import Validation

_PANELS = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "TTFT mean, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_e2e_latency_ms": "latency mean, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p99_tpot_ms": "TPOT p99, ms",
}
_BAND = 0.10


def parity(validation: Validation) -> Figure:
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(2, 3).flat, _PANELS.items(), strict=True):
        _panel(axes, validation, metric)
        axes.set_title(title)
    figure.axes[0].set_ylabel("simulated")
    figure.axes[3].set_ylabel("simulated")
    figure.suptitle(f"{validation.name}: the line is y = x, the band ±{_BAND:.0%}")
    return figure


def write_parity(validation: Validation, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parity(validation).savefig(folder / "parity.png", dpi=110)


def _panel(axes: Axes, validation: Validation, metric: str) -> None:
    points = {one.name: one.metrics[metric] for one in validation.comparisons}
    values = [value for point in points.values() for value in (point.measured, point.simulated) if value > 0]
    ends = [0.8 * min(values, default=1.0), 1.25 * max(values, default=1.0)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [(1 - _BAND) * e for e in ends], [(1 + _BAND) * e for e in ends], alpha=0.15, linewidth=0)
    axes.scatter([point.measured for point in points.values()], [point.simulated for point in points.values()], s=14)
    for name, point in points.items():
        axes.annotate(name, (point.measured, point.simulated), (3, 3), textcoords="offset points", fontsize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ends[0], ends[1])
    axes.set_ylim(ends[0], ends[1])
    axes.set_xlabel("measured")
