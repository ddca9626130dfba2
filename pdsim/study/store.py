"""A sweep's folder: one shard for each computed task, which task is which point, and a log of the work.

points/KEY.parquet   results, each written whole or not at all
plan.parquet         one row for each point and seed: its fields, and the key of its shard
sweep.json           the sweep's name, and its SLOs
log.jsonl            one line for each computed shard: CPU and wall seconds
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pdsim.metrics.run_folder import require_out
from pdsim.study.compute import Done
from pdsim.study.plan import Point, shown
from pdsim.study.shard import arrow_array, read_shard
from pdsim.study.sweep_file import SloSettings

PLAN = "plan.parquet"
HEAD = "sweep.json"
DAMAGED = "damaged"
"""Cut short, or no shard at all: whoever copied the folder, or a disk, broke it."""


@contextmanager
def opened_folder(out: Path | str | None) -> Iterator[Path]:
    """The folder `out`, made if need be; None: one that is gone afterwards. Raises RunFolderError."""
    if out is None:
        with TemporaryDirectory(prefix="pdsim-") as folder:
            yield Path(folder)
    else:
        require_out(Path(out))
        Path(out).mkdir(parents=True, exist_ok=True)
        yield Path(out)


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._points = folder / "points"
        self._points.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self._points / f"{key}.parquet"

    def status(self, key: str) -> str | None:
        """Status of a shard: ok, failed, crashed (its worker died), or DAMAGED; None: there is none."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            (status,) = read_shard(path, ["status"])["status"].to_pylist()
        except (pa.ArrowException, OSError, KeyError, ValueError):
            return DAMAGED
        return str(status)

    def keep(self, done: Done) -> None:
        """The shard, and then a line in the log."""
        _write_whole(self.path(done.key), done.shard)
        line = {"key": done.key, "cpu_s": round(done.cpu_s, 3), "wall_s": round(done.wall_s, 3)}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def write_head(self, name: str, slos: Mapping[str, SloSettings]) -> None:
        head = {"name": name, "slos": {slo: wanted.model_dump() for slo, wanted in slos.items()}}
        _write_whole(self.folder / HEAD, (json.dumps(head, indent=2) + "\n").encode())

    def write_plan(self, points: Sequence[Point]) -> None:
        rows = [(point, seed, task.key) for point in points for seed, task in point.tasks.items()]
        columns: dict[str, Any] = {
            "point": [point.number for point, _, _ in rows],
            "range_end": [point.end for point, _, _ in rows],
            "seed": [seed for _, seed, _ in rows],
            "key": [key for _, _, key in rows],
        }
        for field in dict.fromkeys(name for point in points for name in point.changes):
            columns[field] = [point.changes.get(field) for point, _, _ in rows]
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_pydict({name: _column(values) for name, values in columns.items()}), sink)
        _write_whole(self.folder / PLAN, sink.getvalue().to_pybytes())


def _column(values: Sequence[Any]) -> Any:
    """A column of one type, if all values are; else of text."""
    kinds = {type(value) for value in values if value is not None}
    for kind, types in _TYPES.items():
        if kinds <= types:
            return arrow_array(kind, values)
    return arrow_array(pa.string(), [None if value is None else shown(value) for value in values])


_TYPES: dict[Any, set[type]] = {
    pa.null(): set(),
    pa.bool_(): {bool},
    pa.int64(): {int},
    pa.float64(): {int, float},
    pa.string(): {str},
}


def _write_whole(path: Path, content: bytes) -> None:
    """Writes under another name first: a file that is there is complete, whenever the writer dies.

    When the machine dies, the last ones may be damaged, which is seen, and they are computed again.
    """
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
