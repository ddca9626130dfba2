"""The page of a sweep: the best points, trade-offs between metrics, and how much each field matters."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from pdsim.metrics.summary_rows import RANGED, between, counted, range_text, significant
from pdsim.show.html.figures import Bar, Dot, FigureBlock, heat_map, lines, tornado, trade_offs
from pdsim.show.html.page import Card, Cell, Page, Table, cell, setup_sentence
from pdsim.study.points.estimate import Estimate
from pdsim.study.points.result import PointResult, SweepResult, rate_per_gpu
from pdsim.study.points.tasks import described, shown

_LOADS = ("client.concurrency", "client.arrivals.rate")
_PREFILL, _DECODE = "prefill.instances", "decode.instances"
_RATIO = "P:D"
_CACHE_SIZES = ("pool_tokens", "mem_fraction")
_MOST_SERIES = 6
_MOST_CELLS = 12
"""Maximum number of rows, and of columns, of a heat map."""

Value = Callable[[PointResult], float]


def sweep_page(result: SweepResult) -> Page:
    points = [point for point in result.points if not point.error]
    stable = [point for point in points if not point.is_saturated]
    figures: list[FigureBlock] = []
    if stable:
        fields = _varied(points)
        figures = [
            *_trade_offs(stable, fields),
            *(block for slo in result.slos for block in _over_load(points, fields, slo)),
            *_maps(points, result, fields),
            *_effects(stable, result, fields),
            *_hits(points, fields),
        ]
    num_runs = counted(max(len(point.replications) for point in result.points), "run")
    return Page(
        title=result.name,
        subtitle=f"{counted(len(result.points), 'point')} of {num_runs} each, {result.folder.name}",
        answer=_answer(result, points),
        detail=_detail(result, points),
        cards=_cards(result, points),
        figures=figures,
        tables=[_table(result, points), *_range_table(points)] if points else [],
        warnings=[*result.warnings, *(f"{count} failed: {why}" for why, count in result.failures.items())],
        setup=setup_sentence([point.replications[0].scenario for point in points]),
        differences=_swept(points) if points else None,
    )


# The answer.


def _answer(result: SweepResult, points: Sequence[PointResult]) -> str:
    if not points:
        return "Every point failed."
    best = _best(result, points)
    if not result.slos:
        return f"Most requests per GPU: {described(best.changes)}."
    slo = next(iter(result.slos))
    met = best.meets(slo)
    return f"{'Best' if met else 'No point meets the SLO; nearest'} for {slo}: {described(best.changes)}."


def _detail(result: SweepResult, points: Sequence[PointResult]) -> str:
    said = []
    for slo in result.slos:
        met = sum(point.meets(slo) for point in points)
        said.append(f"{met} of {counted(len(result.points), 'point')} meet {slo}.")
    saturated = sum(point.is_saturated for point in points)
    if saturated:
        said.append(f"Saturated, so without latencies: {counted(saturated, 'point')}.")
    return " ".join(said)


def _best(result: SweepResult, points: Sequence[PointResult]) -> PointResult:
    """The best point: by goodput per GPU under the first SLO, and points that meet the SLO before all others; without
    an SLO, by requests per second and GPU. Only points with the same requests as the first point count.

    A point with shorter prompts serves more requests on any cluster, so that it cannot be compared with that point.
    """
    requests = _requests(points[0])
    alike = {point.number for point in points if _requests(point) == requests}
    ranked = result.best(next(iter(result.slos))) if result.slos else sorted(points, key=rate_per_gpu, reverse=True)
    return next(point for point in ranked if point.number in alike)


def _requests(point: PointResult) -> dict[str, Any]:
    """Those fields of a point that determine which requests are sent."""
    return {field: value for field, value in point.changes.items() if field.partition(".")[0] == "workload"}


def _cards(result: SweepResult, points: Sequence[PointResult]) -> list[Card]:
    if not points:
        return []
    best = _best(result, points)
    cards = []
    for slo in result.slos:
        at_ends = [point.goodput_per_gpu(slo).mean for point in (best, *best.ends) if not point.error]
        ranged = between(slo, {slo: [min(at_ends), max(at_ends)]} if best.ends else {})
        cards.append(_card(f"goodput, {slo}", best.goodput_per_gpu(slo), "requests/s per GPU", ranged))
    output = best.per_gpu("output_throughput")
    per_gpu = {name: [end / best.num_gpus for end in ends] for name, ends in best.ranges.items()}
    cards.append(_card("output", output, "tokens/s per GPU", between("output_throughput", per_gpu)))
    if not best.is_saturated:
        for time in ("ttft", "tpot"):
            for statistic in ("median", "p99"):
                field = f"{statistic}_{time}_ms"
                cards.append(
                    _card(f"{time.upper()} {statistic}", best.metric(field), "ms", between(field, best.ranges))
                )
    return [*cards, Card("GPUs", str(best.num_gpus), f"point {best.number}")]


def _card(title: str, value: Estimate, unit: str, ranged: str = "") -> Card:
    half = "" if value.half_width is None else f" ± {significant(value.half_width)}"
    return Card(title, significant(value.mean), unit + half + (f", {ranged}" if ranged else ""))


def _estimate(value: Estimate) -> Cell:
    return Cell(value.text(significant), value.mean)


# Fields and values.


def _varied(points: Iterable[PointResult]) -> dict[str, list[Any]]:
    """The fields that have more than one value, each with its values in order. The numbers of prefill and decode
    servers are also joined in one field, P:D.
    """
    values: dict[str, list[Any]] = {}
    for point in points:
        for field, value in _labelled(point).items():
            values.setdefault(field, [])
            if value not in values[field]:
                values[field].append(value)
    for found in values.values():
        if all(isinstance(value, int | float) for value in found):
            found.sort()
    return {field: found for field, found in values.items() if len(found) > 1}


def _labelled(point: PointResult) -> dict[str, Any]:
    changes = dict(point.changes)
    if _PREFILL in changes and _DECODE in changes:
        changes[_RATIO] = f"{changes[_PREFILL]}:{changes[_DECODE]}"
    return changes


def _load_of(fields: Iterable[str]) -> str | None:
    return next((field for field in _LOADS if field in fields), None)


def _knobs(fields: dict[str, list[Any]]) -> list[str]:
    """The fields that vary in the sweep, except those that set the load. If P:D (the ratio of server numbers) varies,
    the numbers of prefill and decode servers are left out.
    """
    parts = (_PREFILL, _DECODE) if _RATIO in fields else ()
    return [field for field in fields if field not in (*_LOADS, *parts)]


def _series(point: PointResult, fields: dict[str, list[Any]]) -> str:
    """Name of the series to which a point belongs, such as "P:D 1:2, tp 4". The name consists of the point's values of
    some varying fields. P:D comes first; further fields are added until there would be too many series. fields: values
    of each field that varies.
    """
    knobs = sorted(_knobs(fields), key=lambda field: field != _RATIO)
    name: list[str] = []
    count = 1
    for field in knobs:
        count *= len(fields[field])
        if count > _MOST_SERIES:
            break
        value = _labelled(point).get(field)
        name.append(f"{field} {shown(value)}" if field == _RATIO else f"{field.split('.')[-1]} {shown(value)}")
    return ", ".join(name)


def _numeric(value: Any) -> float | None:
    """The number in a value such as 4, "4/s" or "64 GiB", in the unit that the value has. None: the value has no
    number.
    """
    if isinstance(value, int | float):
        return float(value)
    head = str(value).split("/")[0].split(" ")[0]
    try:
        return float(head)
    except ValueError:
        return None


# Figures.


def _trade_offs(points: Sequence[PointResult], fields: dict[str, list[Any]]) -> list[FigureBlock]:
    load = _load_of(fields)
    labels = [shown(point.changes.get(load, "")) if load else "" for point in points]
    series = [_series(point, fields) for point in points]
    rates = [point.per_gpu("output_throughput").mean for point in points]

    def dots(field: str) -> list[Dot]:
        return [
            Dot(p.metric(field).mean, rate, label, name)
            for p, rate, label, name in zip(points, rates, labels, series, strict=True)
        ]

    by_load = f"; labelled by {load}" if load else ""
    return trade_offs(dots, "output tokens/s per GPU", f"points that no other beats in both{by_load}")


def _over_load(points: Sequence[PointResult], fields: dict[str, list[Any]], slo: str) -> list[FigureBlock]:
    """Figures over the load: the share of requests that meet the SLO, and goodput. fields: values of each field that
    varies. Empty: the load does not vary, or one of its values is no number.
    """
    load = _load_of(fields)
    if load is None:
        return []
    attained: dict[tuple[str, float], Dot] = {}
    goodput: dict[tuple[str, float], Dot] = {}
    for point in points:
        x = _numeric(point.changes[load])
        if x is None:
            return []
        name = _series(point, fields)
        share, rate = point.attainment(slo), point.goodput_per_gpu(slo)
        for best, estimate in ((attained, share), (goodput, rate)):
            dot = Dot(x / point.num_gpus, estimate.mean, "", name, estimate.half_width)
            best[name, dot.x] = max(dot, best.get((name, dot.x), dot), key=lambda dot: dot.y)
    x_title = f"{load} per GPU"
    rest = ", at best over all other fields" if len(attained) < len(points) else ""
    return [
        FigureBlock(
            f"attainment-{slo}",
            f"SLO attainment, {slo}",
            f"Share of all requests that meet the SLO{rest}; bands are 95 % intervals over seeds.",
            lines(list(attained.values()), x_title, "of requests", shares=True),
            wide=False,
        ),
        FigureBlock(
            f"goodput-{slo}",
            f"Goodput, {slo}",
            f"Requests that meet the SLO{rest}.",
            lines(list(goodput.values()), x_title, "requests/s per GPU"),
            wide=False,
        ),
    ]


def _maps(points: Sequence[PointResult], result: SweepResult, fields: dict[str, list[Any]]) -> list[FigureBlock]:
    """Heat maps of the goodput under each SLO, or of throughput if there is no SLO. Rows and columns: numbers of
    prefill and decode servers or, if one of these does not vary, the first two varying fields that do not set the load.
    Empty list: there are fewer than two such fields, or one has more than _MOST_CELLS values. fields: values of each
    field that varies.
    """
    pair = [_PREFILL, _DECODE] if {_PREFILL, _DECODE} <= fields.keys() else _knobs(fields)[:2]
    if len(pair) < 2 or any(len(fields[field]) > _MOST_CELLS for field in pair):  # noqa: PLR2004
        return []
    rows, columns = (fields[field] for field in pair)
    found = []
    for slo in result.slos or ("",):
        values = [[_best_of(points, {pair[0]: a, pair[1]: b}, _value(slo)) for b in columns] for a in rows]
        what = f"Goodput for {slo}" if slo else "Throughput"
        figure = heat_map(
            [shown(a) for a in rows],
            [shown(b) for b in columns],
            values,
            row_title=pair[0],
            column_title=pair[1],
            title="requests/s per GPU",
        )
        caption = "Each cell is the best over all other fields; hatched cells have no result."
        found.append(
            FigureBlock(f"map-{slo or 'rate'}", f"{what} by {pair[0]} and {pair[1]}", caption, figure, wide=False)
        )
    return found


def _value(slo: str) -> Value:
    """Function that gives a point's goodput per GPU under the SLO. Without an SLO: its requests per second and GPU."""
    return (lambda point: point.goodput_per_gpu(slo).mean) if slo else rate_per_gpu


def _best_of(points: Iterable[PointResult], fields: dict[str, Any], value: Value) -> float | None:
    here = [point for point in points if all(_labelled(point).get(field) == want for field, want in fields.items())]
    return max(map(value, here), default=None)


def _effects(points: Sequence[PointResult], result: SweepResult, fields: dict[str, list[Any]]) -> list[FigureBlock]:
    """A figure of how much each varied field changes each metric, on average over the values of the other fields.
    Returns an empty list if no field varies, or if a metric has no bar, for example because its mean is 0. points:
    those that are not saturated.
    fields: the varied fields, each with its values.
    """
    names = [*(field for field in _LOADS if field in fields), *_knobs(fields)]
    if not names:
        return []
    first = next(iter(result.slos), "")
    measures: dict[str, Value] = {
        f"goodput for {first}" if first else "requests/s per GPU": _value(first),
        "p99 TTFT": lambda point: point.metric("p99_ttft_ms").mean,
        "mean TPOT": lambda point: point.metric("mean_tpot_ms").mean,
    }
    panels = {
        title: [bar for field in names if (bar := _bar(points, field, fields[field], value)) is not None]
        for title, value in measures.items()
    }
    if not all(panels.values()):
        return []
    caption = (
        "Means at each field's lowest and highest value, against the mean of all points; saturated points are left out."
    )
    return [FigureBlock("effects", "Which field matters", caption, tornado(panels))]


def _bar(points: Sequence[PointResult], field: str, values: Sequence[Any], value: Value) -> Bar | None:
    mean = fmean(map(value, points))
    levels = [[value(point) for point in points if _labelled(point).get(field) == each] for each in values]
    means = [fmean(level) for level in levels if level]
    if not mean or len(means) < 2:  # noqa: PLR2004
        return None
    return Bar(field, min(means) / mean - 1, max(means) / mean - 1)


def _hits(points: Sequence[PointResult], fields: dict[str, list[Any]]) -> list[FigureBlock]:
    """Figures of cache hit rates. fields: values of each field that varies. Empty: the sweep does not vary pool_tokens
    or mem_fraction of prefill or decode.
    """
    found = []
    for field in fields:
        role, _, what = field.rpartition(".")
        if what not in _CACHE_SIZES or role not in ("prefill", "decode"):
            continue
        others = {name: values for name, values in fields.items() if name != field}
        dots = [
            Dot(x, rate.mean, "", _series(point, others), rate.half_width)
            for point in points
            if (x := _numeric(point.changes.get(field))) is not None
            and (rate := point.metric(f"{role}_cache_hit_rate"))
        ]
        if dots:
            figure = lines(dots, field, "of prompt tokens", shares=True)
            caption = f"Share of the prompt tokens that the cache of {role} instances had."
            found.append(
                FigureBlock(
                    f"hits-{role}-{what.replace('_', '-')}",
                    f"Hit rate of the {role} cache by its size",
                    caption,
                    figure,
                    wide=False,
                )
            )
    return found


# The tables.


def _swept(points: Sequence[PointResult]) -> Table:
    """Table of the fields that the sweep sets, with their values."""
    values: dict[str, dict[str, None]] = {}
    for point in points:
        for field, value in point.changes.items():
            values.setdefault(field, {})[shown(value)] = None
    rows = [[Cell(field), Cell(", ".join(found))] for field, found in values.items()]
    return Table("What differs", ["field", "values"], rows)


def _table(result: SweepResult, points: Sequence[PointResult]) -> Table:
    fields = list(dict.fromkeys(field for point in points for field in point.changes))
    columns = ["point", *fields, "GPUs"]
    for slo in result.slos:
        columns += [f"goodput {slo}", f"meets {slo}"]
    columns += ["requests/s per GPU", "TTFT p99, ms", "TPOT p99, ms", "cache hits", ""]
    rows = [_row(result, point, fields) for point in points]
    return Table("Points", columns, rows, "Means, with 95 % confidence intervals where there are several seeds.")


def _range_table(points: Sequence[PointResult]) -> list[Table]:
    """Table of the points that were also simulated with the fastest and slowest step times. Empty: no point was."""
    rows = [
        [cell(point.number, "d"), *(Cell(range_text(row, point.ranges), point.ranges[row.field][0]) for row in RANGED)]
        for point in points
        if point.ranges
    ]
    columns = ["point", *(row.cells([])[0] for row in RANGED)]
    caption = "Ranges of the best points, from the fastest to the slowest server that measured kernels allow."
    return [Table("Ranges", columns, rows, caption)] if rows else []


def _row(result: SweepResult, point: PointResult, fields: Sequence[str]) -> list[Cell]:
    row = [cell(point.number, "d")]
    for field in fields:
        value = point.changes.get(field)
        row.append(Cell("" if value is None else shown(value), _numeric(value)))
    row.append(cell(point.num_gpus, "d"))
    for slo in result.slos:
        share = point.attainment(slo)
        row.append(_estimate(point.goodput_per_gpu(slo)))
        row.append(Cell(f"{share.mean:.1%}", share.mean, "good" if point.meets(slo) else "bad"))
    row.append(cell(rate_per_gpu(point)))
    latencies = [point.metric(name) for name in ("p99_ttft_ms", "p99_tpot_ms")]
    row += [cell(None) if point.is_saturated else _estimate(latency) for latency in latencies]
    hits = cell(point.metric("prefill_cache_hit_rate").mean, ".1%")
    return [*row, hits, Cell("saturated" if point.is_saturated else "")]
