"""Tables of a validated suite."""

from collections.abc import Iterable

from rich.table import Table

from pdsim.calibration.validate.case import MetricError
from pdsim.calibration.validate.comparison import Counts, Validation
from pdsim.metrics.summary_rows import percentage, significant
from pdsim.show.tables import new_console, new_table

_SHOWN = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "TTFT mean, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_e2e_latency_ms": "latency mean, ms",
}


def print_validation(validation: Validation) -> None:
    console = new_console()
    tables = (_variants, _percentiles, _stages, _counts, _spreads, _rankings)
    for table in tables:
        console.print(table(validation))


def _variants(validation: Validation) -> Table:
    table = new_table("measured, simulated, error", "variant", "requests", *_columns(_SHOWN.values()))
    for one in validation.comparisons:
        cells = [cell for metric in _SHOWN for cell in _error_cells(one.metrics[metric])]
        table.add_row(one.name, str(one.num_requests), *cells)
    return table


def _columns(titles: Iterable[str]) -> list[str]:
    return [column for title in titles for column in (title, "", "")]


def _error_cells(one: MetricError) -> tuple[str, str, str]:
    error = percentage(one.error)
    return significant(one.measured), significant(one.simulated), error if one.is_met else f"[red]{error}[/red]"


def _percentiles(validation: Validation) -> Table:
    times = {"ttft": "TTFT", "tpot": "TPOT", "e2e_latency": "latency"}
    columns = [f"{times[time]} {percent}" for time in times for percent in ("median", "p90", "p99")]
    table = new_table("errors of percentiles", "variant", *columns)
    for one in validation.comparisons:
        errors = [one.metrics[f"{p}_{time}_ms"].error for time in times for p in ("median", "p90", "p99")]
        table.add_row(one.name, *map(percentage, errors))
    return table


def _stages(validation: Validation) -> Table:
    """A table of the stages that take time."""
    stages = dict.fromkeys(
        name
        for one in validation.comparisons
        for name, error in one.stages_ms.items()
        if max(error.measured, error.simulated) >= 0.05  # noqa: PLR2004  what shows with one decimal
    )
    head = [name.replace("_", " ", 1).replace("_", "\n") for name in stages]
    table = new_table("mean of each stage, ms: measured, simulated", "variant", *(c for h in head for c in (h, "")))
    for one in validation.comparisons:
        errors = [one.stages_ms.get(name) for name in stages]
        cells = [
            cell for e in errors for cell in (("", "") if e is None else (f"{e.measured:,.1f}", f"{e.simulated:,.1f}"))
        ]
        table.add_row(one.name, *cells)
    return table


def _counts(validation: Validation) -> Table:
    columns = ("bytes", "descriptors", "prefill hits", "decode hits", "")
    table = new_table("what does not depend on time must be equal", "variant", *columns)
    for one in validation.comparisons:
        table.add_row(one.name, *_count_cells(one.counts))
    return table


def _count_cells(counts: Counts) -> tuple[str, ...]:
    totals = (counts.transfer_bytes, counts.descriptors, counts.prefill_cached_tokens, counts.decode_cached_tokens)
    return (*(f"{m:,}" if m == s else f"{m:,}\n{s:,}" for m, s in totals), _verdict(counts))


def _verdict(counts: Counts) -> str:
    if counts.unequal:
        return f"[red]NOT EQUAL: requests {', '.join(map(str, counts.unequal[:5]))}[/red]"
    num_other = len(counts.other_prefix_cached)
    return f"but for timing: {num_other} of {counts.num_requests} found another prefix" if num_other else "equal"


def _spreads(validation: Validation) -> Table:
    asked = validation.tolerances
    table = new_table("errors over all variants", "metric", "median", "largest", "in variant", "beyond", "asked for")
    for spread in validation.spreads():
        verdict = "" if asked.median is None else "met" if spread.is_met else "[red]missed[/red]"
        worst = percentage(spread.worst)
        missed = str(spread.num_missed or "")
        table.add_row(spread.metric, f"{spread.median:.1%}", worst, spread.where, missed, verdict)
    return table


def _rankings(validation: Validation) -> Table:
    title = "pairs of variants that differ by more than 5 %, and those whose winner is found"
    table = new_table(title, "metric", "pairs", "right", "share", "asked for")
    for metric, ranking in validation.rankings().items():
        share, asked = ranking.share, validation.tolerances.winner
        verdict = "" if share is None or asked is None else "met" if share >= asked else "[red]missed[/red]"
        cells = (str(ranking.num_pairs), str(ranking.num_right), "" if share is None else f"{share:.1%}", verdict)
        table.add_row(metric, *cells)
    return table
