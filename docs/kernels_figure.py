"""Draws docs/images/kernels-h200.png from the rows in kernels/measured: python docs/kernels_figure.py"""

# ruff: noqa: INP001  a script

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "kernels" / "measured"
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (MEASURED / name).open() as file:
        return list(csv.DictReader(file))


def megabytes(row: Row) -> float:
    return float(row["payload_bytes"]) / 1e6


def share(row: Row) -> float:
    return 100 * float(row["copy_fraction"])


def points(axes: Axes, chosen: list[Row], label: str, color: str) -> None:
    axes.scatter([megabytes(row) for row in chosen], [share(row) for row in chosen], s=9, color=color, label=label)


def shares(axes: Axes, measured: list[Row], side: str) -> None:
    """Draws the share of copy bandwidth over the payload, for every model, page size and target layout. side: gather or
    scatter.
    """
    for variant, label, color in (("sglang", "SGLang", "tab:orange"), ("fused", "pdkernels", "tab:blue")):
        points(axes, [r for r in measured if r["kernel"] == side and r["variant"] == variant], label, color)
    axes.set(
        title=side.capitalize(), xscale="log", ylim=(0, 105), xlabel="payload, MB", ylabel="share of copy bandwidth, %"
    )
    axes.legend(loc="lower right")


def few_programs(axes: Axes, measured: list[Row]) -> None:
    """Draws the share of copy bandwidth over the number of programs that run at a time."""
    for side, color in (("gather", "tab:blue"), ("scatter", "tab:green")):
        chosen = [r for r in measured if r["variant"] == "few_programs" and r["kernel"] == side]
        axes.plot([int(r["programs"]) for r in chosen], [share(r) for r in chosen], "o-", color=color, label=side, ms=4)
    axes.axvline(132, color="0.7", lw=1)
    axes.text(140, 4, "multiprocessors", color="0.4", fontsize=8)
    axes.set(title="Few programs", xscale="log", ylim=(0, 105), xlabel="programs", ylabel="share of copy bandwidth, %")
    axes.legend(loc="upper left")


def peers(axes: Axes, measured: list[Row]) -> None:
    """Draws, for each way to a GPU beside this one, the time until the part of one source rank is in the target's
    pages.
    """
    labels = {"gather_copy_scatter": "gather, copy, scatter", "peer_copy": "copy alone", "fused": "push"}
    series: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in measured:
        if row["variant"] in labels and row["model"] == "llama3.1-8b-bf16" and row["page_size"] == "16":
            series[row["variant"]].append((megabytes(row), float(row["time_us"])))
    for variant, label in labels.items():
        axes.plot(*zip(*series[variant], strict=True), "o-", label=label, ms=4)
    axes.set(title="To another GPU over NVLink", xscale="log", yscale="log", xlabel="payload, MB", ylabel="time, us")
    axes.legend(loc="upper left")


def main() -> None:
    h200, pair = rows("h200.csv"), rows("h200-x2.csv")
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    panels: list[Callable[[Axes], None]] = [
        lambda axes: shares(axes, h200, "gather"),
        lambda axes: shares(axes, h200, "scatter"),
        lambda axes: few_programs(axes, h200),
        lambda axes: peers(axes, pair),
    ]
    for draw, axes in zip(panels, grid.flat, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "images" / "kernels-h200.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
