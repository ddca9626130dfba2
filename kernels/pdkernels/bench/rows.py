"""Rows of measurements as CSV, with their provenance, and as a table for the terminal."""

import csv
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import triton


@dataclass(frozen=True, slots=True)
class Row:
    """A measured call. Times are in microseconds; None: not measured.

    Attributes:
        kernel: gather, scatter, push, prefill, append or decode.
        variant: the kernel or call; our main kernel is "fused".
        model, page_size: name of the model, tokens per page.
        tokens: tokens of a request, or of all requests of a batch; for decode and append, the mean context.
        src_tp, dst_tp: tensor-parallel sizes of the source and of the target.
        payload_bytes: bytes of KV moved or read, counted once.
        time_us: device time of a call between two events. For a push to another GPU: host time until both are idle.
        graph_us: device time per call when calls are replayed as a CUDA graph.
        submit_us: host time until the call has submitted its work.
        whole_us: host time until the work is done. For gather, this includes the upload of the page list.
        copy_us: device time of a device-to-device copy of the payload. For decode, the copy reads and writes as many
            bytes as attention reads. For a push to another GPU, host time of a copy to that GPU.
        copy_fraction: copy_us / time_us, the fraction of copy bandwidth that the call reaches.
        gbytes_per_s: rate of bytes read plus bytes written, in 10^9 bytes per s.
        floor_us: time of the bytes read and written at the device's copy bandwidth, measured with copies of 1 GiB.
        programs: limit of thread blocks at a time; None: no limit.

    """

    kernel: str
    variant: str
    model: str
    tokens: int
    page_size: int
    src_tp: int
    dst_tp: int
    payload_bytes: int
    time_us: float | None = None
    graph_us: float | None = None
    submit_us: float | None = None
    whole_us: float | None = None
    copy_us: float | None = None
    copy_fraction: float | None = None
    gbytes_per_s: float | None = None
    floor_us: float | None = None
    programs: int | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Machine, software and command with which the rows were measured."""

    device: str
    driver: str
    torch: str
    triton: str
    python: str
    command: str
    date: str

    @classmethod
    def here(cls, date: str) -> "Provenance":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        command = shlex.join(["python", "-m", "pdkernels.bench", *sys.argv[1:]])
        return cls(name, driver, torch.__version__, triton.__version__, platform.python_version(), command, date)


def write_rows(path: Path, rows: Sequence[Row], provenance: Provenance) -> None:
    """Writes rows, each with its provenance."""
    with path.open("w", newline="") as file:
        names = [field.name for kind in (Row, Provenance) for field in fields(kind)]
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        for row in rows:
            values = {name: _short(value) for name, value in asdict(row).items()}
            writer.writerow(values | asdict(provenance))


def _short(value: object) -> object:
    """Returns a float as text, rounded to four significant digits; from 1,000 on, to tenths. A value that is not a
    float is returned unchanged.
    """
    if not isinstance(value, float):
        return value
    return f"{value:.4g}" if value < 1000 else f"{value:.1f}"


def table(rows: Sequence[Row]) -> str:
    """Returns a table: kernel, variant and shape, with time, share of copy bandwidth and host time."""
    names = f"{'kernel':8} {'variant':14} {'model':18} {'tokens':>6} {'page':>4} {'tp':>5} {'MB':>8}"
    lines = [f"{names} {'us':>9} {'graph':>9} {'submit':>7} {'whole':>7} {'copy':>5}"]
    for row in rows:
        layouts = f"{row.src_tp}->{row.dst_tp}"
        shape = f"{row.model:18} {row.tokens:>6} {row.page_size:>4} {layouts:>5} {row.payload_bytes / 1e6:>8.1f}"
        times = _cell(row.time_us, 9), _cell(row.graph_us, 9), _cell(row.submit_us, 7), _cell(row.whole_us, 7)
        share = "" if row.copy_fraction is None else f"{row.copy_fraction:.0%}"
        lines.append(f"{row.kernel:8} {row.variant:14} {shape} {' '.join(times)} {share:>5}")
    return "\n".join(lines)


def _cell(value: float | None, width: int) -> str:
    return " " * width if value is None else f"{value:>{width}.1f}"
