"""Runs the workload of a scenario for real, and keeps what it leaves behind."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdreal.clients import Clients
from pdreal.control.expert_counts import write_counts
from pdreal.control.logbook import read_counted_steps, read_journal, read_records
from pdreal.hosts.processes import STOP_SIGNALS
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.launcher import Launcher
from pdreal.settings.host import LaunchError
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario
from pdsim.cli.finished import ALL_KEPT, FinishedRun, progress_over, write_run
from pdsim.files import remove_own
from pdsim.metrics.distribution import Samples
from pdsim.metrics.failures import failure_rows
from pdsim.metrics.records import without_first
from pdsim.metrics.run_folder import LOG_FILES, LOGS, journal_writer, run_replaced
from pdsim.metrics.summary import host_cache_fields, summarize
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import host_caches
from pdsim.workload.client import warm_up_requests
from pdsim.workload.request_spec import RequestSpec


@dataclass
class RealRun:
    """Outcome of a run, besides logbooks."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each request that has ended."""
    leaks: list[str] = field(default_factory=list)
    """Pages, locks and bytes that did not come back when all requests had ended: none, or a law is broken."""
    failure: str | None = None
    interrupted: bool = False
    late_ns: list[int] = field(default_factory=list)
    """Delays of requests that were due at a time of their own."""
    hosts: dict[str, Any] = field(default_factory=dict)
    """Clocks of other hosts."""


def run_scenario(
    path: Path, changes: Sequence[str], options: Options, out: Path | None, *, quiet: bool
) -> tuple[FinishedRun, RealRun]:
    """Raises ConfigError for what cannot be run for real, LaunchError for what this machine lacks."""
    scenario, requests = real_scenario(load_scenario(path, changes), options)
    with _logbooks(out) as logs, progress_over(scenario.name, len(requests), quiet=quiet) as advance:
        real = asyncio.run(run(scenario, requests, options, logs=logs, progress=advance))
        records = read_records(logs)
        extra: dict[str, Any] = {"events": 0, "stalled": False, "interrupted": real.interrupted}
        extra |= {"device": options.device, "dtype": options.dtype, "weights": options.weights}
        late_ms = Samples(late_ns / 1e6 for late_ns in real.late_ns)
        extra |= {"p99_client_late_ms": late_ms.percentile(99), "max_client_late_ms": late_ms.percentile(100)}
        if options.hosts is not None:
            extra["hosts"] = real.hosts
        if host_caches(scenario):
            extra |= host_cache_fields(records.host_copies, scenario.page_size)
        if failures := failure_rows(records.requests, has_faults=scenario.has_server_faults):
            extra["failures"] = failures
        if num_warm_up := warm_up_requests(scenario.client, len(records.requests)):
            extra["warm_up_requests"] = num_warm_up
        judged = without_first(records, num_warm_up)
        summary = {**scenario.benchmark_fields("pdreal"), **summarize(judged, extra=extra)}
        finished = FinishedRun(scenario.name, summary, records, interrupted=real.interrupted)
        if out is not None:
            try:
                with run_replaced(out) as folder:
                    with journal_writer(folder) as write:
                        for entry in read_journal(logs):
                            write(entry)
                    write_run(folder, scenario, finished, write.proof, keep=ALL_KEPT, quiet=quiet)
                    if steps := read_counted_steps(logs):
                        write_counts(folder, steps)
                remove_own(logs, LOG_FILES)
            except OSError as error:
                real.failure = f"{out}: {error}; what the run did is in {logs}"
    return finished, real


@contextmanager
def _logbooks(out: Path | None) -> Iterator[Path]:
    """The folder that they grow in: of the run folder, where there is one, so that they outlive a kill."""
    if out is None:
        with ScratchFolder() as folder:
            yield folder
        return
    logs = out / LOGS
    remove_own(logs, LOG_FILES)
    logs.mkdir(parents=True)
    try:
        yield logs
    except LaunchError:
        remove_own(logs, LOG_FILES)  # nothing was run
        raise


async def run(
    scenario: Scenario,
    requests: Sequence[RequestSpec],
    options: Options,
    *,
    logs: Path | None = None,
    progress: Callable[[int], Any] = lambda _: None,
) -> RealRun:
    """scenario: resolved. Returns when every request has ended and every process is gone."""
    real = RealRun()
    clients = Clients(scenario, requests, options, progress=progress)
    launcher = Launcher(scenario, options, folder=logs, on_end=clients.on_end)
    loop = asyncio.get_running_loop()
    starting = loop.create_task(launcher.start())

    def stop() -> None:
        clients.stop()
        starting.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            return RealRun(interrupted=True)
        starting.result()
        try:
            await clients.serve(launcher)
        finally:
            real.leaks = await launcher.stop()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
    real.outputs, real.late_ns = clients.outputs, clients.late_ns
    real.failure, real.interrupted = launcher.failure, clients.stopped
    real.hosts = launcher.hosts
    return real
