"""Prints tables of measurements: fits, profiles for other GPUs, errors of simulations, and observations of servers."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from pdsim.calibration.fit.profile import Calibration
from pdsim.calibration.fit.scaling import GpuScaling
from pdsim.calibration.observe.observation import Session, summary_of
from pdsim.calibration.observe.probes import Load, ObservationBudget, Probe
from pdsim.calibration.validate.case import ArmErrors, MetricError
from pdsim.calibration.validate.comparison import Counts, Validation
from pdsim.metrics.summary_rows import percentage, significant
from pdsim.scenario.sections.fields import DURATION
from pdsim.show.terminal.layout import new_console, new_table, print_first_that_fits


def print_errors(arms: Sequence[ArmErrors]) -> None:
    """Prints measured and simulated metrics with the errors of the simulation, in one table. If the table is too
    wide: in a table for each measured configuration.
    """
    columns = ("metric", "measured", "simulated", "error", "asked for")
    whole = new_table("", "case", "arm", *columns)
    by_arm = []
    for arm in arms:
        by_arm.append(new_table(f"{arm.case}: {_arm(arm)}", *columns))
        for i, cells in enumerate(_errors(arm)):
            whole.add_row(arm.case if i == 0 else "", _arm(arm) if i == 0 else "", *cells)
            by_arm[-1].add_row(*cells)
        whole.add_section()
    print_first_that_fits([[whole], by_arm])


def _arm(arm: ArmErrors) -> str:
    return f"{arm.arm} ({'fitted' if arm.fitted else 'predicted'})"


def _errors(arm: ArmErrors) -> Iterable[tuple[str, ...]]:
    for metric, m in arm.metrics.items():
        asked = "" if m.within is None else f"{m.within:.0%} {_met(m.is_met)}"
        yield (metric, significant(m.measured), significant(m.simulated), percentage(m.error), asked)


def _met(is_met: bool) -> str:
    return "met" if is_met else "[red]missed[/red]"


def print_calibration(made: Calibration, profile: Mapping[str, Any]) -> None:
    """Prints the formulas fitted to times of steps, staging and transfers, their errors on sizes that were held out of
    the fit, and the host times in the profile.
    """
    columns = ("part", "form", "rows", "shapes", "mean", "p90", "median")
    fits = new_table("fits, and their errors on shapes held out", *columns)
    coefficients = new_table("what was fitted", "part", "coefficients, ns")
    coefficients.columns[0].vertical = "top"
    for name, fit in made.fits.items():
        errors = (f"{fit.error:.1%}", f"{fit.error_p90:.1%}", percentage(fit.bias))
        fits.add_row(name, fit.form.name, str(len(fit.rows)), str(fit.num_shapes), *errors)
        coefficients.add_row(name, ", ".join(f"{parameter} {value:.3g}" for parameter, value in fit.values.items()))
    console = new_console()
    for table in (fits, coefficients, _host_table(profile)):
        if table.rows:
            console.print(table)


def _host_table(profile: Mapping[str, Any]) -> Table:
    sections = {"cost.host": profile["cost"].get("host"), "front_end": profile.get("front_end")}
    table = new_table("of the host", "section", "settings")
    for name, section in sections.items():
        if section:
            table.add_row(name, ", ".join(f"{setting} {value}" for setting, value in section.items()))
    return table


def print_scaling(scaling: GpuScaling, cost: Mapping[str, Any]) -> None:
    """Prints the factors by which operators take longer or shorter on the other GPU, and the scaled coefficients. cost:
    the scaled cost, as the derived profile has it.
    """
    new = f"{scaling.target.name} / {scaling.source.name}"
    ratios = new_table(f"time, {new}", "operator", "low", "best", "high", "shapes timed on both")
    for operator, ratio in scaling.ratios.items():
        ends = (f"{value:.3g}" for value in (ratio.low, ratio.best, ratio.high))
        ratios.add_row(operator, *ends, str(ratio.num_shapes))
    coefficients = new_table(f"coefficients of {scaling.target.name}", "coefficient", "low", "best", "high")
    for role in ("prefill", "decode"):
        best = cost[role]
        low, high = cost.get(f"{role}_interval", (best, best))
        for name in (name for name in best if name != "use"):
            values = [end[name] for end in (low, best, high)]
            if not isinstance(best[name], dict):
                coefficients.add_row(name, *map(_coefficient, values))
                continue
            for knot in best[name]:
                coefficients.add_row(f"{name} at {knot}", *(_coefficient(value[knot]) for value in values))
    console = new_console()
    console.print(ratios)
    console.print(coefficients)


def _coefficient(value: Any) -> str:
    """Text of a coefficient: a time with four digits in a suitable unit. A number without a unit stays as it is."""
    if not isinstance(value, str):
        return str(value)
    time_ns = DURATION.parse(value)
    unit, factor = next(((unit, factor) for unit, factor in (("ms", 1e6), ("us", 1e3)) if time_ns >= factor), ("ns", 1))
    return f"{time_ns / factor:.4g} {unit}"


_HEADLINES = {
    "request_throughput": "requests/s",
    "mean_ttft_ms": "TTFT mean, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_e2e_latency_ms": "latency mean, ms",
}


def print_validation(validation: Validation) -> None:
    console = new_console()
    for table in (_variants, _percentiles, _variant_stages, _counts, _spreads, _rankings):
        console.print(table(validation))


def _variants(validation: Validation) -> Table:
    columns = [column for title in _HEADLINES.values() for column in (title, "", "")]
    table = new_table("measured, simulated, error", "variant", "requests", *columns)
    for one in validation.comparisons:
        cells = [cell for metric in _HEADLINES for cell in _error_cells(one.metrics.get(metric))]
        table.add_row(one.name, str(one.num_requests), *cells)
    return table


def _error_cells(one: MetricError | None) -> tuple[str, str, str]:
    if one is None:
        return "", "", ""
    error = percentage(one.error)
    return significant(one.measured), significant(one.simulated), error if one.is_met else f"[red]{error}[/red]"


def _percentiles(validation: Validation) -> Table:
    times = {"ttft": "TTFT", "tpot": "TPOT", "e2e_latency": "latency"}
    columns = [f"{times[time]} {percent}" for time in times for percent in ("median", "p90", "p99")]
    table = new_table("errors of percentiles", "variant", *columns)
    for one in validation.comparisons:
        errors = [one.metrics.get(f"{p}_{time}_ms") for time in times for p in ("median", "p90", "p99")]
        table.add_row(one.name, *("" if error is None else percentage(error.error) for error in errors))
    return table


def _variant_stages(validation: Validation) -> Table:
    """Table of the mean time of each stage of requests, measured and simulated, for each variant of the suite.
    Stages below 0.05 ms in all variants are left out.
    """
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
    title = "counts that do not depend on time must be equal; they include warm-up requests"
    table = new_table(title, "variant", *columns)
    for one in validation.comparisons:
        counts = one.counts
        totals = (counts.transfer_bytes, counts.descriptors, counts.prefill_cached_tokens, counts.decode_cached_tokens)
        cells = (f"{m:,}" if m == s else f"{m:,}\n{s:,}" for m, s in totals)
        table.add_row(one.name, *cells, _verdict(counts))
    return table


def _verdict(counts: Counts) -> str:
    if counts.unequal:
        return f"[red]NOT EQUAL: requests {', '.join(map(str, counts.unequal[:5]))}[/red]"
    num_other = len(counts.other_prefix_cached)
    return (
        f"{num_other} of {counts.num_requests} requests found another cached prefix; all others are equal"
        if num_other
        else "equal"
    )


def _spreads(validation: Validation) -> Table:
    asked = validation.tolerances
    table = new_table("errors over all variants", "metric", "median", "largest", "in variant", "beyond", "asked for")
    for spread in validation.spreads():
        verdict = "" if asked.median is None else _met(spread.is_met)
        worst = percentage(spread.worst)
        missed = str(spread.num_missed or "")
        table.add_row(spread.metric, f"{spread.median:.1%}", worst, spread.where, missed, verdict)
    return table


def _rankings(validation: Validation) -> Table:
    title = "pairs of variants that differ by more than 5 %, and how many of them the simulation ranks right"
    table = new_table(title, "metric", "pairs", "right", "share", "asked for")
    for metric, ranking in validation.rankings().items():
        share, asked = ranking.share, validation.tolerances.winner
        verdict = "" if share is None or asked is None else _met(share >= asked)
        cells = (str(ranking.num_pairs), str(ranking.num_right), "" if share is None else f"{share:.1%}", verdict)
        table.add_row(metric, *cells)
    return table


def print_plan(url: str, budget: ObservationBudget, probes: Sequence[Probe], loads: Iterable[Load]) -> None:
    table = new_table(f"to {url}", "what", "times", "requests", "at once", "prompt tokens", "output tokens, at most")
    ordered = sorted(probes, key=lambda probe: probe.kind)
    for kind, found in groupby(ordered, key=lambda probe: probe.kind):
        same = list(found)
        sizes = [probe.prompt_tokens for probe in same]
        most = 1 if kind == "prefix" else max(probe.num_requests for probe in same)
        total = sum(probe.num_requests for probe in same)
        outputs = str(same[0].output_tokens)
        lengths = f"{min(sizes)} to {max(sizes)}"
        table.add_row(f"{kind}: {same[0].what}", str(len(same)), str(total), str(most), lengths, outputs)
    for load in loads:
        inputs, outs = zip(*load.lengths, strict=True)
        span, longest = f"{min(inputs)} to {max(inputs)}", str(max(outs))
        table.add_row(
            f"load {load.name}: closed loop", "1", str(len(load.lengths)), str(load.concurrency), span, longest
        )
    console = new_console()
    console.print(table)
    console.print(
        f"at most {budget.num_minutes:g} minutes, {budget.num_requests} completions, {budget.concurrency} at a time; "
        "nothing was sent"
    )


def print_observation(session: Session) -> None:
    about = session.about
    console = new_console()
    server = f"{about['server']} {about['version']}".strip()
    rows = ", ".join(f"{count} {kind}" for kind, count in session.num_rows.items())
    console.print(
        f"{about['model']} on {server} at {about['url']}: {session.seconds:.0f} s, rows: {rows}", highlight=False
    )
    if session.loads:
        table = new_table("loads", "arm", "requests", *_HEADLINES.values())
        for load in session.loads:
            summary = summary_of(load["requests"])
            table.add_row(
                load["name"], str(len(load["requests"])), *(significant(summary[name]) for name in _HEADLINES)
            )
        console.print(table)
    console.print(f"observation: {session.folder}")
