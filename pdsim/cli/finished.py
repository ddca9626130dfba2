"""What a command does with a run: shows its progress, says how it ended, and writes it to a folder."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pdsim import __version__
from pdsim.files import write_whole
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.explanation.failures import failure_text
from pdsim.metrics.records import Records, judged_records
from pdsim.metrics.run_folder import OVERVIEW, SCENARIO, TIMELINE, write_records
from pdsim.scenario.loading import write_entries_of
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import to_yaml

if TYPE_CHECKING:
    from pdsim.metrics.journal_file import JournalProof
    from pdsim.study.verdict.confidence import Examined

Kept = Literal["timeline", "figure"]
ALL_KEPT: tuple[Kept, ...] = get_args(Kept)


@dataclass
class FinishedRun:
    name: str
    summary: dict[str, Any]
    """The summary: numbers by field, as in summary.json."""
    records: Records
    """Records of the run's requests, steps and transfers. Empty: another tool made the run."""
    stall: list[str] = field(default_factory=list)
    """Lines on the requests that still waited when no event was left. Empty: the run did not stall, was interrupted, or
    was not simulated by this command.
    """
    interrupted: bool = False
    """True: the user interrupted the run while this command made it, so the run is incomplete."""
    scenario: Scenario | None = None
    """The scenario of the run. None: another tool made the run, this command made it in real mode, or the scenario in
    its run folder cannot be read.
    """
    examined: "Examined | None" = None
    """The run judged by an SLO. None: the user gave no SLO."""

    @property
    def is_observed(self) -> bool:
        """True: the run has records. False: another tool made the run, which has only a summary."""
        return "pdsim" in self.summary

    @property
    def judged(self) -> Records:
        """The records without the requests that the summary leaves out because they warm up."""
        return judged_records(self.records, self.summary)

    @property
    def warnings(self) -> list[str]:
        return list(self.summary.get("pdsim", {}).get("warnings", ()))


def print_warnings(finished: FinishedRun, besides: Callable[[str], bool] | None = None) -> None:
    """Prints the warnings of a run. besides: called with each warning; True: the warning was printed already in other
    words, and is left out.
    """
    for message in finished.warnings:
        if besides is None or not besides(message):
            print(f"warning: {finished.name}: {message}")


def fail_if_incomplete(*runs: FinishedRun, program: str = "pdsim") -> None:
    """Ends the command if a run is not complete. Exit code 130: the user interrupted. 1: a run stalled, or requests
    failed although the scenario asks for no failures.
    """
    for finished in runs:
        _fail_if_cut_short(finished, program)
    fail_for_requests({run.name: failure_text(run.summary) for run in runs}, program)


def fail_for_requests(failures: Mapping[str, str], program: str = "pdsim") -> None:
    """Prints why requests failed, and ends the command with code 1. Does nothing if none failed. failures: for each
    run, by name, a text on why requests failed; the text is empty if no request of the run failed.
    """
    failed = {name: text for name, text in failures.items() if text}
    for name, text in failed.items():
        print(f"{program}: {name}: {text}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def _fail_if_cut_short(finished: FinishedRun, program: str) -> None:
    if finished.interrupted:
        print(f"{program}: {finished.name}: interrupted; finished requests are kept", file=sys.stderr)
        raise SystemExit(130)
    if finished.stall:
        lines = [
            f"{program}: {finished.name}: stalled: no event is left, and these requests wait:",
            *finished.stall[:20],
        ]
        if len(finished.stall) > 20:  # noqa: PLR2004
            lines.append(f"... and {len(finished.stall) - 20} more")
        print("\n  ".join(lines), file=sys.stderr)
        raise SystemExit(1)


def write_run(
    folder: Path, scenario: Scenario, run: FinishedRun, journal: "JournalProof", *, keep: Collection[Kept], quiet: bool
) -> None:
    """Writes a run folder, except the journal, which was written during the run. The summary gets the number and digest
    of the journal's lines (`journal`). keep: optional files to write; the figure only if a request finished. The user
    can also make these files later from the folder's tables. quiet: True: no progress is shown.
    """
    summary = {**run.summary, "pdsim": {**run.summary["pdsim"], "journal": journal.fields()}}
    with saying(f"writing {folder} ...", quiet=quiet), garbage_collection_paused():
        write_records(folder, summary, run.records)
        write_scenario(folder, scenario)
        if "timeline" in keep:
            from pdsim.metrics.timeline import write_timeline

            write_timeline(folder / TIMELINE, run.records)
        if "figure" in keep and any(request.outcome == "finished" for request in run.records.requests):
            from pdsim.metrics.plots import overview, write_figure

            write_figure(folder / OVERVIEW, overview(run.records))


def write_scenario(folder: Path, scenario: Scenario) -> None:
    """Writes a resolved scenario, with the user's own catalog entries that it names."""
    given = {name: value for name, value in scenario.model_dump().items() if value is not None}
    write_whole(folder / SCENARIO, f"# resolved by pdsim {__version__}\n{to_yaml(given)}")
    write_entries_of(scenario, folder)


@contextmanager
def progress_over(what: str, total: int | None, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Context with a progress bar named `what`. Nothing is shown if `quiet` is True or stderr is no terminal. Yields a
    function that advances the bar: by one without arguments, otherwise to a given count. A second argument replaces the
    total. total: steps until the end; None: not known.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done=None, _total=None: None
        return
    from rich import progress as bars
    from rich.console import Console

    text, elapsed, left = bars.TextColumn, bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
    columns = (text("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), elapsed)
    ahead = (text("{task.fields[rate]}"), text("left"), left)
    with bars.Progress(*columns, *ahead, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, rate="")

        def advance(done: int | None = None, total: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            else:
                progress.update(task, completed=done, total=total)
            speed = progress.tasks[task].speed
            progress.update(task, rate=f"{speed:,.2g}/s" if speed else "")

        yield advance


@contextmanager
def saying(what: str, *, quiet: bool) -> Iterator[None]:
    """Context that shows the line `what` on a terminal, and removes the line at its end. Nothing is shown if `quiet` is
    True or stderr is no terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(what, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
