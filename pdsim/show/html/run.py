"""The page of one run, or of several runs that are compared."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pdsim.dataclass import dataclass
from pdsim.metrics.columns import columns, requests_at
from pdsim.metrics.explanation.explain import finished, mean_parts_ms, stage_times
from pdsim.metrics.explanation.failures import failures_in
from pdsim.metrics.explanation.usage import USAGE_COLUMNS, instance_usage
from pdsim.metrics.records import Records, judged_records
from pdsim.metrics.summary import e2e_ms, queue_grows, tpot_ms, ttft_ms
from pdsim.metrics.summary_rows import (
    Ranges,
    between,
    counted,
    range_note,
    range_text,
    ranges_of,
    rows_to_show,
    time_text,
)
from pdsim.scenario.schema import Scenario
from pdsim.show.html import run_figures
from pdsim.show.html.figures import Bar, Dot, FigureBlock, tornado, trade_offs
from pdsim.show.html.page import Card, Cell, Page, Table, cell, differences, setup_sentence
from pdsim.sim.uncertainty.sensitivity import GAIN, MEASURES, Sensitivity, limits

_MOST_REQUESTS = 200
"""Maximum number of rows in the table of slowest requests."""
_VISIBLE = 0.001
"""Resources that change each metric by less than this share have no bar in the figure of sensitivities. If there are no
other resources, the first one has a bar.
"""
_TORNADO = {name: MEASURES[name] for name in ("request_throughput", "p99_ttft_ms", "p99_tpot_ms")}


@dataclass(frozen=True)
class ReportedRun:
    """Everything that a page shows of a run."""

    name: str
    summary: Mapping[str, Any]
    """The summary: numbers by field, as in summary.json."""
    records: Records
    """Records of the run. Empty: another tool made the run."""
    scenario: Scenario | None = None
    """The run's scenario with all defaults filled in. None: not known."""
    sensitivities: Sequence[Sensitivity] = ()
    """For each resource: the relative changes of the metrics in MEASURES if the cluster has more of the resource.
    Empty: the user did not ask for sensitivities.
    """

    @property
    def num_gpus(self) -> int | None:
        return None if self.scenario is None else self.scenario.num_gpus

    @property
    def ranges(self) -> Ranges:
        return ranges_of(self.summary)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The run's scenario as plain data. Empty: the scenario is not known."""
        return {} if self.scenario is None else self.scenario.model_dump()

    @cached_property
    def judged(self) -> Records:
        """The records without warm-up requests, which the summary leaves out, too."""
        return judged_records(self.records, self.summary)

    @cached_property
    def num_finished(self) -> int:
        return int(columns(self.judged, "requests").having("outcome", "finished").sum())

    @property
    def per_gpu(self) -> str:
        return "output tokens/s per GPU" if self.num_gpus else "output tokens/s"

    @property
    def output_rate(self) -> float:
        return float(self.summary.get("output_throughput", 0.0)) / (self.num_gpus or 1)


def run_page(runs: Sequence[ReportedRun]) -> Page:
    """The page of one run, or of several runs. With several, it has figures that compare them."""
    return _single(runs[0]) if len(runs) == 1 else _comparison(runs)


def _single(run: ReportedRun) -> Page:
    figures = [*_latency_figures([run]), *_inside(run)]
    tables = [_summary_table([run])]
    if run.num_finished:
        tables += [*_class_table(run), _stage_table(run), _instance_table(run), _request_table(run.judged)]
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        answer=_answer(run),
        detail=" ".join(f"{limit}." for limit in limits(run.sensitivities)) if run.sensitivities else "",
        cards=_cards(run),
        figures=figures,
        tables=tables,
        warnings=_warnings(run),
        setup=setup_sentence([run.fields]) if run.fields else "",
    )


def _answer(run: ReportedRun) -> str:
    if run.num_finished:
        return _longest_stages(run)
    return "No request finished." if "pdsim" in run.summary else "A result of another tool, which has only a summary."


def _comparison(runs: Sequence[ReportedRun]) -> Page:
    ours = [run for run in runs if run.num_finished]
    known = {run.name: run.fields for run in runs if run.fields}
    best = max(runs, key=lambda run: run.output_rate)
    answer = f"Most output: {best.name}, {best.output_rate:,.0f} {best.per_gpu}."
    medians_ms = {run.name: run.summary.get("median_ttft_ms") for run in runs}
    if ttft := {name: median_ms for name, median_ms in medians_ms.items() if median_ms is not None}:
        quickest = min(ttft, key=lambda name: ttft[name])
        answer += f" Shortest median TTFT: {quickest}, {time_text(ttft[quickest])}."
    return Page(
        title=" against ".join(run.name for run in runs) if len(runs) == 2 else f"{len(runs)} runs",  # noqa: PLR2004
        subtitle=", ".join(run.name for run in runs),
        answer=answer,
        detail=" ".join(f"{run.name}: {_longest_stages(run)}" for run in ours),
        cards=[],
        figures=[*_trade(runs), *_latency_figures(ours)],
        tables=[_summary_table(runs)],
        warnings=[f"{run.name}: {warning}" for run in runs for warning in _warnings(run)],
        setup=setup_sentence(list(known.values())),
        differences=differences(known),
    )


def _longest_stages(run: ReportedRun) -> str:
    """A sentence on the stages that take longest: on average, and for the 1 % of the requests with the largest TTFT."""
    stages = stage_times(run.judged)
    longest = max(stages, key=lambda stage: stage.mean_ms)
    tail = max((stage for stage in stages if stage.stage != "decode_forward"), key=lambda stage: stage.slowest_ms)
    return (
        f"{longest.share:.0%} of the latency is {longest.stage}; the 1 % with the largest TTFT spend "
        f"{time_text(tail.slowest_ms)} in {tail.stage}."
    )


def _subtitle(run: ReportedRun) -> str:
    summary = run.summary
    said = [counted(summary["completed"], "request")] if "completed" in summary else []
    if summary.get("max_concurrency"):
        said.append(f"{summary['max_concurrency']} at once")
        if left_out := summary.get("pdsim", {}).get("warm_up_requests"):
            said.append(f"{left_out:,} left out as warm-up")
    elif "request_rate" in summary:
        rate = summary["request_rate"]
        said.append("at the trace's times" if rate == "trace" else f"{rate} sent a second")
    if "duration" in summary:
        said.append(f"{summary['duration']:,.1f} s")
    if run.num_gpus:
        said.append(counted(run.num_gpus, "GPU"))
    return ", ".join(said)


def _cards(run: ReportedRun) -> list[Card]:
    """The numbers in large type at the top of a run's page: throughput, output tokens, TTFT, TPOT and latency. Numbers
    that the summary lacks are left out, because other tools do not report all of them.
    """
    summary, ranged = run.summary, run.ranges
    cards = []
    if "request_throughput" in summary:
        note = between("request_throughput", ranged, "requests/s")
        cards.append(Card("throughput", f"{summary['request_throughput']:,.2f}", note))
    if "output_throughput" in summary:
        per_gpu = {name: [end / (run.num_gpus or 1) for end in ends] for name, ends in ranged.items()}
        note = between("output_throughput", per_gpu, run.per_gpu.removeprefix("output "))
        cards.append(Card("output", f"{run.output_rate:,.0f}", note))
    for title, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("latency", "e2e_latency")):
        median, p99 = summary.get(f"median_{name}_ms"), summary.get(f"p99_{name}_ms")
        if median is not None:
            notes = [between(f"median_{name}_ms", ranged, "median")]
            notes += [] if p99 is None else [between(f"p99_{name}_ms", ranged, f"p99 {time_text(p99)}")]
            cards.append(Card(title, time_text(median), "; ".join(notes)))
    return cards


def _warnings(run: ReportedRun) -> list[str]:
    own = run.summary.get("pdsim", {})
    said = list(own.get("warnings", ()))
    if own.get("failed"):
        said.append(f"{counted(own['failed'], 'request')} failed; latencies leave them out.")
    said += [f"{counted(failure.num_requests, 'request')}: {failure.text}." for failure in failures_in(run.summary)]
    if own.get("unfinished"):
        said.append(
            f"{counted(own['unfinished'], 'request')} neither finished nor failed: the run stalled or was interrupted."
        )
    requests = columns(run.records, "requests")
    is_open_loop = run.summary.get("max_concurrency") is None
    if is_open_loop and queue_grows(requests["arrival_ns"].tolist(), requests["end_ns"].tolist()):
        said.append("The load is more than the system can take: latencies grow with the length of the run.")
    return said


def _latency_figures(runs: Sequence[ReportedRun]) -> list[FigureBlock]:
    records = {run.name: run.judged for run in runs if run.num_finished}
    return [run_figures.latency_distributions(records), run_figures.stage_bars(records)] if records else []


def _inside(run: ReportedRun) -> list[FigureBlock]:
    """Figures that show a single run in detail."""
    if not run.num_finished:
        return []
    records = run.records
    figures = [
        *_tornado(run.sensitivities),
        run_figures.critical_path(mean_parts_ms(run.judged)),
        run_figures.ttft_over_time(run.judged),
        run_figures.request_stages(run.judged),
    ]
    if len(columns(records, "levels")["time_ns"]):
        figures.append(run_figures.occupancy(records))
    if columns(records, "transfers")["num_bytes"].any():
        figures.append(run_figures.transfers(records))
    return figures


def _tornado(found: Sequence[Sensitivity]) -> list[FigureBlock]:
    if not found:
        return []
    seen = [one for one in found if one.effect >= _VISIBLE] or found[:1]
    panels = {title: [Bar(one.resource, 0.0, one.changes[name]) for one in seen] for name, title in _TORNADO.items()}
    caption = f"Change of each metric if one resource is {GAIN:.0%} faster, or if there is {GAIN:.0%} more of it."
    if rest := [one.resource for one in found if one not in seen]:
        caption += f" Less than {_VISIBLE:.1%}: {', '.join(rest)}."
    return [FigureBlock("tornado", f"What {GAIN:.0%} more would change", caption, tornado(panels))]


def _trade(runs: Sequence[ReportedRun]) -> list[FigureBlock]:
    """Figures of throughput against latencies, with a point for each run."""

    def dots(field: str) -> list[Dot]:
        return [Dot(run.summary.get(field, 0.0), run.output_rate, run.name) for run in runs]

    return trade_offs(dots, runs[0].per_gpu, "runs that no other run beats in both numbers")


def _summary_table(runs: Sequence[ReportedRun]) -> Table:
    rows, ranged = [], [run for run in runs if run.ranges]
    for row, values in rows_to_show(run.summary for run in runs):
        title, texts = row.cells(values)
        cells = [Cell(title), Cell(texts[0], values[0])]
        for text, value in zip(texts[1:], values[1:], strict=True):
            difference = row.difference(value, values[0])
            tone = {True: "good", False: "bad", None: ""}[difference.is_better]
            cells += [Cell(text, value), Cell(difference.text, value, tone)]
        cells += [Cell(range_text(row, run.ranges)) for run in ranged]
        rows.append(cells)
    columns = ["", runs[0].name]
    for run in runs[1:]:
        columns += [run.name, f"to {runs[0].name}"]
    columns += ["range" if len(runs) == 1 else f"range of {run.name}" for run in ranged]
    notes = [f"{run.name}: {note}" for run in ranged if (note := range_note(run.summary))]
    return Table("Summary", columns, rows, caption="; ".join(notes))


def _class_table(run: ReportedRun) -> list[Table]:
    """Table of the latencies of each class of requests. Empty: requests have no classes."""
    latencies = {
        f"{statistic} {name}, ms": f"{statistic}_{name.lower()}_ms"
        for name in ("TTFT", "TPOT")
        for statistic in ("median", "p99")
    }
    rows = [
        [
            Cell(name),
            cell(one["completed"], ","),
            cell(one["failed"], ","),
            *(cell(one[latency]) for latency in latencies.values()),
        ]
        for name, one in run.summary.get("pdsim", {}).get("classes", {}).items()
    ]
    return [Table("Classes of requests", ["class", "finished", "failed", *latencies], rows)] if rows else []


def _stage_table(run: ReportedRun) -> Table:
    rows = [
        [Cell(s.stage), cell(s.mean_ms), cell(s.median_ms), cell(s.slowest_ms), cell(s.share, ".1%"), Cell(s.meaning)]
        for s in stage_times(run.judged)
        if s.mean_ms
    ]
    return Table(
        "Stages", ["stage", "mean, ms", "median, ms", "slowest 1% by TTFT, ms", "of latency", "what happens"], rows
    )


def _instance_table(run: ReportedRun) -> Table:
    rows = [
        [Cell(use.instance_id), *(cell(number(use), form) for form, number in USAGE_COLUMNS.values())]
        for use in instance_usage(run.records)
    ]
    return Table(
        "Instances",
        ["instance", *USAGE_COLUMNS],
        rows,
        "While the cluster is loaded: shares of the time, and mean numbers of requests.",
    )


def _request_table(records: Records) -> Table:
    done = np.flatnonzero(columns(records, "requests").having("outcome", "finished"))
    slowest_first = np.argsort(-run_figures.ttft_ms(finished(records)), kind="stable")
    slowest = requests_at(records, done[slowest_first[:_MOST_REQUESTS]])
    rows = [
        [
            cell(r.request_id, "d"),
            cell(r.num_prompt_tokens, ",d"),
            cell(r.num_output_tokens, ",d"),
            cell(r.num_prefill_cached_tokens, ",d"),
            cell(ttft_ms(r), ",.1f"),
            cell(tpot_ms(r) if r.num_output_tokens > 1 else None, ",.2f"),
            cell(e2e_ms(r), ",.1f"),
            cell(r.transfer_bytes / 1e6, ",.1f"),
            Cell(r.prefill_id if r.is_aggregated else f"{r.prefill_id} → {r.decode_id}"),
        ]
        for r in slowest
    ]
    titles = ["request", "prompt", "output", "cached", "TTFT, ms", "TPOT, ms", "latency, ms", "KV sent, MB", "where"]
    return Table(f"Largest TTFT: {counted(len(rows), 'request')}", titles, rows)
