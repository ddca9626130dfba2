"""What each process of a run writes down as it goes, and how it becomes one journal and one set of records.

Two files for each life of a process: calls into its state machines, and rows of what it saw. They are written as things
happen, so that a process that is killed leaves what it did; merged by time when the run is over.
"""

import json
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from pdsim.core.instance import Levels
from pdsim.core.journal import Entry, from_json, from_lines, to_json, to_line
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import RunRecords, StepRecord, TransferRecord

_RECORDS = {kind.__name__: kind for kind in (StepRecord, TransferRecord, Levels)}


class Logbook:
    """One process's."""

    def __init__(self, folder: Path, process: str, life: int) -> None:
        self._journal = _append(folder / f"{process}.{life}.journal")
        self._rows = _append(folder / f"{process}.{life}.rows")

    def entry(self, entry: Entry) -> None:
        """A call into a state machine."""
        self._journal.write(to_line(entry))

    def row(self, method: str, now_ns: int, *args: Any) -> None:
        """A call that the recorder will get, with now_ns behind the arguments."""
        plain = [{type(a).__name__: list(a)} if type(a).__name__ in _RECORDS else to_json(a) for a in args]
        self._rows.write(json.dumps((now_ns, method, plain)) + "\n")

    def flush(self) -> None:
        self._journal.flush()
        self._rows.flush()

    def close(self) -> None:
        self._journal.close()
        self._rows.close()


def _append(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def read_journal(folder: Path) -> Iterator[Entry]:
    """All processes' calls by time; each process's in its own order, its lives one after another."""
    processes = (
        chain.from_iterable(from_lines(_whole_lines(path)) for path in lives) for lives in _files(folder, "journal")
    )
    return merge(*processes, key=lambda entry: entry.args[-1])


def read_records(folder: Path) -> RunRecords:
    recorder = Recorder()
    rows = (chain.from_iterable(map(_read_rows, lives)) for lives in _files(folder, "rows"))
    for now_ns, method, args in merge(*rows, key=lambda row: row[0]):
        getattr(recorder, method)(*args, *(() if method in _TIMELESS else (now_ns,)))
    return recorder.records


_TIMELESS = {"on_step", "on_transfer", "on_retry", "on_output"}
"""Their rows carry their times."""


def _files(folder: Path, kind: str) -> Iterable[list[Path]]:
    """Of each process, by life."""
    lives: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(folder.glob(f"*.{kind}")):
        process, life, _ = path.name.rsplit(".", 2)
        lives.setdefault(process, []).append((int(life), path))
    return [[path for _, path in sorted(found)] for found in lives.values()]


def _whole_lines(path: Path) -> Iterator[str]:
    """A process that was killed may have left half a line."""
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.endswith("\n"))


def _read_rows(path: Path) -> Iterator[tuple[int, str, list[Any]]]:
    for line in _whole_lines(path):
        now_ns, method, args = json.loads(line)
        yield now_ns, method, [_from_plain(arg) for arg in args]


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and (name := next(iter(value))) in _RECORDS:
        return _RECORDS[name](*value[name])
    return from_json(value)
