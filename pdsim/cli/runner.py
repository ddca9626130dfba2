"""Runs scenarios with progress and keeps what they leave behind, also when they are interrupted."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdsim import __version__
from pdsim.calibration.imported import read_results
from pdsim.metrics.limits import Limit, limiting_resource
from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_folder import SCENARIO, journal_writer, read_records, read_summary, write_records
from pdsim.metrics.timeline import write_timeline
from pdsim.scenario.build import build
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import to_yaml
from pdsim.sim.simulation import Observation, Simulation

_RESULTS = (".json", ".jsonl")
"""Suffixes of what load generators write; scenarios are YAML."""


@dataclass
class FinishedRun:
    name: str
    summary: dict[str, Any]
    records: RunRecords
    stall: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def is_observed(self) -> bool:
        """A run of ours: another tool's result is a summary and no more."""
        return "pdsim" in self.summary

    def limit(self) -> Limit:
        return limiting_resource(self.records, self.summary.get("max_concurrency"))

    def limit_json(self) -> dict[str, str] | None:
        if not self.is_observed:
            return None
        limit = self.limit()
        return {
            "resource": limit.resource,
            "where": limit.where,
            "evidence": limit.evidence,
            "relief": limit.relief,
        }


def run_scenario(
    path: Path, changes: Sequence[str], out: Path | None, *, quiet: bool, levels: bool = False
) -> FinishedRun:
    """Simulate; with `out`, write the run folder as well, with journal and levels."""
    cluster = build(load_scenario(path, changes))
    scenario = cluster.scenario
    with ExitStack() as stack:
        advance = stack.enter_context(progress_over(scenario.name, len(cluster.requests), quiet=quiet))
        journal = None if out is None else stack.enter_context(journal_writer(out))
        observation = Observation(journal=journal, levels=levels or out is not None, progress=advance)
        simulation = Simulation(cluster, observation)
        interrupted = False
        try:
            result = simulation.run()
        except KeyboardInterrupt:
            interrupted = True
            result = simulation.result()
    summary = result.summary()
    summary["pdsim"]["interrupted"] = interrupted
    if out is not None:
        with saying(f"writing {out} ...", quiet=quiet), garbage_kept():
            write_records(out, summary, result.records)
            write_scenario(scenario, out)
            write_timeline(out / "timeline.json.gz", result.records)
            _write_overview(out, result.records)
    return FinishedRun(scenario.name, summary, result.records, result.stall, interrupted)


def obtain_runs(paths: Sequence[Path], changes: Sequence[str], out: Path | None, *, quiet: bool) -> list[FinishedRun]:
    """Folders and other tools' results are read, scenario files simulated."""
    runs: list[FinishedRun] = []
    for path in paths:
        if path.is_dir():
            name = read_summary(path).get("tag") or path.name
            found = [FinishedRun(name, read_summary(path), read_records(path))]
        elif path.suffix in _RESULTS:
            results = read_results(path)
            found = [FinishedRun(f"{one.name} ({one.tool})", one.summary, RunRecords()) for one in results]
        else:
            folder = None if out is None else out / load_scenario(path, changes).name
            found = [run_scenario(path, changes, folder, quiet=quiet, levels=True)]
        for run in found:
            if any(run.name == other.name for other in runs):
                run.name = f"{run.name} ({path})"
            runs.append(run)
        if runs[-1].interrupted:
            break
    return runs


def write_comparison(path: Path, runs: Sequence[FinishedRun], *, quiet: bool) -> None:
    with saying(f"writing {path} ...", quiet=quiet), garbage_kept():
        from pdsim.metrics.plots import comparison

        path.parent.mkdir(parents=True, exist_ok=True)
        records = {run.name: run.records for run in runs if run.is_observed}
        figure = comparison({run.name: run.summary for run in runs}, records)
        figure.savefig(path, dpi=110)


def write_scenario(scenario: Scenario, folder: Path) -> None:
    """Resolved, with the version of the code that ran it."""
    head = f"# resolved by pdsim {__version__}\n"
    given = {name: value for name, value in scenario.model_dump().items() if value is not None}
    (folder / SCENARIO).write_text(head + to_yaml(given), encoding="utf-8")


@contextmanager
def progress_over(what: str, total: int, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, and nothing elsewhere. Call without an argument to advance by one, or with the new count."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            else:
                progress.update(task, completed=done)

        yield advance


@contextmanager
def saying(what: str, *, quiet: bool) -> Iterator[None]:
    """A line on a terminal for as long as it takes, and nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """While much is made that stays: looking for garbage in it would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _write_overview(out: Path, records: RunRecords) -> None:
    from pdsim.metrics.plots import overview

    if any(request.outcome == "finished" for request in records.requests):
        overview(records).savefig(out / "overview.png", dpi=110)
