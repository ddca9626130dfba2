"""A run as a folder: written by simulated and by real runs alike, read by every tool.

StoredRun shows a folder as pandas DataFrames; pandas is an extra, loaded when a table is asked for.

summary.json, requests/steps/transfers/levels.parquet and journal.jsonl.zst; scenario.yaml lies beside them.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from io import TextIOWrapper
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pdsim.core.instance import Levels
from pdsim.core.journal import Entry, from_lines, to_line
from pdsim.core.messages import Finished
from pdsim.core.router import Router
from pdsim.metrics.records import LevelRecord, RequestRecord, RunRecords, StepRecord, TransferRecord
from pdsim.metrics.tail import Tail, TailMetric, tail

SUMMARY = "summary.json"
SCENARIO = "scenario.yaml"
CATALOG = "catalog"
"""Folder of the user's own entries that a run used."""
JOURNAL = "journal.jsonl.zst"
LOGS = "logs"
"""Folder of a real run that has not written its results."""
_KINDS: dict[str, type[Any]] = {"requests": RequestRecord, "steps": StepRecord, "transfers": TransferRecord}
TABLES = (*_KINDS, "levels")

_LINES_AT_ONCE = 256

Record = TypeVar("Record")


class RunFolderError(ValueError):
    """A folder that is no run, or not a whole one."""


def require_out(out: Path, *, is_file: bool = False) -> None:
    """Raises RunFolderError if nothing can be written there. Nothing is made: what follows may be wrong, too."""
    if is_file and out.is_dir():
        raise RunFolderError(f"--out {out}: is a folder; expected a file's name, such as {out / 'NAME'}")
    folder = out.parent if is_file else out
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise RunFolderError(f"--out {out}: {nearest} is a file; expected a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunFolderError(f"--out {out}: {nearest} cannot be written to")


def require_out_of_run(out: Path, *, force: bool) -> None:
    """Raises RunFolderError if a run cannot be kept there, or would take the place of another unless that is wanted."""
    require_out(out)
    kept = next((name for name in (SUMMARY, JOURNAL, SCENARIO, LOGS) if (out / name).exists()), None)
    if kept is not None and not force:
        raise RunFolderError(f"--out {out}: has a run already ({kept}); --force writes over it, or name another folder")


def write_records(folder: Path, summary: Mapping[str, Any], records: RunRecords) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for name in TABLES:
        _write_table(arrow_table(records, name), folder / f"{name}.parquet")


def _write_table(table: Any, path: Path) -> None:
    """Integers as differences: times and counts take two thirds of the bytes, and half the time."""
    from pyarrow import parquet, types  # noqa: PLC0415

    integers = [field.name for field in table.schema if types.is_integer(field.type)]
    others = [name for name in table.column_names if name not in integers]
    encodings = dict.fromkeys(integers, "DELTA_BINARY_PACKED")
    parquet.write_table(table, path, compression="zstd", use_dictionary=others, column_encoding=encodings)


def arrow_table(records: RunRecords, name: str) -> Any:
    """Table of records, a row for each, in order; `name` is one of TABLES."""
    if name == "levels":
        levels = ((row.instance_id, row.time_ns, *row.levels) for row in records.levels)
        return _table(levels, ("instance_id", "time_ns", *Levels._fields))
    if name not in TABLES:
        raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
    columns = tuple(field.name for field in fields(_KINDS[name]))
    return _table(map(attrgetter(*columns), getattr(records, name)), columns)


def read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.is_file():
        raise RunFolderError(f"{folder} is no run folder: it has no {SUMMARY}")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise RunFolderError(f"{path}: not JSON: {broken}") from None
    if not isinstance(summary, dict) or "completed" not in summary:
        raise RunFolderError(f"{path}: no summary of a run: it does not say how many requests completed")
    return summary


def read_records(folder: Path) -> RunRecords:
    """All but the pauses between tokens, which the summary has."""
    read_summary(folder)
    tables = {name: _read_table(folder, name, kind) for name, kind in _KINDS.items()}
    return RunRecords(**tables, levels=_read_table(folder, "levels", _level))


def _level(instance_id: str, time_ns: int, **levels: Any) -> LevelRecord:
    return LevelRecord(instance_id, time_ns, Levels(**levels))


@contextmanager
def journal_writer(folder: Path) -> Iterator[Callable[[Entry], None]]:
    """Writes entries as they come, so that an interrupted run keeps what it did."""
    import pyarrow as pa  # noqa: PLC0415  only runs that are kept pay for it

    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # of a run that this one takes the place of
    lines: list[str] = []
    with pa.output_stream(str(folder / JOURNAL), compression="zstd") as file:

        def flush() -> None:
            file.write("".join(lines).encode())
            lines.clear()

        def write(entry: Entry) -> None:
            lines.append(to_line(entry))
            if len(lines) == _LINES_AT_ONCE:
                flush()

        try:
            yield write
        finally:
            flush()


def read_journal(folder: Path) -> Iterator[Entry]:
    """Raises RunFolderError if it is damaged, or ends before all requests that the summary counts have finished."""
    import pyarrow as pa  # noqa: PLC0415

    path = folder / JOURNAL
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {JOURNAL}: run with --out to keep one")
    num_finished = 0
    try:
        with pa.input_stream(str(path), compression="zstd") as file:
            for entry in from_lines(TextIOWrapper(file, encoding="utf-8")):
                num_finished += entry.instance_id == Router.instance_id and type(entry.args[0]) is Finished
                yield entry
    except (OSError, ValueError, LookupError, TypeError) as broken:
        raise RunFolderError(f"{path}: damaged, or cut short: {broken}") from None
    completed = read_summary(folder)["completed"] if (folder / SUMMARY).is_file() else 0
    if num_finished < completed:
        raise RunFolderError(f"{path}: cut short: {num_finished} requests finish in it, {completed} in {SUMMARY}")


def _table(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    return pa.table(dict(zip(columns, values, strict=True)))


def _read_table(folder: Path, name: str, make: Callable[..., Record]) -> list[Record]:
    try:
        return [make(**row) for row in _stored_table(folder, name).to_pylist()]
    except TypeError as broken:  # of columns that no record has
        raise RunFolderError(f"{folder / name}.parquet: damaged, or no table of a run: {broken}") from None


def _stored_table(folder: Path, name: str) -> Any:
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise RunFolderError(f"{folder} has no {path.name}")
    try:
        return parquet.read_table(path)
    except (pa.ArrowException, OSError) as broken:
        raise RunFolderError(f"{path}: damaged, or no table of a run: {broken}") from None


class PandasMissingError(ImportError):
    """Says what to install."""

    def __init__(self) -> None:
        super().__init__("tables are pandas DataFrames: pip install 'pdsim[notebook]'")


class HasRecords(Protocol):
    @property
    def records(self) -> RunRecords: ...


class RunTables:
    """Base of what has the records of a run: shows them as tables with the columns of its folder's files.

    Times are ns since the run began; a column in which some are "never" is of floats, with NaN for those. Tables are
    made anew at each call. Raises PandasMissingError without pandas.
    """

    @property
    def requests(self) -> Any:
        """Requests by request_id. Besides requests.parquet's columns: ttft_ms, tpot_ms, e2e_ms; NaN if not finished."""
        frame = self._frame("requests").set_index("request_id")
        is_done = frame["outcome"] == "finished"
        arrival_ns, num_gaps = frame["arrival_ns"], frame["num_output_tokens"] - 1
        frame["ttft_ms"] = ((frame["first_token_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["e2e_ms"] = ((frame["end_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["tpot_ms"] = (frame["e2e_ms"] - frame["ttft_ms"]) / num_gaps.where(num_gaps > 0)
        return frame

    @property
    def steps(self) -> Any:
        """A row for each prefill forward, and for each run of decode steps of one batch."""
        return self._frame("steps")

    @property
    def transfers(self) -> Any:
        """A row for each transfer unit."""
        return self._frame("transfers")

    @property
    def levels(self) -> Any:
        """Occupancy of each instance from time_ns on. No rows unless the run observed levels."""
        return self._frame("levels")

    def tail(self: HasRecords, metric: TailMetric = "ttft", *, percent: float = 1.0) -> Tail:
        """The slowest requests by a metric, grouped by what they waited for. Observe levels, to see full pools."""
        return tail(self.records, metric, percent=percent)

    def _frame(self, name: str) -> Any:
        load_pandas()
        table = self._table(name)
        never = [column for column, values in zip(table.column_names, table.columns, strict=True) if values.null_count]
        return table.to_pandas().astype(dict.fromkeys(never, float))

    def _table(self, name: str) -> Any:
        """Table of that name, as Arrow has it."""
        raise NotImplementedError


class StoredRun(RunTables):
    """A run folder, of a simulated run or a real one. Each of its files is read when it is asked for."""

    def __init__(self, folder: Path | str) -> None:
        """Raises RunFolderError if it is none."""
        self.folder = Path(folder)
        read_summary(self.folder)

    @cached_property
    def records(self) -> RunRecords:
        return read_records(self.folder)

    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)

    def _table(self, name: str) -> Any:
        return _stored_table(self.folder, name)


def load_pandas() -> Any:
    """Raises PandasMissingError."""
    try:
        import pandas as pd  # noqa: PLC0415  an extra
    except ImportError:
        raise PandasMissingError from None
    return pd
