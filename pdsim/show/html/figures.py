"""Draws the figures of a page as SVG, in the colours and fonts of the page.

Figures of many points show trade-offs between metrics, the best points, and how much each field matters.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pdsim.dataclass import dataclass
from pdsim.metrics.plots import COLORS
from pdsim.metrics.summary_rows import signed

INK, MUTED, GRID = "#1f2328", "#6b7280", "#d5d9e0"
FULL, HALF = 11.0, 5.4
"""Widths of figures in inches: over the page's whole width, and over half of it, next to another figure."""
SERIES = COLORS[:6]
"""Colours of series, which can be seen on white and on black."""

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    "#332288": "indigo",
    "#117733": "green",
    "#882255": "wine",
    "#0072B2": "blue",
}
"""Colours in a figure, each with the CSS variable that takes its place on the page. The light and the dark theme set
the variables.
"""
_LETTERS_AN_INCH, _LETTERS_OF_A_HANDLE = 13, 5
_MANY = 24
"""Figures of trade-offs with more points than this have labels at points of the Pareto front only, at most at this
many.
"""
_MARKS = "osD^vPX*"

_LITTLE = 0.01
"""If the margin beyond the bars of a tornado figure is below this relative change, the percentages at the axis have
one decimal, otherwise none. Also the margin if all bars are 0.
"""


@dataclass(frozen=True)
class FigureBlock:
    """A figure, with a line that says how to read it."""

    name: str
    """Name of the figure in letters, digits and hyphens. No other figure of the page has this name."""
    title: str
    caption: str
    figure: Figure
    wide: bool = True
    """True: the figure is as wide as the page. Otherwise two figures stand side by side."""
    narrow: bool = False
    """True: the figure fits the screen of a telephone."""

    @property
    def svg(self) -> str:
        return to_svg(self.figure, self.name)


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def tidy(ax: Any, x_title: str = "", y_title: str = "", *, grid: str = "both") -> None:
    """Sets the titles of the axes and a light grid, and hides all borders of the plot but the bottom one. grid: axes
    with grid lines: x, y, both or none.
    """
    ax.set_xlabel(x_title, color=MUTED, fontsize=8.5)
    ax.set_ylabel(y_title, color=MUTED, fontsize=8.5)
    ax.tick_params(colors=MUTED, labelsize=8, length=0)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    ax.set_axisbelow(True)
    ax.grid(visible=False)
    if grid != "none":
        ax.grid(axis=grid, color=GRID, lw=0.6)
    ax.set_facecolor("none")


def legend(ax: Any) -> None:
    """Draws a legend above the axes, with as many columns as the width allows."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        return
    width = ax.figure.get_figwidth() / ax.get_subplotspec().get_gridspec().ncols
    columns = int(_LETTERS_AN_INCH * width / (max(map(len, labels)) + _LETTERS_OF_A_HANDLE))
    style = {"fontsize": 8, "frameon": False, "labelcolor": MUTED, "handlelength": 1.4, "columnspacing": 1.2}
    place = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}
    ax.legend(handles, labels, ncols=min(max(1, columns), len(labels)), **place, **style)


def percent_axis(axis: Any, *, decimals: int = 0) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{decimals}%}"))
    axis.set_major_locator(MaxNLocator(5))


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element of a page. name: makes the element's ids unique on the page. Equal figures with
    equal names give equal text.
    """
    text = StringIO()
    figure.patch.set_alpha(0)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg)
    svg = re.sub(r'id="|url\(#|xlink:href="#', lambda found: f"{found[0]}{name}-", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"(\d+\.\d{2})\d+", r"\1", svg)
    for color, variable in _VARIABLES.items():
        svg = re.sub(rf"(?<=: ){color}\b", f"var(--{variable})", svg, flags=re.IGNORECASE)
    return svg


@dataclass(frozen=True)
class Dot:
    """A point of a figure. half_y: half of the confidence interval of y; None: y has no interval."""

    x: float
    y: float
    label: str = ""
    """Text next to the point; a figure with many points leaves some texts out. Empty: the point has no text."""
    series: str = ""
    """Name of the line and colour to which the point belongs. Empty: there is one series."""
    half_y: float | None = None


_TRADES = (
    ("pareto", "speed for each user", "tokens/s of one user", "mean_tpot_ms", True),
    ("latency-throughput", "latency", "median latency, s", "median_e2e_latency_ms", False),
    ("ttft-throughput", "TTFT", "p99 TTFT, s", "p99_ttft_ms", False),
)
"""For each figure of trade-offs: name, title, title of the x axis, the summary field in ms from which x is computed,
and a flag. True: x is 1000 / field, and larger x is better. False: x is the field in s, and smaller x is better.
"""


def trade_offs(dots: Callable[[str], Sequence[Dot]], y_title: str, joined: str) -> list[FigureBlock]:
    """Figures with throughput or another number on the y axis, and a latency or its inverse on the x axis.

    dots: gives the points of a summary field, with the latency in ms as x. A figure is drawn if all points have its
    latency. joined: says in the caption which points the line joins.
    """
    made = []
    for name, title, x_title, field, more_x in _TRADES:
        found = dots(field)
        if all(dot.x for dot in found):
            placed = [replace(dot, x=1e3 / dot.x if more_x else dot.x / 1e3) for dot in found]
            caption = f"Up and {'right' if more_x else 'left'} is better; the line joins {joined}."
            figure = _trade_off(placed, x_title, y_title, more_x=more_x)
            made.append(FigureBlock(name, f"Throughput against {title}", caption, figure, wide=False))
    return made


def _trade_off(dots: Sequence[Dot], x_title: str, y_title: str, *, more_x: bool) -> Figure:
    """Figure with points, and with a line through those on the Pareto front. Larger y is better. more_x: True: larger x
    is better, too.
    """
    figure = new_figure(HALF, 3.5)
    ax: Any = figure.subplots()
    best = sorted(frontier(dots, more_x=more_x), key=lambda dot: dot.x)
    ax.plot([dot.x for dot in best], [dot.y for dot in best], color=MUTED, lw=1, ls="--", zorder=1)
    for i, name in enumerate(dict.fromkeys(dot.series for dot in dots)):
        own = [dot for dot in dots if dot.series == name]
        style = {"color": SERIES[i % len(SERIES)], "marker": _MARKS[i % len(_MARKS)], "ms": 5.5, "ls": "none"}
        ax.plot([dot.x for dot in own], [dot.y for dot in own], label=name or None, **style)
    for dot in dots if len(dots) <= _MANY else best[:_MANY]:
        near = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 7.5, "color": MUTED}
        ax.annotate(dot.label, (dot.x, dot.y), **near)
    tidy(ax, x_title, y_title)
    ax.set(xlim=(0, 1.12 * max(dot.x for dot in dots)), ylim=(0, 1.12 * max(dot.y for dot in dots)))
    legend(ax)
    return figure


def frontier(dots: Sequence[Dot], *, more_x: bool) -> list[Dot]:
    """Dots on the Pareto front: no other dot is better in one coordinate and at least equal in the other. more_x: True:
    larger x is better; False: smaller.
    """
    sign = 1 if more_x else -1

    def beaten(dot: Dot) -> bool:
        return any(
            (other.x, other.y) != (dot.x, dot.y) and sign * other.x >= sign * dot.x and other.y >= dot.y
            for other in dots
        )

    return [dot for dot in dots if not beaten(dot)]


def lines(dots: Sequence[Dot], x_title: str, y_title: str, *, shares: bool = False) -> Figure:
    """Figure with a line for each series. A band around the line shows the 95 % confidence interval of points that have
    one. shares: True: y is a share, from 0 to 1.
    """
    figure = new_figure(HALF, 3.5)
    ax: Any = figure.subplots()
    for i, name in enumerate(dict.fromkeys(dot.series for dot in dots)):
        own = sorted((dot for dot in dots if dot.series == name), key=lambda dot: dot.x)
        x, y = np.array([d.x for d in own]), np.array([d.y for d in own])
        half = np.array([d.half_y or 0.0 for d in own])
        color = SERIES[i % len(SERIES)]
        ax.plot(x, y, marker=_MARKS[i % len(_MARKS)], ms=4.5, lw=1.5, color=color, label=name or None)
        if half.any():
            ax.fill_between(x, y - half, y + half, color=color, alpha=0.18, lw=0)
    tidy(ax, x_title, y_title)
    ax.set_ylim(0, 1.03 if shares else None)
    if shares:
        percent_axis(ax.yaxis)
    legend(ax)
    return figure


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    row_title: str,
    column_title: str,
    title: str,
) -> Figure:
    """Figure with a coloured cell for each row and column, and the value in the cell. None: no value; the cell is
    hatched.
    """
    figure = new_figure(HALF, max(2.2, 1.3 + 0.42 * len(rows)))
    ax: Any = figure.subplots()
    grid = np.array([[np.nan if value is None else value for value in row] for row in values], dtype=float)
    most = np.nanmax(grid) if np.isfinite(grid).any() else 1.0
    drawn = ax.imshow(grid, cmap="cividis", aspect="auto", vmin=0, vmax=most)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is None:
                cell = {"facecolor": "none", "edgecolor": GRID, "hatch": "////", "lw": 0}
                ax.fill_between([j - 0.5, j + 0.5], i - 0.5, i + 0.5, **cell)
            else:
                dark = value < 0.55 * most
                style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "#ffffff" if dark else "#111111"}
                ax.text(j, i, f"{value:,.3g}", **style)
    tidy(ax, column_title, row_title, grid="none")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.spines["bottom"].set_visible(False)
    ax.set_title(title, fontsize=8.5, color=MUTED, loc="left")
    drawn.set_rasterized(True)
    return figure


@dataclass(frozen=True)
class Bar:
    """The effect of one field or resource on a metric. low, high: relative changes of the metric at the two ends of the
    bar; low need not be the smaller one.
    """

    name: str
    """Name of the changed field or resource."""
    low: float
    high: float


def tornado(panels: Mapping[str, Sequence[Bar]]) -> Figure:
    """Figure with a panel for each metric. Each Bar is a row of the panel, drawn from 0 to low and from 0 to high. The
    row with the largest absolute change is on top.
    """
    longest = max(len(bars) for bars in panels.values())
    figure = new_figure(FULL, 1.6 + 0.28 * longest)
    axes: Any = figure.subplots(1, len(panels), squeeze=False)
    for ax, (title, bars) in zip(axes[0], panels.items(), strict=True):
        order = sorted(bars, key=lambda bar: max(abs(bar.low), abs(bar.high)))
        for row, bar in enumerate(order):
            for end in (bar.low, bar.high):
                color = SERIES[0] if end > 0 else SERIES[5]
                ax.barh(row, end, color=color, height=0.62)
            far = max((bar.low, bar.high), key=abs)
            side = {"ha": "left" if far >= 0 else "right", "xytext": (4 if far >= 0 else -4, 0)}
            text = {"va": "center", "fontsize": 7.5, "color": MUTED, "textcoords": "offset points"}
            ax.annotate(f"{signed(100 * far)}%", (far, row), **side, **text)
        ax.axvline(0, color=MUTED, lw=0.8)
        tidy(ax, f"change of {title}", grid="x")
        ax.set_yticks(range(len(order)), [bar.name for bar in order])
        ax.tick_params(axis="y", labelcolor=INK)
        ends = [0.0, *(end for bar in order for end in (bar.low, bar.high))]
        room = 0.3 * (max(ends) - min(ends)) or _LITTLE
        ax.set_xlim(min(ends) - room, max(ends) + room)
        percent_axis(ax.xaxis, decimals=int(room < _LITTLE))
    return figure
