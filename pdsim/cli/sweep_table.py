"""The points of a sweep as tables: for each SLO the best ones, and what failed."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from pdsim.cli.tables import new_console, new_table
from pdsim.metrics.summary_rows import counted
from pdsim.scenario.quantity import DURATION
from pdsim.sweeps.interval import Estimate
from pdsim.sweeps.plan import shown
from pdsim.sweeps.result import PointResult, SweepResult
from pdsim.sweeps.sweep_file import SloSettings

_MOST = 10
"""Points of one table; the folder has all."""


def print_sweep(result: SweepResult) -> None:
    console = new_console()
    for name, slo in result.slos.items():
        best = result.best(name)
        num_met = sum(point.meets(name, slo) for point in best)
        title = f"{name}: {_limits(slo)}; {num_met} of {counted(len(result.points), 'point')} meet it"
        console.print(_table(title, best, name, slo))
    if not result.slos:
        console.print(
            _table(counted(len(result.points), "point"), [point for point in result.points if not point.error])
        )
    for reason, count in _failures(result.points).most_common():
        console.print(f"{count} failed: {reason}", highlight=False, markup=False)
    runs = f"{counted(result.num_computed, 'run')} computed, {result.num_kept} kept from before"
    console.print(f"{runs}: {result.folder}", highlight=False, markup=False)


def _table(title: str, points: Sequence[PointResult], slo: str = "", wanted: SloSettings | None = None) -> Table:
    points, num_more = points[:_MOST], len(points) - _MOST
    fields = list(dict.fromkeys(field for point in points for field in point.changes))
    more = f", {_MOST} of them shown" if num_more > 0 else ""
    table = new_table(title + more, "point", *(field.replace(".", ".\n") for field in fields), "GPUs")
    metrics = ["requests/s\nper GPU", "TTFT p99\nms", "TPOT p99\nms"]
    for column in [*(["goodput/s\nper GPU", "attained"] if slo else []), *metrics]:
        table.add_column(column, justify="right", vertical="bottom")
    table.add_column("", vertical="bottom")
    for point in points:
        cells = [str(point.number), *(shown(point.changes[f]) if f in point.changes else "" for f in fields)]
        cells.append(str(point.num_gpus))
        if slo:
            cells += [_number(point.goodput_per_gpu(slo), 3), _percent(point.attainment(slo))]
        table.add_row(*cells, *_metrics(point), _note(point, slo, wanted))
    return table


def _metrics(point: PointResult) -> Iterable[str]:
    """A saturated system has no latencies: they grow as long as it runs."""
    rate = point.metric("request_throughput")
    half = None if rate.half_width is None else rate.half_width / point.num_gpus
    yield _number(Estimate(rate.mean / point.num_gpus, half), 3)
    for name, decimals in (("p99_ttft_ms", 0), ("p99_tpot_ms", 1)):
        yield "-" if point.is_saturated else _number(point.metric(name), decimals)


def _note(point: PointResult, slo: str, wanted: SloSettings | None) -> str:
    if point.is_saturated:
        return "saturated"
    return "" if wanted is None or point.meets(slo, wanted) else "missed"


def _failures(points: Iterable[PointResult]) -> Counter[str]:
    return Counter(point.error for point in points if point.error)


def _limits(slo: SloSettings) -> str:
    limits = [
        f"{name.upper()} {DURATION.show(limit)}"
        for name, limit in (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e))
        if limit is not None
    ]
    return f"{', '.join(limits)} for {slo.attainment:.4g} of requests"


def _number(value: Estimate, decimals: int) -> str:
    mean = f"{value.mean:,.{decimals}f}"
    return mean if value.half_width is None else f"{mean} ± {value.half_width:,.{decimals}f}"


def _percent(value: Estimate) -> str:
    mean = f"{value.mean:.1%}"
    return mean if value.half_width is None else f"{mean} ± {100 * value.half_width:.1f}"
