"""A run as a folder. Simulated and real runs write the same files, and all tools read them.

The files are summary.json, requests/steps/transfers/levels.parquet, journal.jsonl.zst and scenario.yaml. StoredRun
shows them as pandas DataFrames; the optional package pandas is imported when a table is first used.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdsim.files import LOCK, NEW, files_replaced, require_empty_or_own, write_whole
from pdsim.inputs import InputError, read_json, shown
from pdsim.metrics.records import Records, RunRecords
from pdsim.metrics.summary import TailMetric
from pdsim.metrics.summary_rows import SUMMARY_ROWS
from pdsim.metrics.tables import TABLES, RunFolderError, stored_records, stored_table, write_tables

if TYPE_CHECKING:
    from pdsim.metrics.explanation.tail import Tail

SUMMARY = "summary.json"
SCENARIO = "scenario.yaml"
CATALOG = "catalog"
"""Folder, inside a run folder, with the user's own catalog entries that the run used."""
JOURNAL = "journal.jsonl.zst"
LOGS = "logs"
"""Folder, inside a run folder, with the logs of a real run whose results are not written yet."""
TIMELINE = "timeline.json.gz"
OVERVIEW = "overview.png"
EXPERTS = "experts.parquet"
_FILES = (SUMMARY, SCENARIO, JOURNAL, TIMELINE, OVERVIEW, EXPERTS, *(f"{name}.parquet" for name in TABLES))
_ENTRIES = f"{CATALOG}/*/*.yaml"
SAID = "pdreal.log"
"""File with the messages of `pdreal run` when the validation of a matrix started it. Only a failed run keeps it."""
ABOUT = "run.json"
"""File that describes the run, inside the folder of logs."""
LOG_FILES = ("*.journal", "*.rows", "*.experts", ABOUT, SCENARIO, _ENTRIES, LOCK)
"""Name patterns of all files in the folder of logs."""
_MADE = *_FILES, _ENTRIES
RUN_FILES = *_MADE, *(f"{LOGS}/{name}" for name in LOG_FILES), *(f"{NEW}*/{name}" for name in (*_MADE, LOCK))
"""Name patterns of all files of a run folder. Commands replace or remove no other files."""


def require_out(out: Path, *, is_file: bool = False) -> None:
    """Checks that a folder or file can be written, without making it. Raises RunFolderError if not. is_file: True:
    `out` is a file.
    """
    if is_file and out.is_dir():
        raise RunFolderError(f"--out {out}: is a folder; expected a file's name, such as {out / 'NAME'}")
    folder = out.parent if is_file else out
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not nearest.exists():
        raise RunFolderError(f"--out {out}: {nearest} is a symbolic link that leads nowhere")
    if not nearest.is_dir():
        raise RunFolderError(f"--out {out}: {nearest} is a file; expected a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RunFolderError(f"--out {out}: {nearest} cannot be written to")


def require_out_of_run(out: Path, *, force: bool) -> None:
    """Checks that a run can be written to a folder. Raises RunFolderError if not, or if a run is there and `force` is
    False. Raises ForeignFileError if other files are there.
    """
    require_out(out)
    link = next((name for name in (*_FILES, CATALOG, LOGS) if (out / name).is_symlink()), None)
    if link is not None:
        raise RunFolderError(f"--out {out}: {link} is a symbolic link; name another folder")
    require_empty_or_own(out, "run", is_own=holds_run(out))
    kept = next((name for name in (SUMMARY, JOURNAL, SCENARIO, LOGS) if (out / name).exists()), None)
    if kept is not None and not force:
        raise RunFolderError(f"--out {out}: has a run already ({kept}); --force overwrites it, or name another folder")


def holds_run(folder: Path) -> bool:
    """True if a run wrote into the folder, even if the run did not end."""
    if any((folder / name).is_file() for name in (JOURNAL, SAID, f"{LOGS}/{ABOUT}", f"{LOGS}/{LOCK}")):
        return True
    try:
        read_summary(folder)
    except InputError:
        return False
    return True


def require_out_file(out: Path, read: Sequence[Path], begins: str) -> None:
    """Raises RunFolderError if a file cannot be written.

    Also raises RunFolderError if a file is there that must not be replaced. This holds for a file that the command
    reads (`read`), for a file of a run folder, and for a file with another beginning than the new file (`begins`).
    """
    require_out(out, is_file=True)
    if not out.is_file():
        return
    if any(path.exists() and path.samefile(out) for path in read):
        raise RunFolderError(f"--out {out}: is read by this command; name another file")
    if out.name in _FILES and (out.parent / SUMMARY).exists():
        raise RunFolderError(f"--out {out}: is a file of a run; name another file")
    with out.open("rb") as file:
        if (start := file.read(len(begins))) and start.lower() != begins.encode("latin-1"):
            raise RunFolderError(f"--out {out}: is there and does not begin with {begins!r}; name another file")


@contextmanager
def run_replaced(folder: Path) -> Iterator[Path]:
    """Context manager that gives a new folder, into which a run is written. At the end of the context the new files
    replace those in `folder`, if all of them were written.
    """
    with files_replaced(folder, _MADE, last=SUMMARY) as new:
        yield new


def write_records(folder: Path, summary: Mapping[str, Any], records: Records) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder, records)
    write_whole(folder / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.is_file():
        raise RunFolderError(f"{folder} is no run folder: it has no {SUMMARY}")
    try:
        summary = read_json(path)
    except InputError as broken:
        raise RunFolderError(str(broken)) from None
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path}: no summary of a run, but {shown(summary)}")
    if missing := [name for name in _IN_EVERY_SUMMARY if name not in summary]:
        raise RunFolderError(f"{path}: no summary of a run: it has no {', '.join(missing)}")
    _require_types(path, summary)
    return summary


_IN_EVERY_SUMMARY = "completed", "duration", "total_input_tokens", "total_output_tokens", "pdsim"
_SUMMARY_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "completed": ("a whole number", lambda found: type(found) is int and found >= 0),
    "tag": ("a text", lambda found: isinstance(found, str)),
    "pdsim": ("an object", lambda found: isinstance(found, dict)),
    "pdsim.warnings": ("a list of texts", lambda found: _all_are(found, str)),
    "pdsim.failures": ("a list of objects", lambda found: _all_are(found, dict)),
    "pdsim.journal": ("an object", lambda found: isinstance(found, dict)),
    "pdsim.interval": (
        "an object of two numbers each",
        lambda found: isinstance(found, dict) and all(_is_interval(ends) for ends in found.values()),
    ),
    "pdsim.interval_requests": ("a whole number", lambda found: type(found) is int and found > 0),
    "pdsim.interval_error": ("a number", lambda found: _is_number(found)),  # noqa: PLW0108  it is defined below
}
"""For each field of the summary that is no metric: its type in words, and a function that checks a value. Any of these
fields may be missing.
"""
_NUMBERS = re.compile(
    r"duration|total_\w+|\w+_throughput|pdsim\.(failed|unfinished|retractions|retries|events|transfers|\w+_steps)"
)
"""Pattern for the names of summary fields that are numbers, never null."""
_METRIC = re.compile(r"(mean|median|std|min|max|p[0-9.]+)_.+|.*concurrency|pdsim\.\w+_(tokens|bytes|s|rate)")
_IN_ROWS = {row.field for row in SUMMARY_ROWS}
"""Names of the summary fields in SUMMARY_ROWS. In a summary, these fields may be null if there was nothing to measure,
except those that _SUMMARY_TYPES or _NUMBERS has, too.
"""


def _require_types(path: Path, summary: Mapping[str, Any]) -> None:
    """Raises RunFolderError if a field of the summary has a wrong type, because commands that show runs compute with
    the fields.
    """
    extra = summary.get("pdsim", {})
    nested = {f"pdsim.{name}": value for name, value in extra.items()} if isinstance(extra, dict) else {}
    for name, value in {**summary, **nested}.items():
        if (wanted := _type_of(name)) and not wanted[1](value):
            raise RunFolderError(f"{path}: {name} is {shown(value)}, expected {wanted[0]}")


def _type_of(field: str) -> tuple[str, Callable[[Any], bool]] | None:
    if field in _SUMMARY_TYPES:
        return _SUMMARY_TYPES[field]
    if _NUMBERS.fullmatch(field):
        return "a number", _is_number
    if field in _IN_ROWS or _METRIC.fullmatch(field):
        return "a number or null", lambda found: found is None or _is_number(found)
    return None


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def _is_interval(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(_is_number, found))  # noqa: PLR2004


def _all_are(found: Any, kind: type) -> bool:
    return isinstance(found, list) and all(isinstance(one, kind) for one in found)


def read_records(folder: Path) -> RunRecords:
    """Reads the records of a run folder. The gaps between tokens are missing, because only the summary has them."""
    read_summary(folder)
    return stored_records(folder)


class PandasMissingError(ImportError):
    """Raised if pandas is missing. The message says what to install."""

    def __init__(self) -> None:
        super().__init__("tables are pandas DataFrames: pip install 'pdsim[notebook]'")


class HasRecords(Protocol):
    @property
    def records(self) -> RunRecords: ...


class RunTables:
    """Base of classes that have the records of a run. Shows them as pandas tables, with the columns of the files in a
    run folder.

    Times are in ns since the run began. Columns in which times are missing have floats, and NaN for a missing time.
    Each access makes a new table. Raises PandasMissingError without pandas.
    """

    @property
    def requests(self) -> Any:
        """Table of requests, by request_id. The table has the columns of requests.parquet, and ttft_ms, tpot_ms and
        e2e_ms, which are NaN for requests that did not finish.
        """
        frame = self._frame("requests").set_index("request_id")
        is_done = frame["outcome"] == "finished"
        arrival_ns, num_gaps = frame["arrival_ns"], frame["num_output_tokens"] - 1
        frame["ttft_ms"] = ((frame["first_token_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["e2e_ms"] = ((frame["end_ns"] - arrival_ns) / 1e6).where(is_done)
        frame["tpot_ms"] = (frame["e2e_ms"] - frame["ttft_ms"]) / num_gaps.where(num_gaps > 0)
        return frame

    @property
    def steps(self) -> Any:
        """Table with a row for each forward of prefill or of an encode instance, and for each series of decode steps of
        one batch.
        """
        return self._frame("steps")

    @property
    def transfers(self) -> Any:
        """Table with a row for each transfer unit."""
        return self._frame("transfers")

    @property
    def levels(self) -> Any:
        """Table with the requests and pages of each instance from time_ns on. Empty: the run did not record them."""
        return self._frame("levels")

    def tail(self: HasRecords, metric: TailMetric = "ttft", *, percent: float = 1.0) -> "Tail":
        """The slowest `percent` % of the finished requests by a metric (at least one request), grouped by cause: the
        part of a request's time that exceeds the median of all finished requests by most. Full pools are found as a
        cause only if the run recorded the pages of instances over time. Raises ValueError for an unknown metric, or if
        `percent` is not above 0 and at most 100.
        """
        from pdsim.metrics.explanation.tail import tail  # noqa: PLC0415  numpy, which only analyses need

        return tail(self.records, metric, percent=percent)

    def _frame(self, name: str) -> Any:
        load_pandas()
        table = self._table(name)
        never = [column for column, values in zip(table.column_names, table.columns, strict=True) if values.null_count]
        return table.to_pandas().astype(dict.fromkeys(never, float))

    def _table(self, name: str) -> Any:
        """The Arrow table of this name, one of TABLES."""
        raise NotImplementedError


class StoredRun(RunTables):
    """The folder of a simulated or real run. Each file is read when it is first used."""

    def __init__(self, folder: Path | str) -> None:
        """Raises RunFolderError if the folder has no run."""
        self.folder = Path(folder)
        read_summary(self.folder)

    @cached_property
    def records(self) -> RunRecords:
        return read_records(self.folder)

    def summary(self) -> dict[str, Any]:
        return read_summary(self.folder)

    def _table(self, name: str) -> Any:
        return stored_table(self.folder, name)


def load_pandas() -> Any:
    """Imports pandas. Raises PandasMissingError if pandas is not installed."""
    try:
        import pandas as pd  # noqa: PLC0415  an extra
    except ImportError:
        raise PandasMissingError from None
    return pd
