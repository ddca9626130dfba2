"""Draws the figure of an answer, with one panel per number. Candidates are points of a line if the answer has an axis
for their positions, otherwise single dots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pdsim.metrics.plots import COLORS
from pdsim.study.questions.rows import SATURATED, AnswerRow

_WIDE = 8
"""The axis is logarithmic if its largest position is at least this many times the smallest, which must be above 0."""


def draw(asks: str, titles: Mapping[str, str], rows: Sequence[AnswerRow], *, winner: str, axis: str) -> Figure:
    """Draws the figure of an answer, with one panel for each number that a candidate has. Whiskers are half-widths of
    estimates (Estimate.half_width), and the winner's mark is filled. A saturated candidate has no mark in a panel that
    shows a latency. asks: the question, as title of the figure. titles: title of each panel, by the name of its number.
    axis: title of the horizontal axis; empty: candidates are listed one below another. rows: the candidates. winner:
    label of the candidate that the answer recommends or is about.
    """
    shown = [name for name in titles if any(row.estimates[name] for row in rows)]
    height = 3.2 if axis else 1.4 + 0.34 * len(rows)
    figure = Figure(figsize=(1.5 + 2.7 * len(shown), height), layout="constrained")
    panels: Any = figure.subplots(1, len(shown), squeeze=False, sharey=not axis)
    for panel, name in zip(panels[0], shown, strict=True):
        (_draw_line if axis else _draw_dots)(panel, rows, winner, name)
        panel.set_title(titles[name], fontsize=9)
        panel.tick_params(labelsize=8)
        panel.set_xlabel(axis, fontsize=8)
    figure.suptitle(asks, fontsize=10)
    return figure


def _draw_dots(panel: Any, rows: Sequence[AnswerRow], winner: str, name: str) -> None:
    for place, row in enumerate(rows):
        value = row.estimates[name]
        if value is None:
            style = {"fontsize": 7, "va": "center", "color": "grey"}
            panel.text(0.02, place, _why_none(row), transform=panel.get_yaxis_transform(), **style)
            continue
        fill = COLORS[0] if row.arm == winner else "white"
        panel.errorbar(value.mean, place, xerr=value.half_width, fmt="o", color=COLORS[0], mfc=fill, capsize=3)
    panel.set_yticks(range(len(rows)), [row.arm for row in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0, 1.08 * max(panel.get_xlim()))
    panel.grid(axis="x", alpha=0.3)


def _why_none(row: AnswerRow) -> str:
    if row.remark == SATURATED:
        return SATURATED
    return "-" if any(row.estimates.values()) else "failed"


def _draw_line(panel: Any, rows: Sequence[AnswerRow], winner: str, name: str) -> None:
    """Draws one number of the candidates as a line, with their position on the axis as x. Candidates without a position
    are left out. name: name of the number. panel: matplotlib's axes. winner: label of the candidate whose mark is
    filled.
    """
    places = [row.x for row in rows if row.x is not None]
    found = [(row.x, value) for row in rows if row.x is not None and (value := row.estimates[name]) is not None]
    means = [value.mean for _, value in found]
    halves = [value.half_width or 0.0 for _, value in found]
    panel.errorbar([x for x, _ in found], means, halves, color=COLORS[0], marker="o", ms=4, mfc="white")
    for row in rows:
        if row.arm == winner and row.x is not None and (value := row.estimates[name]) is not None:
            panel.plot([row.x], [value.mean], "o", color=COLORS[0], zorder=3)
    if places[-1] >= _WIDE * places[0] > 0:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(places, [f"{x:g}" for x in places], rotation=45)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
