"""The figure behind an answer: a panel for each number. Lines where arms have a place on an axis, dots where not."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pdsim.ask.columns import COLUMNS, Column
from pdsim.ask.question import Arm, Question
from pdsim.ask.study import Study
from pdsim.metrics.plots import COLORS, LINES

_WIDE = 8
"""Largest by smallest place: from here on the axis is logarithmic."""


def draw(question: Question, study: Study, winner: str) -> Figure:
    """Whiskers are 95 % intervals. What is saturated has no latency; the recommended arm is filled."""
    columns = [COLUMNS[name] for name in question.columns]
    shown = [column for column in columns if any(column.value(study, label) for label in study.labels())]
    on_axis = all(arm.x is not None for arm in study.arms)
    height = 3.2 if on_axis else 1.4 + 0.34 * len(study.arms)
    figure = Figure(figsize=(1.5 + 2.7 * len(shown), height), layout="constrained")
    panels: Any = figure.subplots(1, len(shown), squeeze=False, sharey=not on_axis)
    for panel, column in zip(panels[0], shown, strict=True):
        (_draw_lines if on_axis else _draw_dots)(panel, study, column, winner)
        panel.set_title(column.title, fontsize=9)
        panel.tick_params(labelsize=8)
        if on_axis:
            panel.set_xlabel(question.axis, fontsize=8)
    if on_axis and len({arm.series for arm in study.arms}) > 1:
        panels[0][0].legend(fontsize=7)
    figure.suptitle(question.asks, fontsize=10)
    return figure


def _draw_dots(panel: Any, study: Study, column: Column, winner: str) -> None:
    for row, arm in enumerate(study.arms):
        value = column.value(study, arm.label)
        if value is None:
            why = "failed" if study.error(arm.label) else "saturated" if study[arm.label].is_saturated else "-"
            panel.text(0.02, row, why, transform=panel.get_yaxis_transform(), fontsize=7, va="center", color="grey")
            continue
        fill = COLORS[0] if arm.label == winner else "white"
        panel.errorbar(value.mean, row, xerr=value.half_width, fmt="o", color=COLORS[0], mfc=fill, capsize=3)
    panel.set_yticks(range(len(study.arms)), [arm.label for arm in study.arms])
    panel.set_ylim(len(study.arms) - 0.5, -0.5)
    panel.margins(x=0.1)
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.3)


def _draw_lines(panel: Any, study: Study, column: Column, winner: str) -> None:
    for i, series in enumerate(dict.fromkeys(arm.series for arm in study.arms)):
        color = COLORS[i % len(COLORS)]
        arms = sorted((arm for arm in study.arms if arm.series == series), key=_place)
        found = [(_place(arm), value) for arm in arms if (value := column.value(study, arm.label)) is not None]
        xs, means = [x for x, _ in found], [value.mean for _, value in found]
        halves = [value.half_width or 0.0 for _, value in found]
        panel.errorbar(
            xs, means, halves, color=color, ls=LINES[i % len(LINES)], marker="o", ms=4, mfc="white", label=series
        )
        if (best := study.arm(winner)) in arms and (value := column.value(study, winner)) is not None:
            panel.plot([_place(best)], [value.mean], "o", color=color)
    places = sorted({_place(arm) for arm in study.arms})
    if places[0] > 0 and places[-1] / places[0] >= _WIDE:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(places, [f"{place:g}" for place in places], rotation=45)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _place(arm: Arm) -> float:
    return arm.x or 0.0
