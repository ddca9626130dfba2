"""Fractions of nominal rates that measured kernels reach: kernels.csv, written by experiments/operators/distill.py."""

import csv
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

_FILE = Path(__file__).with_name("kernels.csv")


class Kernel(NamedTuple):
    """One operator on one GPU, in one type or among so many GPUs."""

    compute: float
    """Of the operations per second of its type."""
    memory: float
    """Of the memory's bandwidth; of the link's, where GPUs exchange."""
    fixed_us: float
    """Time beyond both."""
    error: float
    """Median relative error of the measured times."""


@cache
def _kernels() -> dict[tuple[str, str, str], Kernel]:
    with _FILE.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (row["gpu"], row["operator"], row["kind"]): Kernel(*(float(row[name] or 1) for name in Kernel._fields))
            for row in rows
        }


@cache
def reached(gpu: str, operator: str, kind: str) -> Kernel:
    """Of this GPU, else the median of all that were measured."""
    found = _kernels()
    own = found.get((gpu, operator, kind))
    if own is not None:
        return own
    others = [kernel for (_, other, of_kind), kernel in found.items() if (other, of_kind) == (operator, kind)]
    return Kernel(*(median(values) for values in zip(*others, strict=True)))


def has_kernels(gpu: str) -> bool:
    """True if kernels of this GPU were measured."""
    return any(name == gpu for name, _, _ in _kernels())
