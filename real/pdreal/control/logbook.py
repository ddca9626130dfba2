"""Logbooks: the launcher and the leader of each instance write their calls and rows as they happen. After the run the
logbooks are merged by time into one journal and one set of records.

Each life of such a process, from one start to its end, has two files: calls into its state machines, and rows of the
events that it observed. If experts are recorded, a third file has the number of tokens of each expert in each step. A
killed process leaves the files that it wrote.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from pdreal.control.clock import Timeline
from pdreal.control.expert_counts import CountedStep, ExpertCounts
from pdsim.core import messages as m
from pdsim.core.instance import Levels
from pdsim.core.journal.calls import Entry, Recorded
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.message_json import from_json, to_json
from pdsim.core.messages import TransferUnit
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.metrics.recorder import Recorder, transfer_record
from pdsim.metrics.records import HostCopyRecord, RunRecords, StepRecord, TransferRecord

_RECORDS = {kind.__name__: kind for kind in (StepRecord, TransferRecord, HostCopyRecord, Levels)}


class Logbook:
    """Log files of one process. Calls and rows reach the files when `flush` or `close` is called, expert counts at
    once. Without a folder, or after `close`, nothing is kept. life: number of earlier starts of the process; each start
    has files of its own.
    """

    def __init__(self, folder: Path | None, process: str, life: int) -> None:
        self.is_kept = folder is not None
        self._new_entries: list[Entry] = []
        self._new_rows: list[tuple[int, str, tuple[Any, ...]]] = []
        if folder is not None:
            self._journal = _append(folder / f"{process}.{life}.journal")
            self._rows = _append(folder / f"{process}.{life}.rows")
            self._experts_path = folder / f"{process}.{life}.experts"

    def recorded(self, machine: Any) -> Any:
        """Returns the state machine, wrapped so that each call is logged as an entry."""
        return Recorded(machine, self.entry) if self.is_kept else machine

    def entry(self, entry: Entry) -> None:
        """Logs a call into a state machine."""
        if self.is_kept:
            self._new_entries.append(entry)

    def row(self, method: str, now_ns: int, *args: Any) -> None:
        """Logs an event as a call of a Recorder: `Recorder.method(*args, now_ns)`, without now_ns for the methods in
        _TIMELESS. After the run, `read_records` makes the logged calls. method: name of the method. now_ns: time of the
        event in ns, in the run's time.
        """
        if self.is_kept:
            self._new_rows.append((now_ns, method, args))

    def experts(self, counted: CountedStep) -> None:
        """Logs how many tokens of a step each expert computed."""
        if self.is_kept:
            with self._experts_path.open("a", encoding="utf-8") as file:
                file.write(counted.to_line())

    def flush(self) -> None:
        """Writes new entries to the files. Callers flush while a step is computed, because writing takes time."""
        if self._new_entries:
            self._journal.writelines(map(to_line, self._new_entries))
            self._journal.flush()
            self._new_entries.clear()
        if self._new_rows:
            self._rows.writelines(map(_row_line, self._new_rows))
            self._rows.flush()
            self._new_rows.clear()

    def close(self) -> None:
        if self.is_kept:
            self.is_kept = False
            self.flush()
            self._journal.close()
            self._rows.close()


def _row_line(row: tuple[int, str, tuple[Any, ...]]) -> str:
    now_ns, method, args = row
    return json.dumps((now_ns, method, [_to_plain(arg) for arg in args])) + "\n"


def _append(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


class InstanceLog:
    """Writes the events of one instance to a logbook, as rows with their times since the run's epoch."""

    def __init__(self, instance_id: str, logbook: Logbook, timeline: Timeline) -> None:
        self._instance_id = instance_id
        self._logbook = logbook
        self._timeline = timeline
        self._last_levels: Levels | None = None
        self.flush = logbook.flush

    def note(self, method: str, *args: Any) -> None:
        self._logbook.row(method, self._timeline.now_ns, *args)

    def levels(self, instance: Any) -> None:
        """Logs the instance's numbers of requests and pages (Levels), if they have changed."""
        if self._logbook.is_kept and (levels := instance.levels()) != self._last_levels:
            self._last_levels = levels
            self.note("on_levels", self._instance_id, levels)

    def transfer(self, unit: TransferUnit, wire: RankPairLayout, worker: int, start_ns: int) -> None:
        """Logs a transfer unit that has just arrived. wire: layout of transfers between a prefill and a decode rank.
        worker: index of the transfer worker that sent the unit. start_ns: when the transfer began, in the run's time.
        """
        if self._logbook.is_kept:
            now_ns = self._timeline.now_ns
            self._logbook.row("on_transfer", now_ns, transfer_record(unit, wire, worker, start_ns, now_ns))

    def experts(self, step: m.PureStep, counts: ExpertCounts) -> None:
        kind = "prefill" if isinstance(step, m.PrefillStep) else "decode"
        self._logbook.experts(CountedStep(self._instance_id, kind, self._timeline.now_ns, counts))

    def step(self, step: m.PureStep, result: m.Result, start_ns: int, end_ns: int) -> None:
        """Logs a computed step. start_ns and end_ns: times of the monotonic clock."""
        if not self._logbook.is_kept:
            return
        if isinstance(step, m.PrefillStep):
            num_requests = len(step.chunks)
            num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
            num_context_tokens = sum(chunk.num_context_tokens for chunk in step.chunks)
        else:
            num_requests = num_tokens = step.num_requests
            num_context_tokens = step.num_context_tokens
        verified = result if isinstance(result, m.Verified) else None
        if verified is not None:
            num_tokens = sum(verified.num_tokens)
        kind = "prefill" if isinstance(step, m.PrefillStep) else "decode"
        begin_ns, duration_ns = start_ns - self._timeline.epoch_ns, end_ns - start_ns
        sizes = num_requests, num_tokens, num_context_tokens
        row = StepRecord(self._instance_id, kind, begin_ns, duration_ns, duration_ns, 1, *sizes, 0.0)
        self.note("on_step", step, row, *(() if verified is None else (verified,)))


def read_journal(folder: Path) -> Iterator[Entry]:
    """Returns the calls of all processes by time. A process that died and was started again has several journals; its
    calls keep their order, from the first journal to the last.
    """
    processes = (
        chain.from_iterable(from_lines(_whole_lines(path)) for path in lives) for lives in _files(folder, "journal")
    )
    return merge(*processes, key=lambda entry: entry.args[-1])


def read_counted_steps(folder: Path) -> list[CountedStep]:
    """Returns the expert counts of all steps that all processes logged, ordered by the steps' ends: how many tokens
    each expert computed.
    """
    files = chain.from_iterable(_files(folder, "experts"))
    steps = [CountedStep.from_line(line) for path in files for line in _whole_lines(path)]
    return sorted(steps, key=lambda step: step.end_ns)


def read_records(folder: Path) -> RunRecords:
    """Returns the records of a run, from the rows of all processes in the order of their times. If a row belongs to a
    request whose arrival was not recorded, the row and all later rows are left out: the launcher was killed or its disk
    was full, so its rows may end there, too.
    """
    recorder = Recorder()
    rows = (chain.from_iterable(map(_read_rows, lives)) for lives in _files(folder, "rows"))
    for now_ns, method, args in merge(*rows, key=lambda row: row[0]):
        try:
            getattr(recorder, method)(*args, *(() if method in _TIMELESS else (now_ns,)))
        except KeyError:
            break
    return recorder.records


_TIMELESS = {"on_step", "on_transfer", "on_host_copy", "on_retry", "on_output"}
"""Methods of the recorder that take no argument now_ns: their rows contain the times, or they record no time."""


def _files(folder: Path, kind: str) -> Iterable[list[Path]]:
    """Returns one list of files per process, with a file for each life (from one start of the process to its end), in
    order. kind: ending of the file names: journal, rows or experts.
    """
    lives: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(folder.glob(f"*.{kind}")):
        process, life, _ = path.name.rsplit(".", 2)
        lives.setdefault(process, []).append((int(life), path))
    return [[path for _, path in sorted(found)] for found in lives.values()]


def _whole_lines(path: Path) -> Iterator[str]:
    """Yields the complete lines of a file. A killed process may have left an incomplete last line."""
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.endswith("\n"))


def _read_rows(path: Path) -> Iterator[tuple[int, str, list[Any]]]:
    for line in _whole_lines(path):
        now_ns, method, args = json.loads(line)
        yield now_ns, method, [_from_plain(arg) for arg in args]


def _to_plain(value: Any) -> Any:
    name = type(value).__name__
    if name not in _RECORDS:
        return to_json(value)
    return {name: list(value) if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]}


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and (name := next(iter(value))) in _RECORDS:
        return _RECORDS[name](*value[name])
    return from_json(value)
