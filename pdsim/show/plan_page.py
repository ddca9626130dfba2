"""The page of a plan: what to take, what else was near, and how firm it stands."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdsim.inputs import read_json
from pdsim.metrics.summary_rows import significant
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.figures import INK, MUTED, FigureBlock, new_figure, percent_axis, tidy
from pdsim.show.page import Card, Cell, Page, Table, cell
from pdsim.study.planning.plan import REMARKS

FILE = "plan.json"

_COLORS = {"misses it": "#882255", "the plan": "#117733", "as cheap": "#0072B2", "safe": "#44AA99", "faster": "#332288"}
_MOST_SHOWN = 2.0
_WIDTH = 3.6
"""Inches, of which a telephone shows all."""

Row = Mapping[str, Any]


def plan_page(folder: Path) -> Page:
    """Raises ConfigError if what the folder has is no plan."""
    path = folder / FILE
    try:
        plan: dict[str, Any] = read_json(path)
        rows = list(_rows(plan))
        return Page(
            title=folder.absolute().name,
            subtitle=f"{plan['about']}; {plan['tried']:,} of {plan['candidates']:,} clusters simulated",
            answer=plan["text"],
            detail=" ".join(filter(None, [f"SLO: {plan['slo']}.", plan["safety"]])),
            cards=_cards(plan),
            figures=_figures(rows),
            tables=[_clusters(plan["terms"], rows), *_classes(plan["plan"]), *_notes(plan["notes"])],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ConfigError(f"{path}: no plan of this version ({wrong!r})") from None


def _rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, Row]]:
    """Rows by price, with what is said of each."""
    for kind, remark in REMARKS.items():
        found = plan[kind] or []
        rows: list[Row] = found if isinstance(found, list) else [found]
        for row in rows:
            yield remark, row


def _cards(plan: Mapping[str, Any]) -> list[Card]:
    chosen = plan["plan"]
    if chosen is None:
        return []
    cards = [Card("GPUs", str(chosen["gpus"])), Card("price an hour", f"{chosen['price_per_h']:g}")]
    if chosen["kw"] is not None:
        cards.append(Card("GPU boards", f"{chosen['kw']:.1f} kW", "at most"))
    cards += [Card(term["name"], f"{term['value']:.4g} {term['unit']}", _asked(term)) for term in chosen["terms"]]
    goodput = f"{chosen['goodput_per_s']:.3g} requests/s"
    cards.append(Card("within all limits", f"{chosen['attained']:.2%}", goodput))
    if plan["load_factor"] is not None:
        cards.append(Card("takes", f"{plan['load_factor']:g} x", "this load"))
    return cards


def _figures(rows: list[tuple[str, Row]]) -> list[FigureBlock]:
    """The percentile that is nearest to its limit, of each cluster whose percentiles are known."""
    known = [(remark, row, worst) for remark, row in rows if (worst := _worst(row)) is not None]
    if not known:
        return []
    figure = new_figure(_WIDTH, 0.6 + 0.55 * len(known))
    ax: Any = figure.subplots()
    for place, (remark, row, worst) in enumerate(reversed(known)):
        ax.barh(place, min(worst, _MOST_SHOWN), height=0.25, color=_COLORS[remark])
        ax.vlines(1, place - 0.2, place + 0.2, color=INK, lw=1.5)
        label = f"{worst:.0%}, {row['price_per_h']:g} an hour: {remark}"
        for text, height, color in ((row["cluster"], 18, INK), (label, 8, MUTED)):
            ax.annotate(text, (0, place), xytext=(0, height), textcoords="offset points", color=color, fontsize=8)
    tidy(ax, "the percentile nearest to its limit, of that limit", grid="x")
    ax.set_yticks([])
    ax.set_ylim(-0.3, len(known))
    ax.set_xlim(0, _MOST_SHOWN)
    percent_axis(ax.xaxis)
    caption = f"Left of the line a cluster meets the SLO. Bars end at {_MOST_SHOWN:.0%}."
    return [FigureBlock("clusters", "How near to the SLO", caption, figure, narrow=True)]


def _worst(row: Row) -> float | None:
    """The worst of the limits; None: it is not known, or has no end."""
    shares = [term["of_limit"] for term in row["terms"]]
    return None if not shares or None in shares else max(shares)


def _clusters(terms: list[str], rows: list[tuple[str, Row]]) -> Table:
    lines = [
        [
            Cell(row["cluster"]),
            cell(row["gpus"]),
            cell(row["price_per_h"]),
            *(_found(row, term) for term in terms),
            cell(row["attained"], ".1%"),
            Cell(remark, tone="good" if row["meets"] else "bad"),
            Cell(row["limit"]["resource"] if row.get("limit") else ""),
        ]
        for remark, row in rows
    ]
    columns = ["cluster", "GPUs", "an hour", *terms, "within all", "which", "what limits it"]
    return Table("Clusters", columns, lines, stacks=True)


def _classes(chosen: Row | None) -> list[Table]:
    """Classes of requests, as the plan serves them."""
    rows = [
        [
            Cell(name or "none"),
            cell(one["num_requests"], ","),
            cell(one["share"], ".2%"),
            cell(one["goodput_per_s"]),
        ]
        for name, one in ((chosen or {}).get("classes") or {}).items()
    ]
    columns = ["class", "requests", "within all limits", "goodput, requests/s"]
    return [Table("Classes of requests", columns, rows, stacks=True)] if rows else []


def _found(row: Row, name: str) -> Cell:
    term = next((term for term in row["terms"] if term["name"] == name), None)
    if term is None or term["value"] is None:
        return Cell("")
    return Cell(f"{significant(term['value'])} {term['unit']}", term["value"], "good" if term["met"] else "bad")


def _asked(term: Row) -> str:
    return f"{'at least' if term['unit'] == '%' else 'at most'} {term['limit']:g} {term['unit']}"


def _notes(notes: list[str]) -> list[Table]:
    return [Table("How firm it stands", ["found"], [[Cell(note)] for note in notes])] if notes else []
