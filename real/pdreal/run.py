"""Runs the workload of a scenario for real, and writes its results."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdreal.clients import Clients
from pdreal.control.requests import NO_DRAFTS, Drafted
from pdreal.hosts.processes import STOP_SIGNALS
from pdreal.launcher import Launcher
from pdreal.reference import read_reference
from pdreal.run_folder import finished_run, keep_run, logbooks, note_begin
from pdreal.settings.model import model_config
from pdreal.settings.options import Options
from pdreal.settings.scenario import real_scenario
from pdsim.cli.finished import FinishedRun, progress_over
from pdsim.metrics.distribution import Samples
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import named
from pdsim.workload.request_spec import RequestSpec


@dataclass
class RealRun:
    """Results of a run that are not in its logbooks."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Output token ids of each request that has ended, by request id."""
    leaks: list[str] = field(default_factory=list)
    """Pages, locks and bytes that were still held when all requests had ended. Each entry is an error."""
    failure: str | None = None
    """Why the run failed, as text. None: the run did not fail."""
    interrupted: bool = False
    """True: a stop signal (SIGINT or SIGTERM) interrupted the run."""
    late_ns: list[int] = field(default_factory=list)
    """By how much clients sent their requests late, in ns. Only requests with a scheduled time count: those of an open
    loop, those after a session's pause, and the first of the sessions that a closed loop begins at one time."""
    drafted: Drafted = NO_DRAFTS
    """Counts of accepted drafts (fields of Drafted), summed over all requests that finished."""
    hosts: dict[str, Any] = field(default_factory=dict)
    """Offset, error and drift of each other host's clock in ms, by host (RemoteHost.described)."""


def run_scenario(
    path: Path,
    changes: Sequence[str],
    options: Options,
    out: Path | None,
    *,
    quiet: bool,
    reference: Path | None = None,
) -> tuple[FinishedRun, RealRun]:
    """Runs a scenario file with `changes` applied. Raises ConfigError if real mode cannot run the scenario, and
    LaunchError if this machine lacks a device or package that the scenario needs.

    reference: run folder of the same requests without drafts, whose outputs accepted drafts repeat. None: the draft
    model's own proposals are accepted. Raises RunFolderError if that run does not fit, or `out` cannot become the run
    folder. quiet: True: no progress is shown.
    """
    with named(path):
        scenario, requests = real_scenario(load_scenario(path, changes), options)
    vocab_size = model_config(options, scenario.model).vocab_size
    expected = {} if reference is None else read_reference(reference, requests, vocab_size)
    with logbooks(out) as logs, progress_over(scenario.name, len(requests), quiet=quiet) as advance:
        if out is not None:
            note_begin(logs, scenario, options, len(requests))
        real = asyncio.run(run(scenario, requests, options, logs=logs, progress=advance, reference=expected))
        extra = _facts_of(real, options)
        if reference is not None:
            extra["reference_match"] = _match(real.outputs, expected)
        with _stop_signals_ignored():
            finished = finished_run(logs, scenario, extra)
            if out is not None:
                try:
                    keep_run(out, scenario, finished, quiet=quiet)
                except OSError as error:
                    why = error.strerror or error
                    real.failure = f"{out}: {why}; the run's logs are in {logs}, and `pdreal recover {out}` reads them"
    return finished, real


@contextmanager
def _stop_signals_ignored() -> Iterator[None]:
    """Context in which stop signals have no effect. The run has ended, and its results must be written completely."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _facts_of(real: RealRun, options: Options) -> dict[str, Any]:
    """Returns the fields of the summary that cannot be computed from the logbooks: whether the run was interrupted, its
    device, dtype and weights, how late the client sent requests in ms, which share of accepted drafts the target model
    confirmed, which share of the others were near ties, and with several hosts their clock offsets.
    """
    late_ms = Samples(late_ns / 1e6 for late_ns in real.late_ns)
    facts: dict[str, Any] = {"interrupted": real.interrupted}
    facts |= {"device": options.device, "dtype": options.dtype, "weights": options.weights}
    facts |= {"p99_client_late_ms": late_ms.percentile(99), "max_client_late_ms": late_ms.percentile(100)}
    if real.drafted.num_accepted:
        facts["confirmed_drafts"] = real.drafted.num_confirmed / real.drafted.num_accepted
        if num_others := real.drafted.num_accepted - real.drafted.num_confirmed:
            facts["near_ties"] = real.drafted.num_near / num_others
    if options.hosts is not None:
        facts["hosts"] = real.hosts
    return facts


def _match(outputs: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]) -> float:
    """Returns the share, from 0 to 1, of output tokens that equal the token at the same index of the expected output.
    outputs, expected: token ids by request id.
    """
    pairs = [(output, expected.get(request_id, ())) for request_id, output in outputs.items()]
    num_equal = sum(a == b for output, other in pairs for a, b in zip(output, other, strict=False))
    return num_equal / max(1, sum(len(output) for output, _ in pairs))


async def run(
    scenario: Scenario,
    requests: Sequence[RequestSpec],
    options: Options,
    *,
    logs: Path | None = None,
    progress: Callable[[int], Any] = lambda _: None,
    reference: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> RealRun:
    """Runs requests of a resolved scenario. Returns when every request has ended and every process is gone.

    progress: called with the number of ended requests when one ends. reference: output token ids of a run without
    drafts, by request id; the drafts that the run accepts are these tokens.
    """
    real = RealRun()
    clients = Clients(scenario, requests, options, progress=progress, reference=reference)
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
    real.drafted, real.hosts = clients.drafted, launcher.hosts
    return real
