"""Tables on the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pdsim.calibration.compare import ArmErrors
from pdsim.metrics.explain import STAGES, instance_limits, stage_ms, stage_times, stages_of
from pdsim.metrics.records import RequestRecord, RunRecords
from pdsim.system.catalog import load_gpu, load_model, names

_FIELDS = (
    ("completed", "requests completed", "{:,.0f}", 0),
    ("duration", "duration, s", "{:,.1f}", 0),
    ("request_throughput", "requests/s", "{:,.3f}", +1),
    ("input_throughput", "input tokens/s", "{:,.0f}", +1),
    ("output_throughput", "output tokens/s", "{:,.1f}", +1),
    ("mean_ttft_ms", "TTFT mean, ms", "{:,.1f}", -1),
    ("median_ttft_ms", "TTFT median, ms", "{:,.1f}", -1),
    ("p99_ttft_ms", "TTFT p99, ms", "{:,.1f}", -1),
    ("mean_tpot_ms", "TPOT mean, ms", "{:,.2f}", -1),
    ("p99_tpot_ms", "TPOT p99, ms", "{:,.2f}", -1),
    ("p99_itl_ms", "ITL p99, ms", "{:,.2f}", -1),
    ("median_e2e_latency_ms", "latency median, ms", "{:,.1f}", -1),
    ("p99_e2e_latency_ms", "latency p99, ms", "{:,.1f}", -1),
    ("concurrency", "concurrency", "{:,.1f}", 0),
    ("pdsim.mean_running_requests", "decoding, mean", "{:,.1f}", 0),
    ("pdsim.prefill_cache_hit_rate", "prefill cache hits", "{:.1%}", 0),
    ("pdsim.decode_cache_hit_rate", "decode cache hits", "{:.1%}", 0),
    ("pdsim.transfer_bytes", "KV sent, bytes a rank", "{:,.0f}", -1),
    ("pdsim.retractions", "retractions", "{:,.0f}", -1),
)
"""Field, title, format, and whether more is better."""


def print_summaries(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    table = _table("")
    for i, name in enumerate(summaries):
        table.add_column(name, justify="right")
        if i:
            table.add_column("", justify="right")
    first = next(iter(summaries.values()))
    for field, title, form, better in _FIELDS:
        row = [title]
        for i, summary in enumerate(summaries.values()):
            value = _field(summary, field)
            row.append(form.format(value))
            if i:
                row.append(_difference(value, _field(first, field), better))
        table.add_row(*row)
    _console().print(table)


def print_stages(runs: Mapping[str, RunRecords]) -> None:
    table = _table("where the time goes", "stage", "request")
    for name in runs:
        for column in (f"{name}\nmean, ms", "median", "p99", "share"):
            table.add_column(column, justify="right")
    by_run = [{times.stage: times for times in stage_times(records.requests)} for records in runs.values()]
    for stage, (_, _, meaning) in STAGES.items():
        cells = [stage, meaning]
        for run in by_run:
            times = run.get(stage)
            if times is None:
                cells += [""] * 4
            else:
                values = (times.mean_ms, times.median_ms, times.p99_ms)
                cells += [*(f"{value:,.1f}" for value in values), f"{times.share:.1%}"]
        if any(stage in run for run in by_run):
            table.add_row(*cells)
    _console().print(table)


def print_limits(runs: Mapping[str, RunRecords]) -> None:
    columns = ("instance", "busy", "blocked: pages", "blocked: slots", "pages used", "running", "link busy", "limit")
    table = _table("what limits each instance, as shares of its time", *columns)
    for name, records in runs.items():
        if len(runs) > 1:
            table.add_row(f"[bold]{name}[/bold]")
        for limit in instance_limits(records):
            shares = (limit.busy, limit.blocked_by_pages, limit.blocked_by_slots, limit.mean_pages_used)
            cells = [f"{share:.1%}" for share in shares]
            table.add_row(limit.instance_id, *cells, f"{limit.mean_running:.1f}", f"{limit.link_busy:.1%}", limit.limit)
    _console().print(table)


def print_request(request: RequestRecord) -> None:
    title = f"request {request.request_id}: {request.num_prompt_tokens} + {request.num_output_tokens} tokens, "
    where = request.prefill_id if request.is_aggregated else f"{request.prefill_id} -> {request.decode_id}"
    title += f"{where}, {request.outcome} {request.reason}"
    table = _table(title, "stage", "", "from, s", "ms")
    if request.outcome == "finished":
        for stage, duration in stage_ms(request).items():
            first, _, meaning = stages_of(request)[stage]
            table.add_row(stage, meaning, f"{getattr(request, first) / 1e9:,.4f}", f"{duration:,.2f}")
    cached = f"cached: {request.num_prefill_cached_tokens} tokens on prefill"
    if not request.is_aggregated:
        cached += f", {request.num_decode_cached_tokens} on decode; sent: {request.transfer_bytes:,} bytes a rank"
    table.add_row("", f"{cached}; retracted {request.num_retractions} times")
    _console().print(table)


def print_errors(arms: Iterable[ArmErrors]) -> None:
    table = _table("", "case", "arm", "metric", "measured", "simulated", "error", "asked for")
    for arm in arms:
        name = f"{arm.arm} ({'fitted' if arm.fitted else 'predicted'})"
        for i, (metric, m) in enumerate(arm.metrics.items()):
            asked = "" if m.within is None else f"{m.within:.0%} {'met' if m.is_met else '[red]missed[/red]'}"
            cells = (f"{m.measured:,.4g}", f"{m.simulated:,.4g}", f"{m.error:+.1%}", asked)
            table.add_row(arm.case if i == 0 else "", name if i == 0 else "", metric, *cells)
        table.add_section()
    _console().print(table)


def print_catalog() -> None:
    columns = ("model", "parameters", "active", "layers", "weights", "KV bytes a token (bf16, tp 1)", "context")
    models = _table("models", *columns)
    for name in names("models"):
        m = load_model(name)
        kv = 2 * m.attention.num_kv_elements(1)
        size, active = f"{m.num_params / 1e9:,.1f} B", f"{m.num_active_params / 1e9:,.1f} B"
        models.add_row(name, size, active, str(m.num_layers), m.weight_dtype, f"{kv:,}", f"{m.max_context_tokens:,}")
    gpus = _table("GPUs", "GPU", "memory, GB", "TB/s", "TFLOPS", "NVLink, GB/s", "NIC, GB/s")
    for name in names("gpus"):
        g = load_gpu(name)
        flops = ", ".join(f"{dtype} {rate / 1e12:,.0f}" for dtype, rate in g.flops.items())
        rates = (f"{g.memory_bytes / 1e9:.1f}", f"{g.memory_bandwidth / 1e12:.2f}", flops)
        gpus.add_row(name, *rates, f"{g.nvlink_bandwidth / 1e9:.0f}", f"{g.nic_bandwidth / 1e9:.0f}")
    console = _console()
    console.print(models)
    console.print(gpus)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    if not columns:
        table.add_column("")
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i == 0 or column in {"request", "limit", "arm", "metric", ""} else "right"
        )
    return table


def _console() -> Console:
    """Wide enough for every column where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _field(summary: Mapping[str, Any], path: str) -> float:
    value: Any = summary
    for key in path.split("."):
        value = value[key]
    return float(value)


def _difference(value: float, reference: float, better: int) -> str:
    if not reference:
        return ""
    change = value / reference - 1
    color = {1: "green", -1: "red", 0: ""}[(change > 0) * better - (change < 0) * better] if better else ""
    text = f"{change:+.1%}"
    return f"[{color}]{text}[/{color}]" if color else text
