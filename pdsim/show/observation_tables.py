"""Tables of an observation: what it would send, and what it found."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pdsim.calibration.observe.folder import summary_of
from pdsim.calibration.observe.plan import Budget, Load, Probe
from pdsim.metrics.summary_rows import significant
from pdsim.show.tables import new_console, new_table

if TYPE_CHECKING:
    from pdsim.calibration.observe.session import Session

_SHOWN = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_latency_ms")


def print_plan(url: str, budget: Budget, probes: Sequence[Probe], loads: Iterable[Load]) -> None:
    """Prints the probes of each kind, and the loads."""
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


def print_observation(session: "Session") -> None:
    about = session.about
    console = new_console()
    server = f"{about['server']} {about['version']}".strip()
    rows = ", ".join(f"{count} {kind}" for kind, count in session.num_rows.items())
    console.print(
        f"{about['model']} on {server} at {about['url']}: {session.seconds:.0f} s, rows: {rows}", highlight=False
    )
    if session.loads:
        table = new_table(
            "loads", "arm", "requests", "requests/s", "TTFT mean, ms", "TPOT mean, ms", "latency mean, ms"
        )
        for load in session.loads:
            summary = summary_of(load["requests"])
            table.add_row(load["name"], str(len(load["requests"])), *(significant(summary[name]) for name in _SHOWN))
        console.print(table)
    console.print(f"observation: {session.folder}")
