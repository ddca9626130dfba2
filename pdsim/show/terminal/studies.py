"""Prints answers and sweeps: the best points, the reasons, and what failed."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill, wrap

from rich.console import JustifyMethod
from rich.table import Table

from pdsim.metrics.summary import STATISTICS
from pdsim.metrics.summary_rows import counted
from pdsim.show.terminal.layout import new_console, new_table, print_first_that_fits
from pdsim.show.terminal.run import is_of_kernels
from pdsim.show.terminal.screen import print_command, print_confidence, print_headline, print_sentence, screen_table
from pdsim.show.terminal.tables import print_ranges
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.study.points.estimate import Estimate
from pdsim.study.points.result import PointResult, SweepResult
from pdsim.study.points.tasks import shown
from pdsim.study.questions.answer import Answer
from pdsim.study.verdict.slo import Slo

_CAPTION = 78
"""Maximum number of characters of a line below a table."""
_LIMITS = ("", "limit", "predicted")
_LEAST = 4
"""Minimum number of columns with numbers. On a narrow terminal, confidence intervals are left out before these columns
are.
"""
_TITLE = 8
"""Maximum number of characters in a line of a column's title. Longer words are not broken."""

EXAMPLE = "pdsim ask pd-ratio --set model=qwen3-8b --set client.concurrency=32"


def print_questions(asks: Mapping[str, str]) -> None:
    """Prints all questions of `pdsim ask`, and one such command as an example. asks: text of each question, by its
    name.
    """
    console = new_console()
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, what in asks.items():
        table.add_row(name, what)
    console.print(table)
    console.print(f"\nFor example: {EXAMPLE}", highlight=False, soft_wrap=True)


def print_answer(made: Answer, *, details: bool = False) -> None:
    """Prints an answer: its text and load, the SLO's limits beside the values of the candidate `winner`, all
    candidates, warnings, and the confidence. details: True: also prints the answer's remarks.
    """
    console = new_console()
    print_headline(console, made.text)
    print_sentence(console, made.load)
    if made.limits:
        has_ranges = len(made.limits[0]) > len(_LIMITS)
        columns = [*_LIMITS, *(["range: fast to slow servers"] if has_ranges else [])]
        console.print(screen_table(columns, made.limits))
    most = len(made.columns)
    sizes = [(count, True) for count in range(most, _LEAST - 1, -1)] + [(count, False) for count in range(most, 0, -1)]
    print_first_that_fits([_table(made, count, spread=spread)] for count, spread in sizes)
    if made.as_good:
        print_sentence(console, f"As good, within chance: {', '.join(made.as_good)}.")
    if made.limit is not None:
        print_sentence(console, f"'{made.winner}': {made.limit}.")
    for warning in made.warnings:
        if not is_of_kernels(warning):
            print_sentence(console, f"Warning: {warning}.")
    console.print()
    print_confidence(console, made.confidence, made.measure)
    if details:
        console.print()
        for note in made.remarks():
            print_sentence(console, f"- {note}")
    else:
        console.print()
        print_command(console, "Say more:   the same command with --details")


def _table(made: Answer, count: int, *, spread: bool) -> Table:
    """Table of the candidates with the first `count` columns of numbers. spread: True: with confidence intervals."""
    rows = [
        [arm, *(cell if spread else cell.partition(" ±")[0] for cell in cells[:count]), remark or _mark(made, arm)]
        for arm, *cells, remark in map(made.cells, made.rows)
    ]
    table = _tight([*made.titles[: count + 1], made.titles[-1]], rows)
    _name_left_out(table, [made.title(name).replace(",", "") for name in made.columns[count:]])
    return table


def _mark(made: Answer, arm: str) -> str:
    return "the answer" if made.is_recommended and arm == made.winner else ""


def _name_left_out(table: Table, columns: Sequence[str]) -> None:
    if columns:
        table.caption_justify = "left"
        text = f"Left out at this width (--json has all): {', '.join(columns)}."
        table.caption = fill(text, _CAPTION, initial_indent="  ", subsequent_indent="  ")


def _tight(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A narrow table. The first and last column have words, all columns between them numbers. Titles of columns may
    have several lines.
    """
    table = new_table("")
    table.padding = (0, 1, 0, 0)
    for i, title in enumerate(titles):
        lines = wrap(title.replace(",", ""), _TITLE, break_long_words=False)
        justify: JustifyMethod = "right" if 0 < i < len(titles) - 1 else "left"
        table.add_column("\n".join(lines), justify=justify, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    return table


_MOST = 10
"""Maximum number of points in one table."""
_NARROW = 9
"""Maximum number of characters in a line of a narrow column title: as many as "instances" has."""
_POINT, _GPUS, _RATE = "point", "GPUs", "requests/s\nper GPU"
"""Columns that a narrow terminal leaves out, the last first. `point` is the number that names a row in the table of
ranges."""


def print_sweep(result: SweepResult) -> None:
    console = new_console()
    for warning in result.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    for name, slo in result.slos.items():
        best = result.best(name)
        num_met = sum(point.meets(name) for point in best)
        title = f"{name}: {slo}; {num_met} of {counted(len(result.points), 'point')} meet it"
        _print(title, best, name, slo)
        if same := result.as_good(name):
            numbers = ", ".join(str(point.number) for point in same)
            console.print(f"as good as point {best[0].number}, within chance: {numbers}", highlight=False)
    if not result.slos:
        _print(counted(len(result.points), "point"), [point for point in result.points if not point.error])
    print_ranges({str(point.number): point.ranges for point in result.points}, _POINT)
    if repeated := [str(point.number) for point in result.points if point.repeats]:
        runs = f"{len(JITTERS)} runs with messages up to {JITTERS[-1]:.0%} faster or slower"
        console.print(f"± of points {', '.join(repeated)}: the largest change in {runs}", highlight=False)
    for reason, count in result.failures.most_common():
        console.print(f"{count} failed: {reason}", highlight=False, markup=False)
    runs = f"{counted(result.num_computed, 'run')} computed, {result.num_kept} kept from before"
    if result.num_damaged:
        runs += f", {result.num_damaged} damaged and computed again"
    console.print(f"{runs}: {result.folder}", highlight=False, markup=False)


def _print(title: str, points: Sequence[PointResult], slo: str = "", wanted: Slo | None = None) -> None:
    """Prints a table of the first _MOST points. slo: name of the SLO whose goodput is shown; empty: no goodput is
    shown. wanted: the SLO of this name, which determines the percentile of the latencies shown.

    If the terminal is narrow, columns are left out, one by one. If this does not suffice, the same begins again with
    narrow titles and, after that, without confidence intervals.
    """
    points, num_more = points[:_MOST], len(points) - _MOST
    fields = list(dict.fromkeys(field for point in points for field in point.changes))
    more = f", {_MOST} of them shown" if num_more > 0 else ""
    percentile = _percentile(wanted)
    left_out = (_RATE, _GPUS) if any(point.ranges for point in points) else (_RATE, _GPUS, _POINT)

    def table(count: int, *, is_tight: bool = False, spread: bool = True) -> Table:
        made = new_table(title + more)
        if is_tight:
            made.padding = (0, 0)
        rows = [_cells(point, fields, slo, percentile) for point in points]
        columns = [column for column in rows[0] if column not in left_out[:count]] if rows else []
        for column in columns:
            head = _narrow(column) if is_tight else column
            made.add_column(head, justify="right" if column else "left", vertical="bottom")
        for row in rows:
            made.add_row(*(row[column] if spread else row[column].partition(" ±")[0] for column in columns))
        _name_left_out(made, [column.replace("\n", " ") for column in left_out[:count]])
        return made

    counts = range(len(left_out) + 1)
    forms: list[dict[str, bool]] = [{}, {"is_tight": True}, {"is_tight": True, "spread": False}]
    print_first_that_fits([table(count, **form)] for form in forms for count in counts)


def _cells(point: PointResult, fields: Iterable[str], slo: str, percentile: str) -> dict[str, str]:
    """Texts of a point by column title. fields: scenario fields to show. slo: name of the SLO whose goodput is shown;
    empty: none. percentile: statistic of the latencies, such as p99. Latencies of a saturated point are "-", because
    they grow with the length of the run.
    """
    cells = {_POINT: str(point.number)}
    cells |= {f.replace(".", ".\n"): shown(point.changes[f]) if f in point.changes else "" for f in fields}
    cells[_GPUS] = str(point.num_gpus)
    if slo:
        cells["goodput/s\nper GPU"] = _number(point.goodput_per_gpu(slo), 3)
        cells["attained"] = _percent(point.attainment(slo))
    cells[_RATE] = _number(point.per_gpu("request_throughput"), 3)
    for name, decimals in (("ttft", 0), ("tpot", 1)):
        latency = point.metric(f"{percentile}_{name}_ms")
        cells[f"{name.upper()}\n{percentile}, ms"] = (
            "-" if point.is_saturated or not latency.mean else _number(latency, decimals)
        )
    return {**cells, "": _note(point, slo)}


def _narrow(head: str) -> str:
    """A column's title, broken into short lines."""
    parts = head.replace("_", "_\n").split("\n")
    return "\n".join(line for part in parts for line in wrap(part, _NARROW) or [""])


def _percentile(wanted: Slo | None) -> str:
    """The percentile that the SLO's first term limits, such as p95. If there is no SLO, or summaries lack this
    percentile: p99.
    """
    asked = f"p{wanted.terms[0].percentile:.4g}" if wanted is not None else ""
    return asked if asked in STATISTICS else "p99"


def _note(point: PointResult, slo: str) -> str:
    if point.is_saturated:
        return "saturated"
    if point.failures:
        return "requests failed"
    return "" if not slo or point.meets(slo) else "missed"


def _number(value: Estimate, decimals: int) -> str:
    return value.text(lambda number: f"{number:,.{decimals}f}")


def _percent(value: Estimate) -> str:
    mean = f"{value.mean:.1%}"
    return mean if value.half_width is None else f"{mean} ± {100 * value.half_width:.1f}"
