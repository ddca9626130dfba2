"""The journal of a run: a file in its folder with every call into instances, senders, receivers and router, in blocks.

Journals of earlier releases, which have a line for each call, can also be read.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.journal.lines import from_lines
from pdsim.core.messages import Finished
from pdsim.core.routing.router import Router
from pdsim.inputs import shown
from pdsim.metrics.journal_blocks import entries_in, to_block
from pdsim.metrics.run_folder import JOURNAL, SCENARIO, SUMMARY, read_summary
from pdsim.metrics.tables import RunFolderError

_ENTRIES_AT_ONCE = 1024


class JournalProof:
    """Number of calls and digest of a journal. The run's summary has both, so that missing lines are noticed."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._hash = blake2b(digest_size=16)

    def add(self, line: bytes, num_calls: int) -> None:
        self._num_calls += num_calls
        self._hash.update(line)

    def fields(self) -> dict[str, Any]:
        return {"calls": self._num_calls, "digest": self._hash.hexdigest()}


class JournalWriter:
    """Writes the journal of a run in blocks of many entries. An interrupted run keeps all blocks that were written
    before.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._entries: list[Entry] = []
        self.proof = JournalProof()

    def __call__(self, entry: Entry) -> None:
        self._entries.append(entry)
        if len(self._entries) == _ENTRIES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._entries:
            block = to_block(self._entries)
            self._file.write(block)
            self.proof.add(block, len(self._entries))
            self._entries.clear()


@contextmanager
def journal_writer(folder: Path) -> Iterator[JournalWriter]:
    """Context manager that gives the object that writes a run's journal. After the context, the object's `proof` has
    the number of calls and the digest of the journal's lines, which the run's summary keeps as `pdsim.journal`.
    """
    import pyarrow as pa  # noqa: PLC0415  only runs that are kept pay for it

    folder.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:
        write = JournalWriter(file)
        try:
            yield write
        finally:
            write.flush()


def proves_its_journal(summary: Mapping[str, Any]) -> bool:
    """True if the journal of a run can be checked against the run's summary: the summary has the journal's
    number of calls and the digest of its lines. Summaries of earlier releases lack these numbers.
    """
    return "journal" in summary.get("pdsim", {})


def read_journal(folder: Path) -> Iterator[Entry]:
    """Yields the calls of a run's journal. Raises RunFolderError if the journal is missing or damaged, if it has fewer
    finished requests than the run's summary, or if its number of calls or the digest of its lines differs from the
    summary.

    For a run of an earlier release, only the number of finished requests is compared. Without a summary, because the
    run did not end, nothing is compared.
    """
    import pyarrow as pa  # noqa: PLC0415

    path = folder / JOURNAL
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {JOURNAL}: run with --out to keep one")
    summary: dict[str, Any] = read_summary(folder) if (folder / SUMMARY).is_file() else {"completed": 0}
    num_finished, proof = 0, JournalProof()
    try:
        with pa.input_stream(str(path), compression="zstd") as file:
            for line in TextIOWrapper(file, encoding="utf-8"):
                entries = [_checked(entry) for entry in (entries_in(line) if line[0] == "{" else from_lines([line]))]
                proof.add(line.encode(), len(entries))
                num_finished += sum([_is_end(entry) for entry in entries])
                yield from entries
    except KeyError as unknown:
        raise RunFolderError(
            f"{path}: damaged, or written by another version of pdsim, whose messages differ: {unknown}; run "
            f"{folder / SCENARIO} again"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as broken:
        raise RunFolderError(f"{path}: damaged, or cut short: {broken}") from None
    if num_finished < summary["completed"]:
        raise RunFolderError(
            f"{path}: cut short: {num_finished} requests finish in it, {summary['completed']} in {SUMMARY}"
        )
    if proves_its_journal(summary) and (kept := summary["pdsim"]["journal"]) != (found := proof.fields()):
        raise RunFolderError(
            f"{path}: not the journal of this run: it has {found['calls']} calls with digest {found['digest']}, "
            f"{SUMMARY} says {kept.get('calls')} calls with digest {kept.get('digest')}"
        )


def _checked(entry: Entry) -> Entry:
    """Returns the entry. Raises ValueError or LookupError if the entry is neither a call nor a death of an instance (or
    of the router, a sender or a receiver).
    """
    if not (isinstance(entry.instance_id, str) and isinstance(entry.call, str) and isinstance(entry.args, tuple)):
        raise ValueError(f"no call of an instance: {shown(entry)}")
    if entry.call not in _CALLS or type(entry.args[-1]) is not int:
        raise ValueError(f"no call of an instance: {shown(entry)}")
    return entry


def _is_end(entry: Entry) -> bool:
    return entry.instance_id == Router.instance_id and type(entry.args[0]) is Finished


_CALLS = {"on_message", "next_step", "on_step_done", KILLED}
