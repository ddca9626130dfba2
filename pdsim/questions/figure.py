"""The figure behind an answer: a panel for each number. Lines where arms have a place on an axis, dots where not."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pdsim.metrics.plots import COLORS
from pdsim.questions.columns import COLUMNS, Column
from pdsim.questions.question import Question, place_of
from pdsim.questions.study import Study

_WIDE = 8
"""Largest by smallest place: from here on the axis is logarithmic."""


def draw(question: Question, study: Study, winner: str) -> Figure:
    """Whiskers are 95 % intervals. What is saturated has no latency; the recommended arm is filled."""
    columns = [COLUMNS[name] for name in question.columns]
    shown = [column for column in columns if any(column.value(study, label) for label in study.labels())]
    height = 3.2 if question.axis else 1.4 + 0.34 * len(study.arms)
    figure = Figure(figsize=(1.5 + 2.7 * len(shown), height), layout="constrained")
    panels: Any = figure.subplots(1, len(shown), squeeze=False, sharey=not question.axis)
    for panel, column in zip(panels[0], shown, strict=True):
        (_draw_line if question.axis else _draw_dots)(panel, study, column, winner)
        panel.set_title(column.title, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.set_xlabel(question.axis, fontsize=8)
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
    panel.set_xlim(0, 1.08 * max(panel.get_xlim()))
    panel.grid(axis="x", alpha=0.3)


def _draw_line(panel: Any, study: Study, column: Column, winner: str) -> None:
    """Over the arms that have a place on the axis."""
    arms = sorted((arm for arm in study.arms if arm.x is not None), key=place_of)
    found = [(arm, value) for arm in arms if (value := column.value(study, arm.label)) is not None]
    means = [value.mean for _, value in found]
    halves = [value.half_width or 0.0 for _, value in found]
    panel.errorbar([place_of(arm) for arm, _ in found], means, halves, color=COLORS[0], marker="o", ms=4, mfc="white")
    for arm, value in found:
        if arm.label == winner:
            panel.plot([place_of(arm)], [value.mean], "o", color=COLORS[0], zorder=3)
    places = [place_of(arm) for arm in arms]
    if places[-1] >= _WIDE * places[0] > 0:
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(places, [f"{x:g}" for x in places], rotation=45)
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
