"""Prints tables of runs. Columns that do not fit the terminal are left out in a fixed order; texts are never cut."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from textwrap import fill, wrap
from typing import Any

from rich.table import Table

from pdsim.metrics.explanation.explain import PARTS, StageTimes, finished, stage_times
from pdsim.metrics.explanation.failures import failures_in
from pdsim.metrics.explanation.relief import relief_of
from pdsim.metrics.explanation.stages import ALL_STAGES, stage_spans
from pdsim.metrics.explanation.tail import Tail, TailGroup
from pdsim.metrics.explanation.usage import USAGE_COLUMNS, instance_usage
from pdsim.metrics.records import Records, RequestRecord
from pdsim.metrics.summary_rows import (
    HEADLINES,
    RANGED,
    Difference,
    Ranges,
    counted,
    in_unit,
    percentage,
    range_note,
    range_text,
    ranges_of,
    rows_to_show,
    time_text,
    unit_of,
)
from pdsim.show.terminal.layout import fits, folded, new_console, new_table, print_first_that_fits
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.sim.uncertainty.sensitivity import MEASURES, Sensitivity, limits
from pdsim.system.catalog import load_gpu, load_model, names

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "latency"}
_VISIBLE_LOAD = 1.5
"""Arrivals count as a burst if their rate is at least this many times the usual rate."""
_REASON = 26
"""The text of a failure's reason is wrapped to lines of at most this number of characters."""
_FEW = 3
"""Minimum number of requests for which the text speaks of a burst of arrivals."""


def print_summaries(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints runs side by side, each with its difference from the first. If the terminal is too narrow for all runs,
    prints several tables.
    """
    console, others = new_console(), list(summaries)[1:]
    size = len(others)
    while size > 1 and not fits(console, _summaries(summaries, others[:size])):
        size -= 1
    for start in range(0, len(others), size) if size else [0]:
        console.print(_summaries(summaries, others[start : start + size]))


def _summaries(summaries: Mapping[str, Mapping[str, Any]], others: Sequence[str]) -> Table:
    """Table of the first run and of those named in `others`. If there is only one run, and it has ranges, a
    column shows them.
    """
    first = next(iter(summaries))
    shown = [first, *others]
    interval = ranges_of(summaries[first]) if len(summaries) == 1 else {}
    table = new_table("", "")
    for i, name in enumerate(shown):
        table.add_column(folded(name), justify="right", vertical="bottom")
        if i:
            table.add_column("", justify="right")
    if interval:
        table.add_column("range", justify="right", vertical="bottom")
    for row, values in rows_to_show(summaries[name] for name in shown):
        title, cells = row.cells([*values, *interval.get(row.field, ())])
        line = [title, cells[0]]
        for value, cell in zip(values[1:], cells[1 : len(values)], strict=True):
            line += [cell, _colored(row.difference(value, values[0]))]
        if interval:
            line.append(range_text(row, interval, *values))
        table.add_row(*line)
    _add_failures(table, [summaries[name] for name in shown])
    return table


def _add_failures(table: Table, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Adds rows with the number of requests that failed in each run, by reason."""
    counts = [{failure.reason: failure.num_requests for failure in failures_in(summary)} for summary in summaries]
    for reason in dict.fromkeys(reason for found in counts for reason in found):
        title = "\n".join(f"  {line}" for line in wrap(reason, _REASON))
        cells = [f"{found[reason]:,}" if reason in found else "" for found in counts]
        table.add_row(title, cells[0], *(text for cell in cells[1:] for text in (cell, "")))


def print_failures(summary: Mapping[str, Any], command: str) -> None:
    """Prints the number of failed requests by reason, and for each reason a command that shows one such request.
    command: explains the run; the number of the request is added.
    """
    failures = failures_in(summary)
    if not failures:
        return
    console, own = new_console(), summary["pdsim"]
    num_sent = summary["completed"] + own["failed"] + own["unfinished"]
    head = f"{own['failed']:,} of {counted(num_sent, 'request')} failed; the tables above are of the others"
    console.print(f"[bold]{head}[/bold]", highlight=False)
    for failure in failures:
        console.print(f"{failure.num_requests:,}: {failure.text}", highlight=False, markup=False)
        console.print(f"  {command} --request {failure.example}\n", highlight=False, markup=False, soft_wrap=True)


def _colored(difference: Difference) -> str:
    if difference.is_better is None:
        return difference.text
    color = "green" if difference.is_better else "red"
    return f"[{color}]{difference.text}[/{color}]"


def print_ranges(intervals: Mapping[str, Ranges], what: str = "run") -> None:
    """Prints the ranges of runs whose step times were not measured on a server. intervals: ranges by the name of the
    run. what: title of the column of names. On a narrow terminal, fewer numbers are printed.
    """
    known = {name: found for name, found in intervals.items() if found}
    if not known:
        return
    rows = [row for row in RANGED if all(row.field in found for found in known.values())]

    def table(fields: Collection[str]) -> Table:
        made = new_table("between the fastest and the slowest cost", what)
        shown = [row for row in rows if row.field in fields]
        ends = {row.field: [end for found in known.values() for end in found[row.field]] for row in shown}
        for row in shown:
            made.add_column("\n".join(row.cells(ends[row.field])[0].rsplit(" ", 1)), justify="right")
        for name, found in known.items():
            made.add_row(folded(name), *(range_text(row, found, *ends[row.field]) for row in shown))
        return made

    sizes = [[row.field for row in rows], *(HEADLINES[:count] for count in range(len(HEADLINES), 0, -1))]
    print_first_that_fits([table(fields)] for fields in sizes)


def print_range_notes(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """For each run whose ranges were computed from its first requests alone: prints how many these were, and how exact
    the ranges are.
    """
    console = new_console()
    for name, summary in summaries.items():
        if note := range_note(summary):
            text = note if len(summaries) == 1 else f"{name}: {note}"
            console.print(text, highlight=False, markup=False)


def print_stages(runs: Mapping[str, Records]) -> None:
    """Prints the time that finished requests of each run spend in each stage, such as waiting for prefill or decoding
    (ALL_STAGES in metrics/explanation/stages.py). On a narrow terminal, a table has fewer columns, then fewer runs.
    Prints nothing if no request finished.
    """
    times = [(name, {row.stage: row for row in stage_times(records)}) for name, records in runs.items()]
    if not any(len(finished(records)["request_id"]) for records in runs.values()):
        return
    print_first_that_fits(
        [
            _stages(dict(times[start : start + size]), columns, explained, named=len(runs) > 1)
            for start in range(0, len(times), size)
        ]
        for size in range(len(times), 0, -1)
        for explained, columns in _STAGE_COLUMNS
    )


_WIDE = 99
_SLOWEST = "slowest 1%\nby TTFT"
"""Column title: mean time of a stage over the 1 % of the requests with the largest TTFT."""
_STAGE_COLUMNS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (_WIDE, ("mean", "median", _SLOWEST, "share")),
    (_WIDE, ("mean", _SLOWEST, "share")),
    (24, ("mean", _SLOWEST, "share")),
    (16, ("mean", _SLOWEST, "share")),
    (0, ("mean", _SLOWEST, "share")),
    (0, ("mean", "share")),
)
"""Variants of the table of stages, the widest first: characters per line of a stage's explanation, and the columns of
each run.

Columns are left out before the explanation, because a stage's name alone says little.
"""


def _stages(
    by_run: Mapping[str, Mapping[str, StageTimes]], columns: Sequence[str], explained: int, *, named: bool
) -> Table:
    table = new_table("where the time goes", "stage", "")
    for name in by_run:
        for i, column in enumerate(columns):
            head = f"{folded(name)}\n{column}" if named and i == 0 else column
            table.add_column(head, justify="right", vertical="bottom")
    if explained:
        table.add_column("what happens", vertical="bottom")
    for stage, (_, _, meaning) in ALL_STAGES.items():
        rows = [times.get(stage) for times in by_run.values()]
        known = [row for row in rows if row is not None]
        if not any(row.mean_ms for row in known):
            continue
        unit = unit_of([row.mean_ms for row in known] + [row.slowest_ms for row in known])
        line = [stage, unit]
        for row in rows:
            line += ["" if row is None else _stage_cell(row, column, unit) for column in columns]
        table.add_row(*line, *([fill(meaning, explained)] if explained else []))
    if explained < _WIDE:
        table.padding = (0, 1, 0, 0)
    for shown in table.columns:
        shown.vertical = "top"
    return table


def _stage_cell(row: StageTimes, column: str, unit: str) -> str:
    if column == "share":
        return f"{row.share:.1%}"
    return in_unit(getattr(row, f"{column.partition(' ')[0]}_ms"), unit, 1)


def print_usage(runs: Mapping[str, Records]) -> None:
    by_run = {name: instance_usage(records) for name, records in runs.items()}

    def table(*columns: str) -> Table:
        made = new_table("how busy each instance is while the cluster is loaded", "instance", *columns)
        for name, instances in by_run.items():
            if len(runs) > 1:
                made.add_row(f"[bold]{folded(name)}[/bold]")
            for use in instances:
                shown = (USAGE_COLUMNS[column] for column in columns)
                made.add_row(use.instance_id, *(format(number(use), form) for form, number in shown))
        return made

    few = [column for column in USAGE_COLUMNS if column not in ("running", "waiting")]
    print_first_that_fits([table(*columns)] for columns in (USAGE_COLUMNS, few))


def print_path(title: str, parts_ms: Mapping[str, float]) -> None:
    """Prints the parts of the critical path of one request, or the mean over many requests. parts_ms: times in ms."""
    total = sum(parts_ms.values())

    def table(*columns: str) -> Table:
        made = new_table(title, "part", "ms", "share", *columns)
        for part, duration_ms in parts_ms.items():
            cells = (part, in_unit(duration_ms, "ms", 1), f"{duration_ms / total:.1%}", PARTS[part])
            made.add_row(*cells[: 3 + len(columns)])
        return made

    if parts_ms:
        print_first_that_fits([table(*columns)] for columns in (["what happens"], []))


def print_step_terms(step: Mapping[str, Any]) -> None:
    """Prints the terms that add up to the time of one step. step: sizes of the step, and its terms in ms. Terms that
    round to 0.000 ms are left out.
    """
    total = sum(step["terms_ms"].values())
    work = [counted(step["num_requests"], "request"), counted(step["new_tokens"], "new token")]
    if step["context_tokens"]:
        work.append(counted(step["context_tokens"], "token") + " of KV")
    table = new_table("", "part", "ms", "share")
    for name, duration_ms in step["terms_ms"].items():
        if round(duration_ms, 3):
            table.add_row(name, f"{duration_ms:.3f}", f"{duration_ms / total:.1%}")
    table.add_section()
    table.add_row("total", f"{total:.3f}", "100.0%")
    console = new_console()
    console.print(f"[bold]{step['step']} of {step['instance_id']}[/bold]: {', '.join(work)}", highlight=False)
    console.print(table)


def print_kernels(kernels: Mapping[str, Mapping[str, str]]) -> None:
    """Prints where the times of operators were measured. kernels: for each role, a text by operator."""
    console = new_console()
    for role, sources in kernels.items():
        table = new_table(f"kernels of {role}", "operator", "kind, and where it was measured")
        for operator, source in sources.items():
            table.add_row(operator.replace("_", " "), source)
        console.print(table)


def print_sensitivities(found: Sequence[Sensitivity]) -> None:
    """Prints the effect of 10 % more of each resource, and which resource limits each metric. Changes that may be
    chance are in parentheses.
    """
    titles = [title.replace(" ", "\n") for title in MEASURES.values()]
    table = new_table("with 10 % more of one resource", "resource", *titles)
    for one in found:
        table.add_row(one.resource, *(_effect(one, name) for name in MEASURES))
    if noise := found[0].noise:
        table.add_section()
        table.add_row("chance alone, up to", *(f"{noise[name].width:.1%}" for name in MEASURES))
    console = new_console()
    console.print(table)
    if noise:
        runs = f"{len(JITTERS)} runs with messages up to {JITTERS[-1]:.0%} faster or slower"
        console.print(f"Chance: {runs}. (Changes in parentheses) are no larger.", highlight=False)
    for limit in limits(found):
        console.print(str(limit), highlight=False)


def _effect(one: Sensitivity, name: str) -> str:
    text = percentage(one.changes[name])
    return f"({text})" if one.by_chance(name) and text != percentage(0) else text


def print_request(request: RequestRecord) -> None:
    console = new_console()
    place = f"{request.prefill_id} -> {request.decode_id}"
    sizes = f"{request.num_prompt_tokens:,} + {request.num_output_tokens:,} tokens"
    title = f"request {request.request_id}: {sizes}, {place}, {request.outcome} {request.reason}".strip()
    console.print(f"[bold]{title}[/bold]", highlight=False)

    def table(*columns: str) -> Table:
        made = new_table("", "stage", "from, s", "ms", *columns)
        for stage, (begin_ns, end_ns) in stage_spans(request).items():
            cells = (stage, f"{begin_ns / 1e9:,.4f}", f"{(end_ns - begin_ns) / 1e6:,.2f}", ALL_STAGES[stage][2])
            made.add_row(*cells[: 3 + len(columns)])
        return made

    if request.outcome == "finished":
        print_first_that_fits([table(*columns)] for columns in (["what happens"], []))
    prefill, decode = request.num_prefill_cached_tokens, request.num_decode_cached_tokens
    console.print(f"cached: {prefill:,} tokens on prefill, {decode:,} on decode", highlight=False)
    sent = f"sent: {request.transfer_bytes / 1e6:,.1f} MB; retracted {counted(request.num_retractions, 'time')}"
    retried = f"; retried {counted(request.num_retries, 'time')}" if request.num_retries else ""
    console.print(sent + retried, highlight=False)


def tail_json(tail: Tail, command: str) -> dict[str, Any]:
    """The slowest requests as JSON. Each group also has `relief`, the scenario fields that would help, and `explain`, a
    command that shows its example request. command: the command that explains the run.
    """
    groups = [
        {
            **asdict(group),
            "relief": relief_of(group.resource, aggregated=tail.is_aggregated),
            "explain": _explains(command, group),
        }
        for group in tail.groups
    ]
    return {**asdict(tail), "groups": groups}


def print_tail(tail: Tail, command: str) -> None:
    """Prints a table of the groups of slowest requests, then a paragraph on each group. command: explains the run;
    options are added.
    """
    console = new_console()
    title, unit = _TITLES[tail.metric], " a token" * (tail.metric == "tpot")
    size = f"{tail.num_requests:,} of {counted(tail.num_all, 'request')}"
    console.print(f"[bold]The slowest {tail.percent:g}% by {title}: {size}[/bold]", highlight=False)
    console.print(f"{time_text(tail.from_ms)} or more; median of all: {time_text(tail.median_ms)}", highlight=False)
    table = new_table("")
    for column in ("what they waited for", "requests", "share", f"median{unit}", "of all"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    for group in tail.groups:
        times = (time_text(group.median_ms), time_text(group.all_median_ms))
        table.add_row(group.cause, f"{group.num_requests:,}", f"{group.share:.0%}", *times)
    console.print(table)
    for group in tail.groups:
        console.print(f"[bold]{group.cause}[/bold]", highlight=False)
        relief = relief_of(group.resource, aggregated=tail.is_aggregated)
        for line in (_sizes(group), _where_and_when(group), f"relieved by {relief}" if relief else ""):
            if line:
                console.print(line, highlight=False, markup=False)
        console.print(f"  {_explains(command, group)}\n", highlight=False, markup=False, soft_wrap=True)


def _explains(command: str, group: TailGroup) -> str:
    return f"{command} --request {group.example}"


def _sizes(group: TailGroup) -> str:
    if group.tokens is None or group.all_tokens is None:
        return ""
    what = "tokens computed" if group.part == "prefill compute" else "output tokens"
    return f"{what}, median: {group.tokens:,.0f}; of all requests: {group.all_tokens:,.0f}"


def _where_and_when(group: TailGroup) -> str:
    where = _counts(group.instances, group.num_requests)
    when = f"arrived at {group.first_s:,.2f} s"
    if group.last_s > group.first_s:
        share = f"{max(0.01, group.window_share):.0%} of the run"
        when = f"arrived from {group.first_s:,.2f} to {group.last_s:,.2f} s, {share}"
    if group.load is not None and group.load >= _VISIBLE_LOAD and group.num_requests >= _FEW:
        when += f", in a burst: {group.load:.1f} times the usual arrivals"
    return "; ".join(filter(None, (where, when)))


def _counts(instances: Mapping[str, int], total: int) -> str:
    if not instances:
        return ""
    return f"on {', '.join(name if n == total else f'{name} ({n:,})' for name, n in instances.items())}"


def print_catalog() -> None:
    def models(*columns: str) -> Table:
        made = new_table("models (KV in bf16, all of it on one GPU)", "model", *columns)
        for name in names("models"):
            m = load_model(name)
            cells = {
                "total": f"{m.num_params / 1e9:,.1f} B",
                "active": f"{m.num_active_params / 1e9:,.1f} B",
                "layers": str(m.num_layers),
                "KV bytes\na token": f"{2 * m.attention.num_kv_elements(1):,}",
                "context": f"{m.max_context_tokens:,}",
                "weights": ", ".join(m.weight_dtypes),
            }
            made.add_row(name, *(cells[column] for column in columns))
        return made

    few = ("total", "active", "layers", "KV bytes\na token", "context")
    print_first_that_fits([models(*columns)] for columns in ((*few, "weights"), few))
    gpus = new_table("GPUs", "GPU", "memory\nGB", "TB/s", "TFLOPS", "NVLink\nGB/s", "NIC\nGB/s")
    for name in names("gpus"):
        g = load_gpu(name)
        flops = ", ".join(f"{dtype} {rate / 1e12:,.0f}" for dtype, rate in g.flops.items())
        rates = (f"{g.memory_bytes / 1e9:.1f}", f"{g.memory_bandwidth / 1e12:.2f}", flops)
        gpus.add_row(name, *rates, f"{g.nvlink_bandwidth / 1e9:.0f}", f"{g.nic_bandwidth / 1e9:.0f}")
    new_console().print(gpus)
