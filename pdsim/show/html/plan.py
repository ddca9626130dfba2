"""Makes the HTML page of a plan: question, answer, prices against latencies, the period in which most requests wait,
and alternatives.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.inputs import read_json
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.html.figures import INK, MUTED, FigureBlock, legend, new_figure, tidy
from pdsim.show.html.page import Card, Cell, Page, Table, TextList, cell
from pdsim.study.verdict.readings import Reading

FILE = "plan.json"

_PLAN, _MEETS, _MISSES = "#117733", "#0072B2", "#882255"
_WIDTH, _HEIGHT = 4.2, 3.0
"""Width and height in inches of a figure that takes half of a laptop's page, or a phone's whole width."""

Row = Mapping[str, Any]


def plan_page(folder: Path) -> Page:
    """The page of a plan, made from the plan's folder. Raises ConfigError if the folder has no plan."""
    path = folder / FILE
    try:
        plan: dict[str, Any] = read_json(path)
        return Page(
            title=f"Which cluster should serve {plan['model']}?",
            subtitle=f"{plan['load']}; SLO: {plan['slo']}",
            answer=plan["headline"],
            detail=" ".join(filter(None, [plan["words"], plan["saving"], _confidence(plan)])),
            cards=_cards(plan),
            figures=_figures(plan),
            tables=[_limits(plan), _clusters(plan), *_classes(plan["plan"])],
            lists=_lists(plan),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ConfigError(f"{path}: no plan of this version ({wrong!r})") from None


def _confidence(plan: Row) -> str:
    if plan["plan"] is None:
        return ""
    said = f"Confidence: {plan['confidence']['word']}. {plan['confidence']['reason']}"
    measure = plan["measure"]
    if measure is None:
        return said
    return f"{said} To be sure, measure a server for {measure['minutes']} minutes: {measure['command']}"


def _readings(row: Row) -> list[Reading]:
    return [Reading.from_json(one) for one in (*row["limits"], *row["terms"])]


def _cards(plan: Row) -> list[Card]:
    chosen = plan["plan"]
    if chosen is None:
        return []
    cards = [Card("GPUs", str(chosen["gpus"]))]
    if plan["currency"]:
        cards.append(Card("price", plan["price"], "an hour"))
    cards += [Card(one.name, one.value_text, f"limit {one.limit_text}") for one in _readings(chosen)]
    if plan["load_factor"] is not None:
        cards.append(Card("load it can take", f"{plan['load_factor']:g} x", plan["breaks"]))
    return [*cards, Card("confidence", plan["confidence"]["word"])]


def _rows(plan: Row) -> list[Row]:
    return [*([] if plan["plan"] is None else [plan["plan"]]), *plan["alternatives"]]


def _prices(plan: Row) -> list[FigureBlock]:
    """For each time that the SLO limits, such as p99 TTFT: a figure with this time and the price of each cluster.
    Clusters for which this time is infinite are left out.
    """
    names = list(dict.fromkeys(one.name for row in _rows(plan) for one in _readings(row) if not one.is_share))
    figures = []
    for place, name in enumerate(names):
        found = [(row, one) for row in _rows(plan) for one in _readings(row) if one.name == name]
        known = [(row, one) for row, one in found if one.value < float("inf")]
        if known:
            title = f"Price against {name}"
            line = "The solid line joins those that are faster than every cheaper one."
            caption = f"Clusters below the dashed line keep the limit. {line}"
            figure = _price_figure(plan, known)
            figures.append(FigureBlock(f"price-{place}", title, caption, figure, wide=False, narrow=True))
    return figures


def _price_figure(plan: Row, known: Sequence[tuple[Row, Reading]]) -> Any:
    figure = new_figure(_WIDTH, _HEIGHT)
    ax: Any = figure.subplots()
    unit, scale = ("s", 1e3) if max(one.value for _, one in known) >= 1e3 else ("ms", 1.0)  # noqa: PLR2004
    front = _front([(row["price_per_h"], one.value / scale) for row, one in known])
    ax.step([x for x, _ in front], [y for _, y in front], where="post", color=MUTED, lw=0.8)
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, one in known:
        is_plan = plan["plan"] is not None and row["cluster"] == plan["plan"]["cluster"]
        kind = "the plan" if is_plan else "meets the SLO" if row["meets"] else "misses the SLO"
        groups.setdefault(kind, []).append((row["price_per_h"], one.value / scale))
    for kind, (color, marker) in {
        "the plan": (_PLAN, "*"),
        "meets the SLO": (_MEETS, "o"),
        "misses the SLO": (_MISSES, "x"),
    }.items():
        if kind in groups:
            xs, ys = zip(*groups[kind], strict=True)
            ax.scatter(xs, ys, color=color, marker=marker, s=110 if kind == "the plan" else 36, label=kind, zorder=3)
    ax.axhline(known[0][1].limit / scale, color=INK, lw=1, ls="--")
    price = f"{plan['currency']} an hour" if plan["currency"] else "GPUs"
    tidy(ax, price, f"{known[0][1].name}, {unit}")
    ax.set_ylim(0, None)
    ax.margins(x=0.15)
    legend(ax)
    return figure


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (price, latency) that have a lower latency than all cheaper points, cheapest first."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def _figures(plan: Row) -> list[FigureBlock]:
    """Figures of prices, and of load and queue over time if the plan has these numbers. With load and queue, the number
    of figures is even, because the page shows figures in pairs.
    """
    prices, found = _prices(plan), plan["busiest"]
    if found is None:
        return prices
    panels = [("Load", _draw_load), ("Queue", _draw_queue)]
    groups = [panels] if len(prices) % 2 else [[panel] for panel in panels]
    begin = f"{found['times_s'][0]:,.0f} s"
    for group in groups:
        figure = new_figure(_WIDTH, _HEIGHT)
        axes: Any = figure.subplots(len(group), 1, sharex=True, squeeze=False)
        for (_, draw), ax in zip(group, axes[:, 0], strict=True):
            draw(ax, found)
        axes[-1, 0].set_xlabel("minutes", color=MUTED, fontsize=8.5)
        title = f"{' and '.join(name for name, _ in group).capitalize()} in the worst minutes"
        caption = f"Around the plan's longest queue, from {begin} of the run on. Waiting requests have no token yet."
        prices.append(FigureBlock(f"worst-{group[0][0].lower()}", title, caption, figure, wide=False, narrow=True))
    return prices


def _draw_load(ax: Any, found: Row) -> None:
    ax.fill_between(_minutes(found), found["sent_per_s"], color=MUTED, alpha=0.5, lw=0, step="post")
    tidy(ax, "", "requests sent a second", grid="y")


def _draw_queue(ax: Any, found: Row) -> None:
    for name, color in (("waiting", _MISSES), ("decoding", _MEETS)):
        ax.plot(_minutes(found), found[name], color=color, lw=1.3, label=name)
    tidy(ax, "", "requests", grid="y")
    legend(ax)


def _minutes(found: Row) -> list[float]:
    return [(time_s - found["times_s"][0]) / 60 for time_s in found["times_s"]]


def _limits(plan: Row) -> Table:
    columns, rows = plan["limits_table"]
    return Table("Limits", ["metric", *columns[1:]], [[Cell(text) for text in row] for row in rows], stacks=True)


def _clusters(plan: Row) -> Table:
    rows = []
    for row in _rows(plan):
        price = [cell(row["price_per_h"], ",.2f")] if plan["currency"] else []
        values = {one.name: one for one in _readings(row)}
        tone = "good" if row["meets"] else "bad"
        cells = [_value(values.get(name)) for name in _names(plan)]
        rows.append(
            [Cell(row["cluster"]), cell(row["gpus"]), *price, *cells, Cell(row.get("why_not", "the plan"), tone=tone)]
        )
    prices = [f"{plan['currency']} an hour"] if plan["currency"] else []
    return Table("Clusters", ["cluster", "GPUs", *prices, *_names(plan), "why not"], rows, stacks=True)


def _names(plan: Row) -> list[str]:
    return list(dict.fromkeys(one.name for row in _rows(plan) for one in _readings(row)))


def _value(one: Reading | None) -> Cell:
    return Cell("") if one is None else Cell(one.value_text, one.value, "good" if one.is_met else "bad")


def _classes(chosen: Row | None) -> list[Table]:
    """A list with the table of the results of each class of requests. Empty list: no cluster meets the SLO, or requests
    have no classes. chosen: the plan's cluster with its results; None: no cluster meets the SLO.
    """
    rows = [
        [
            Cell(name or "none"),
            cell(one["num_requests"], ","),
            cell(one["share"], ".2%"),
            cell(one["goodput_per_s"]),
        ]
        for name, one in ((chosen or {}).get("classes") or {}).items()
    ]
    columns = ["class", "requests", "within all limits", "within all limits, requests/s"]
    return [Table("Classes of requests", columns, rows, stacks=True)] if rows else []


def _lists(plan: Row) -> list[TextList]:
    lists = [TextList("If a server fails", plan["if_a_server_fails"]), TextList("Details", plan["details"])]
    return [one for one in lists if one.items]
