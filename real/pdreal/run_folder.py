"""The run folder of a real run. Logbooks grow in it while the run lasts; at the end, or later by `recover`, results are
made from them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pdreal.control.expert_counts import write_counts
from pdreal.control.logbook import read_counted_steps, read_journal, read_records
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.settings.host import LaunchError
from pdreal.settings.options import Options
from pdsim.cli.finished import ALL_KEPT, FinishedRun, write_run, write_scenario
from pdsim.files import own_lock, remove_own, write_whole
from pdsim.inputs import InputError, read_json
from pdsim.metrics.explanation.failures import failure_rows
from pdsim.metrics.journal_file import journal_writer
from pdsim.metrics.run_folder import ABOUT, LOG_FILES, LOGS, SCENARIO, run_replaced
from pdsim.metrics.summary import host_cache_fields, storage_fields, summarize
from pdsim.metrics.tables import RunFolderError
from pdsim.scenario.building.sizing import host_caches, resolve
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.workload.client import warm_up_requests


@contextmanager
def logbooks(out: Path | None) -> Iterator[Path]:
    """Context with the folder in which processes write records and logs. With `out`, this folder lies in the run folder
    `out`, and stays if pdreal is killed. None: this folder is a scratch folder.
    """
    if out is None:
        with ScratchFolder() as folder:
            yield folder
        return
    logs = out / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with _owned(logs):
        remove_own(logs, LOG_FILES)
    logs.mkdir()
    with _owned(logs):
        try:
            yield logs
        except LaunchError:
            remove_own(logs, LOG_FILES)  # nothing was run
            raise


@contextmanager
def _owned(logs: Path) -> Iterator[None]:
    """Context in which this process owns the logbooks. Raises RunFolderError if another process writes to them."""
    with ExitStack() as lock:
        try:
            lock.enter_context(own_lock(logs))
        except BlockingIOError:
            raise RunFolderError(f"{logs}: another pdreal process writes to this folder") from None
        yield


def note_begin(logs: Path, scenario: Scenario, options: Options, num_requests: int) -> None:
    """Writes the run's scenario, device, dtype, weights and number of requests. `recover` reads these data and the
    logbooks if the run was cut off. scenario: resolved.
    """
    write_scenario(logs, scenario)
    about = {"device": options.device, "dtype": options.dtype, "weights": options.weights}
    write_whole(logs / ABOUT, json.dumps({**about, "num_requests": num_requests}) + "\n")


def finished_run(logs: Path, scenario: Scenario, extra: Mapping[str, Any]) -> FinishedRun:
    """Makes the results of a run from its logbooks. scenario: the run's scenario, with all defaults filled in. extra:
    further fields of the summary, such as `interrupted`.
    """
    records = read_records(logs)
    fields: dict[str, Any] = {"events": 0, "stalled": False, **extra}
    if host_caches(scenario):
        fields |= host_cache_fields(records.host_copies, scenario.page_size)
    if scenario.storage is not None:
        fields |= storage_fields(records.host_copies, scenario.page_size)
    if num_warm_up := warm_up_requests(scenario.client, len(records.requests)):
        fields["warm_up_requests"] = num_warm_up
    judged = records.without_first(num_warm_up)
    if failures := failure_rows(judged.requests, has_faults=scenario.has_server_faults):
        fields["failures"] = failures
    summary = {
        **scenario.benchmark_fields("pdreal"),
        **summarize(judged, speculative=scenario.acceptance is not None, extra=fields),
    }
    return FinishedRun(scenario.name, summary, records, interrupted=extra["interrupted"])


def keep_run(out: Path, scenario: Scenario, finished: FinishedRun, *, quiet: bool) -> None:
    """Writes the run folder, and removes the logbooks when the folder is complete. Raises OSError if a file cannot be
    written. quiet: True: no progress is shown.
    """
    logs = out / LOGS
    with run_replaced(out) as folder:
        with journal_writer(folder) as write:
            for entry in read_journal(logs):
                write(entry)
        write_run(folder, scenario, finished, write.proof, keep=ALL_KEPT, quiet=quiet)
        if steps := read_counted_steps(logs):
            write_counts(folder, steps)
    remove_own(logs, LOG_FILES)


def recover(out: Path) -> FinishedRun:
    """Completes a run folder in which a killed pdreal left logbooks. Raises RunFolderError if there are no valid
    logbooks or another process writes to them, ConfigError if their scenario is wrong, or OSError if a file cannot be
    written.
    """
    logs = out / LOGS
    if not (logs / ABOUT).is_file():
        raise RunFolderError(f"{out}: has no {LOGS}/{ABOUT}: no interrupted run left logs here")
    with _owned(logs):
        scenario = resolve(load_scenario(logs / SCENARIO))
        try:
            about = read_json(logs / ABOUT)
            num_requests = about.pop("num_requests")
        except (InputError, AttributeError, KeyError):
            raise RunFolderError(f"{logs / ABOUT}: has no valid description of the run") from None
        num_ended = sum(request.outcome in {"finished", "failed"} for request in read_records(logs).requests)
        finished = finished_run(logs, scenario, {**about, "interrupted": num_ended < num_requests})
        keep_run(out, scenario, finished, quiet=True)
    return finished
