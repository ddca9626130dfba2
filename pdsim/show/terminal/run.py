"""Prints a run for `pdsim run`: a headline, the key numbers, where the time of requests goes, failures, warnings, and
the confidence. The headline says whether the SLO is met or, without an SLO, gives throughput and latencies.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.metrics.explanation.failures import failures_in
from pdsim.metrics.explanation.stages import stage_shares
from pdsim.metrics.records import Records
from pdsim.metrics.summary_rows import (
    SUMMARY_ROWS,
    SummaryRow,
    between,
    counted,
    range_note,
    ranges_of,
    significant,
    time_text,
)
from pdsim.scenario.schema import Scenario
from pdsim.show.terminal.layout import new_console
from pdsim.show.terminal.screen import print_command, print_confidence, print_headline, print_sentence, screen_table
from pdsim.study.base import pace_of
from pdsim.study.measurement import Measurement, measurement, sizes_of
from pdsim.study.servers import Server, label_of
from pdsim.study.verdict.confidence import Examined, confidence_in_numbers, limit_rows
from pdsim.workload.client import ClosedLoop

KEY_FIELDS = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "median_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "pdsim.retries",
    "pdsim.failed",
)
"""Fields of a summary that are printed first; --details prints all. The last two are left out if they are 0."""
_NUM_STAGES = 3
_IN_STAGE = {
    "front_end": "front end",
    "decode_bootstrap": "waiting for decode memory",
    "encode_waiting": "waiting for an encode instance",
    "encode_forward": "encoding images and audio",
    "embedding_transfer": "sending embeddings",
    "prefill_waiting": "waiting for prefill",
    "prefill_forward": "prefill",
    "prefill_transfer_kv_cache": "sending KV",
    "decode_transferred": "waiting to join the batch",
    "response": "passing the gateway",
    "decode_forward": "decode",
}
"""For each stage: words for what a request does in it."""
_KERNELS_ALONE = ": only kernels of "
"""Text by which is_of_kernels finds the warning that only kernels were measured. This warning is printed with --details
only, because the text on confidence says the same.
"""


def print_run(
    name: str,
    summary: Mapping[str, Any],
    records: Records,
    scenario: Scenario,
    examined: Examined | None,
    *,
    explain: str,
    details: bool,
) -> None:
    """Prints the key numbers of a run. summary: numbers by field, as in summary.json. examined: the run judged by an
    SLO; None: no SLO is given. explain: the command that explains the run; empty: the user named neither a scenario
    file nor a folder for the run, so no command can. details: True: prints all numbers, stages and warnings, too.
    """
    console = new_console()
    print_headline(console, _headline(summary, scenario, examined))
    print_sentence(console, f"{load_text(summary, records, scenario)}.")
    if hint := _start_text(summary, scenario):
        print_sentence(console, hint)
    print_numbers(summary, examined)
    if stages := stage_text(stage_shares(one for one in records.requests if one.outcome == "finished")):
        print_sentence(console, f"Where a request's time goes: {stages}.")
    for failure in failures_in(summary):
        print_sentence(console, f"{counted(failure.num_requests, 'request')} failed: {failure.text}.")
    for warning in summary["pdsim"].get("warnings", ()):
        if details or not is_of_kernels(warning):
            print_command(console, f"warning: {name}: {warning}")
    console.print()
    has_range = "interval" in summary["pdsim"]
    in_numbers = confidence_in_numbers(scenario, has_range=has_range)
    found = in_numbers if examined is None else examined.confidence(scenario)
    print_confidence(console, found, measure_of(scenario, summary))
    if note := range_note(summary):
        print_sentence(console, f"{note[0].upper()}{note[1:]}.")
    console.print()
    if details:
        from pdsim.show.terminal.tables import print_stages, print_summaries  # noqa: PLC0415  few ask for them

        print_summaries({name: summary})
        print_stages({name: records})
    for line in _next(explain, details=details):
        print_command(console, line)


def is_of_kernels(warning: str) -> bool:
    """True if the warning says that only kernels were measured, which the text on confidence says as well."""
    return _KERNELS_ALONE in warning


def cluster_text(scenario: Scenario) -> str:
    """The servers and GPUs of a cluster as text, such as "2 x H100 (1P1D of TP1)"."""
    roles = [Server(servers.gpu, servers.split) for servers in scenario.roles.values()]
    label = label_of(roles, [servers.instances for servers in scenario.roles.values()], names_gpu=False)
    gpus = [servers.gpu.upper() for servers in scenario.roles.values()]
    if (encode := scenario.encode) is not None:
        label, gpus = f"{label}, {encode.instances} encoding", [*gpus, encode.gpu.upper()]
    return f"{scenario.num_gpus} x {' and '.join(dict.fromkeys(gpus))} ({label})"


def load_text(summary: Mapping[str, Any], records: Records, scenario: Scenario) -> str:
    """Text on the finished requests that a summary counts: their number, source and mean lengths in tokens, and when
    requests are sent. If warm-up requests are left out of the summary, the text ends with their number. records: of the
    same requests.
    """
    count = max(1, summary["completed"])
    tokens = [summary[f"total_{what}_tokens"] / count for what in ("input", "output")]
    path = getattr(scenario.workload, "path", None)
    source = f" of {path.name}" if path is not None else ""
    text = f"{counted(summary['completed'], 'request')}{source} (mean {tokens[0]:,.0f} tokens in, {tokens[1]:,.0f} out)"
    left_out = summary["pdsim"].get("warm_up_requests", 0)
    warm_up = f"; {counted(left_out, 'request')} before them warmed up and do not count" if left_out else ""
    return f"{text}, sent {_pace(records, scenario)}{warm_up}"


def _start_text(summary: Mapping[str, Any], scenario: Scenario) -> str:
    """A sentence that says how the clients of a closed loop start, and that the requests of this start count in the
    summary. Empty: there is no closed loop with several clients, or the summary leaves out the first requests.
    """
    client = scenario.client
    if not isinstance(client, ClosedLoop) or client.concurrency == 1 or summary["pdsim"].get("warm_up_requests"):
        return ""
    why = f", because the load has fewer than {2 * client.concurrency:,}" if client.warm_up_requests is None else ""
    how = "All clients send at once at the start" if client.ramp_ns is None else "Clients begin over the ramp"
    return f"{how}, and these requests count{why}."


def _pace(records: Records, scenario: Scenario) -> str:
    if isinstance(scenario.client, ClosedLoop):
        return f"by {counted(scenario.client.concurrency, 'client')} that each wait for their answer"
    rate = getattr(scenario.client.arrivals, "rate_per_s", None)
    return pace_of(one.arrival_ns for one in records.requests) if rate is None else f"{rate:g} a second"


def measure_of(scenario: Scenario, summary: Mapping[str, Any]) -> Measurement | None:
    """The measurement that the user can make on one server, because times of the scenario were not measured and have a
    range (Scenario.uncertain). None: no times have a range. The summary gives the sizes to measure; whether the summary
    has ranges makes no difference.
    """
    return measurement(scenario.uncertain, scenario, sizes_of(scenario, {**summary, **summary["pdsim"]}))


def stage_text(shares: Mapping[str, float]) -> str:
    """Text with the stages in which requests spend most of their time, and their shares: at most _NUM_STAGES stages,
    without those below 0.5 %. Empty if no request finished. shares: each stage's share of the latency.
    """
    longest = sorted(shares.items(), key=lambda one: -one[1])[:_NUM_STAGES]
    return ", ".join(f"{share:.0%} {_IN_STAGE[stage]}" for stage, share in longest if round(share, 2))


def _headline(summary: Mapping[str, Any], scenario: Scenario, examined: Examined | None) -> str:
    cluster = f"{scenario.model} on {cluster_text(scenario)}"
    if examined is not None and examined.outcome.meets:
        return f"{cluster} meets your SLO"
    if examined is not None:
        return f"{cluster} misses your SLO: {examined.outcome.lack}"
    if not summary["completed"]:
        return f"{cluster}: no request finished"
    ttft = time_text(summary["p99_ttft_ms"])
    tpot = summary["p99_tpot_ms"]
    between_tokens = f", TPOT p99 {time_text(tpot)}" if tpot else ""
    return f"{cluster}: {significant(summary['request_throughput'])} requests/s, TTFT p99 {ttft}{between_tokens}"


def key_rows(summaries: Sequence[Mapping[str, Any]]) -> list[tuple[SummaryRow, list[float | None]]]:
    """The rows of KEY_FIELDS, which the terminal shows before all others, each with the values of the runs. Rows for
    which no run has a value are left out, and so are retries and failures if they are 0 in every run.
    """
    rows = [row for field in KEY_FIELDS for row in SUMMARY_ROWS if row.field == field]
    found = [(row, [row.value(summary) for summary in summaries]) for row in rows]
    is_optional = ("pdsim.retries", "pdsim.failed")
    return [
        (row, values)
        for row, values in found
        if any(values) or (row.field not in is_optional and any(value is not None for value in values))
    ]


def value_text(row: SummaryRow, value: float | None) -> str:
    """Text of a value; if it is a time, with its unit. Empty: the value is None."""
    if value is None:
        return ""
    return time_text(value) if row.kind == "time" else row.cells([value])[1][0]


def print_numbers(summary: Mapping[str, Any], examined: Examined | None) -> None:
    """Prints the limits of the SLO, if there is one, then the key numbers that no limit shows, each with its range if
    there is one. examined: verdict on the run under the SLO; None: there is no SLO.
    """
    ranges = ranges_of(summary)
    limits = []
    if examined is not None:
        limits = limit_rows(examined.outcome.readings, [one.readings for one in examined.ends.values()])
    rows = [*limits]
    has_ranges = bool(ranges or (examined is not None and examined.ends))
    for row, (value,) in key_rows([summary]):
        if row.title not in {name for name, *_ in limits}:
            limit = [] if examined is None else [""]
            rows.append([row.title, *limit, value_text(row, value), *([between(row.field, ranges)] if ranges else [])])
    source = "predicted" if summary.get("backend") == "pdsim" else "measured"
    head = ["", *([] if examined is None else ["limit"]), source]
    new_console().print(screen_table([*head, *(["range: fast to slow servers"] if has_ranges else [])], rows))


def _next(explain: str, *, details: bool) -> list[str]:
    """Commands that the user may run next. explain: the command that explains the run; empty: there is none. details:
    True: the user gave --details.
    """
    found = [f"What limits it:  {explain} --tornado"] if explain else []
    return found if details else [*found, "Say more:        the same command with --details"]


def explain_command(path: Path, changes: Sequence[str] = (), profile: Sequence[str] = ()) -> str:
    given = [word for file in profile for word in ("--profile", file)]
    given += [word for change in changes for word in ("--set", change)]
    return shlex.join(["pdsim", "explain", str(path), *given])
