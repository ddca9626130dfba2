"""The folder of a sweep: a result file per run, a list that assigns runs to points, and a log of the computation.

points/KEY.json   result of one run, written completely or not at all
plan.jsonl        one line for each point and seed: number and fields of the point, and the KEY of the run
sweep.json        the sweep's name, and its SLOs
log.jsonl         one line for each computed run: its KEY, and CPU and wall seconds
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdsim.files import LOCK, own_lock, require_empty_or_own, temporary_folder, write_whole
from pdsim.inputs import read_json
from pdsim.metrics.run_folder import require_out
from pdsim.metrics.tables import RunFolderError
from pdsim.study.points.tasks import Done, Point
from pdsim.study.verdict.slo import Slo

PLAN = "plan.jsonl"
HEAD = "sweep.json"
POINTS = "points"
_LOG = "log.jsonl"
DAMAGED = "damaged"
"""Status of a run whose result file cannot be read: the file is truncated, or is not a result."""


@contextmanager
def opened_folder(out: Path | str | None) -> Iterator[Path]:
    """Context with the folder `out`, which is created and locked. None: a temporary folder. Raises what `locked_folder`
    raises.
    """
    if out is None:
        with temporary_folder("pdsim-") as folder:
            yield folder
    else:
        with locked_folder(Path(out)) as folder:
            yield folder


@contextmanager
def locked_folder(out: Path) -> Iterator[Path]:
    """Context with the folder `out`, created if needed and locked for this process. Raises RunFolderError if the folder
    cannot be written, or another command writes to it; ForeignFileError if it holds files that no sweep, plan or
    question wrote.
    """
    require_out(out)
    is_own = has_points(out) and any((out / name).is_file() for name in (LOCK, HEAD, _LOG))
    require_empty_or_own(out, "runs of a sweep, plan or question", is_own=is_own)
    (out / POINTS).mkdir(parents=True, exist_ok=True)
    try:
        with own_lock(out):
            yield out
    except BlockingIOError:
        raise RunFolderError(f"--out {out}: another pdsim command is writing there; wait, or name another") from None


def has_points(folder: Path) -> bool:
    return (folder / POINTS).is_dir()


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._points = folder / POINTS
        self._points.mkdir(parents=True, exist_ok=True)

    @property
    def num_kept(self) -> int:
        """Number of result files in the folder. Failed runs and damaged files count, too."""
        return sum(1 for _ in self._points.glob("*.json"))

    def read(self, key: str) -> dict[str, Any]:
        """The row of results of a run. Raises ValueError if the run's file is damaged. key: of the run's task
        (Task.key).
        """
        row: dict[str, Any] = read_json(self._path(key))
        return row

    def kept(self, key: str) -> dict[str, Any] | None:
        """The row of results of a run. Its status is ok, failed, missed (ended early, because the run misses the SLO),
        crashed (the worker died) or DAMAGED. None: the folder lacks the run. key: of the run's task (Task.key).
        """
        if not self._path(key).is_file():
            return None
        try:
            row = self.read(key)
            return row if isinstance(row["status"], str) else {"status": DAMAGED}
        except (OSError, ValueError, KeyError, TypeError):
            return {"status": DAMAGED}

    def keep(self, done: Done) -> None:
        """Writes the result file of a run, and then a line in the log."""
        write_whole(self._path(done.key), f"{json.dumps(done.row)}\n")
        line = {"key": done.key, "cpu_s": round(done.cpu_s, 3), "wall_s": round(done.wall_s, 3)}
        with (self.folder / _LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def remove(self, key: str) -> None:
        """Removes the result file of a run, if the file exists."""
        self._path(key).unlink(missing_ok=True)

    def write_head(self, name: str, slos: Mapping[str, Slo]) -> None:
        head = {"name": name, "slos": {slo: str(wanted) for slo, wanted in slos.items()}}
        write_whole(self.folder / HEAD, f"{json.dumps(head, indent=2)}\n")

    def write_plan(self, points: Sequence[Point]) -> None:
        fields = dict.fromkeys(name for point in points for name in point.changes)
        lines = [
            json.dumps(
                {"point": point.number, "range_end": point.end, "seed": seed, "key": task.key}
                | {name: point.changes.get(name) for name in fields},
                default=str,
            )
            for point in points
            for seed, task in point.tasks.items()
        ]
        write_whole(self.folder / PLAN, "".join(f"{line}\n" for line in lines))

    def _path(self, key: str) -> Path:
        return self._points / f"{key}.json"
