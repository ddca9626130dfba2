"""The look of figures, and their SVG that follows the page: light or dark, in its font and size."""

import re
from io import StringIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pdsim.metrics.plots import COLORS

INK, MUTED, GRID = "#1f2328", "#6b7280", "#d5d9e0"
FULL, HALF = 11.0, 5.4
"""Widths, inches: of a figure that takes the page's width, and of one beside another."""
SERIES = COLORS[:6]
"""Colours that are seen on white and on black."""

_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    "#332288": "indigo",
    "#117733": "green",
    "#882255": "wine",
    "#0072B2": "blue",
}
"""Colours that are not the same on light and on dark: the page defines them."""
_LETTERS_AN_INCH, _LETTERS_OF_A_HANDLE = 13, 5


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def tidy(ax: Any, x_title: str = "", y_title: str = "", *, grid: str = "both") -> None:
    """Titles, a light grid and no box."""
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
    """Above the axes, so that it hides nothing, in as many columns as fit its width."""
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
    """An <svg> element to be written into a page. Equal figures give equal text; `name` keeps its ids apart."""
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
