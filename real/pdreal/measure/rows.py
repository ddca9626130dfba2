"""One measured time to a row of a CSV, which is written as it comes."""

import csv
import datetime as dt
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import torch

from pdreal.machine import driver_version, installed, machine_name

Kind = Literal["prefill", "decode", "gather", "scatter", "transfer", "host"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RowKind = Kind | Literal["clock", "loop", "sending", "handover"]
"""Prefill on a GPU that is busy, and host work that depends on sizes."""

_WHEELS = ("triton", "pyzmq", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "nixl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A field that the kind does not have is None, and empty in the file."""

    kind: RowKind
    time_us: float
    """Median, from the call on the host to the result there; the mean of `loop`."""
    min_us: float | None = None
    repeats: int | None = None
    prompts: int | None = None
    new_tokens: int | None = None
    """Of all prompts of a forward together."""
    batch: int | None = None
    graph: int | None = None
    """The CUDA graph that holds the batch."""
    context_tokens: int | None = None
    """Of all prompts, or of all requests of a decode step, together."""
    busy_us: float | None = None
    """How long the GPU had been computing without pause."""
    payload_bytes: int | None = None
    rest_us: float | None = None
    """Mean time from the end of a loop's step to the begin of the next."""
    submit_us: float | None = None
    """Median, until the host has launched it."""
    transport: str | None = None
    num_descriptors: int | None = None
    what: str | None = None


def row_of(kind: RowKind, times_us: Sequence[float], **sizes: float | str | None) -> Row:
    """times_us: sorted."""
    times = {"time_us": median(times_us), "min_us": times_us[0], "repeats": len(times_us)}
    return Row(kind=kind, **times, **sizes)  # type: ignore[arg-type]


def describe(row: Row) -> str:
    """On one line: its sizes and its time."""
    shape = {name: value for name, value in asdict(row).items() if value is not None}
    for told in ("kind", "time_us", "min_us", "repeats", "rest_us", "submit_us"):
        shape.pop(told, None)
    sizes = ", ".join(f"{name} {value}" for name, value in shape.items())
    return f"{row.kind:8} {sizes:64} {row.time_us:12,.1f} us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    device: str
    model: str
    dtype: str
    page_size: int
    tp: int
    driver: str
    torch_version: str
    versions: str
    python: str
    command: str
    date: str

    @classmethod
    def here(cls, model: str, device: torch.device, dtype: str, page_size: int, tp: int) -> "Provenance":
        return cls(
            device=machine_name(device),
            model=model,
            dtype=dtype,
            page_size=page_size,
            tp=tp,
            driver=driver_version(),
            torch_version=torch.__version__,
            versions=installed(*_WHEELS),
            python=platform.python_version(),
            command=shlex.join(["pdreal", *sys.argv[1:]]),
            date=dt.datetime.now(dt.UTC).date().isoformat(),
        )


class RowFile:
    def __init__(self, path: Path, provenance: Provenance) -> None:
        """Replaces what was there. Raises OSError."""
        self._file = path.open("w", newline="", encoding="utf-8")
        self._provenance = asdict(provenance)
        self._table = csv.DictWriter(self._file, [field.name for kind in (Row, Provenance) for field in fields(kind)])
        self._table.writeheader()
        self.num_rows = 0

    def write(self, row: Row) -> None:
        """It is in the file on return."""
        values = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()}
        self._table.writerow(values | self._provenance)
        self._file.flush()
        self.num_rows += 1

    def close(self) -> None:
        self._file.close()
