"""Measured times as rows of a CSV file. Each row is written when it is measured."""

import csv
import datetime as dt
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any, Literal, get_args

import torch

_DRIVER = Path("/sys/module/nvidia/version")


def machine_name(device: torch.device) -> str:
    """Returns the names of all GPUs that torch sees. Without GPUs: the name of the processor."""
    is_cuda = device.type == "cuda"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if is_cuda else []
    return ", ".join(names) or platform.processor() or platform.machine()


def driver_version() -> str:
    """Version of NVIDIA's driver. Empty without a driver."""
    return _DRIVER.read_text().strip() if _DRIVER.is_file() else ""


def installed(*wheels: str) -> str:
    """Returns those of the named packages that are installed, each with its version, separated by commas."""
    found = []
    for wheel in wheels:
        try:
            found.append(f"{wheel} {version(wheel)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


Kind = Literal["prefill", "decode", "gather", "scatter", "transfer", "host", "storage"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RowKind = Kind | Literal["clock", "loop", "sending", "handover"]
"""Kinds of rows. Besides the kinds that --only names: prefill on a busy GPU (clock), and host work that depends on
sizes (loop, sending, handover)."""

_WHEELS = ("triton", "pyzmq", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "nixl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured row. Fields that do not apply to its kind are None, and empty in the file."""

    kind: RowKind
    time_us: float
    """Median time in us. For forwards, copies, transfers and storage: from the call on the host to the result on the
    host. For kind `loop`: the mean time between starts of steps, not the median."""
    min_us: float | None = None
    """Shortest time in us of the repeated measurements."""
    repeats: int | None = None
    """Number of times that the work was measured."""
    prompts: int | None = None
    """Number of prompts of a forward."""
    new_tokens: int | None = None
    """Total number of new tokens of all prompts of a forward. For kind `host`: number of tokens of a request's
    prompt."""
    batch: int | None = None
    """Number of requests of a decode step."""
    graph: int | None = None
    """Size, in requests, of the CUDA graph that runs the batch."""
    verified: int | None = None
    """Number of tokens of each request that the step verifies. None: the step verifies no drafts."""
    prefill_graphs: str | None = None
    """Sizes in tokens of the CUDA graphs for short prefill forwards, separated by spaces."""
    context_tokens: int | None = None
    """Total number of context tokens: of all prompts of a forward, or of all requests of a decode step. For kind
    `loop`: the mean over the steps."""
    busy_us: float | None = None
    """Time in us for which the GPU had computed without a pause when this forward began."""
    payload_bytes: int | None = None
    """Number of bytes that a copy, a transfer, or a read or write of storage moves."""
    rest_us: float | None = None
    """Mean time in us from the end of a step to the start of the next step."""
    submit_us: float | None = None
    """Median time in us that the host takes to launch the work."""
    transport: str | None = None
    """Name of the transfer engine."""
    num_descriptors: int | None = None
    """Number of descriptors of a transfer. For kind `storage`: number of pages."""
    what: str | None = None
    """Name of the measured work. Only rows of the kinds host and storage have a name."""


def row_of(kind: RowKind, times_us: Sequence[float], **sizes: float | str | None) -> Row:
    """Makes a row from measured times. times_us: sorted. sizes: values of other fields of Row, by their names."""
    times = {"time_us": median(times_us), "min_us": times_us[0], "repeats": len(times_us)}
    return Row(kind=kind, **times, **sizes)  # type: ignore[arg-type]


def describe(row: Row) -> str:
    """Returns a row as one line of text: its sizes and its time."""
    shape = {name: value for name, value in asdict(row).items() if value is not None}
    for column in ("kind", "time_us", "min_us", "repeats", "rest_us", "submit_us", "prefill_graphs"):
        shape.pop(column, None)
    sizes = ", ".join(f"{name} {value}" for name, value in shape.items())
    return f"{row.kind:8} {sizes:64} {row.time_us:12,.1f} us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    device: str
    """Names of all GPUs that torch sees, or name of the processor."""
    model: str
    """Name of the model in the catalog."""
    dtype: str
    """Data type of weights, activations and KV."""
    page_size: int
    """Number of tokens of a page."""
    tp: int
    """Tensor-parallel size."""
    ep: int
    """Expert-parallel size."""
    moe_a2a_backend: str
    """Library that sends tokens to experts, or none."""
    driver: str
    """Version of NVIDIA's driver. Empty: there is no driver."""
    torch_version: str
    versions: str
    """Names and versions of the installed packages for kernels, messages and transfer engines, separated by commas."""
    python: str
    """Version of Python."""
    command: str
    """The command that measured."""
    date: str
    """Date of the measurement in UTC, as 2026-01-31."""

    @classmethod
    def here(
        cls, model: str, device: torch.device, dtype: str, page_size: int, tp: int, ep: int, moe_a2a_backend: str
    ) -> "Provenance":
        return cls(
            device=machine_name(device),
            model=model,
            dtype=dtype,
            page_size=page_size,
            tp=tp,
            ep=ep,
            moe_a2a_backend=moe_a2a_backend,
            driver=driver_version(),
            torch_version=torch.__version__,
            versions=installed(*_WHEELS),
            python=platform.python_version(),
            command=shlex.join(["pdreal", *sys.argv[1:]]),
            date=dt.datetime.now(dt.UTC).date().isoformat(),
        )


class RowFile:
    def __init__(self, path: Path, provenance: Provenance) -> None:
        """Opens the file. An existing file is replaced. Raises OSError if the file cannot be written. provenance:
        machine, versions and command, which are written in every row.
        """
        self._file = path.open("w", newline="", encoding="utf-8")
        self._provenance = asdict(provenance)
        self._table = csv.DictWriter(self._file, [field.name for kind in (Row, Provenance) for field in fields(kind)])
        self._table.writeheader()
        self.num_rows = 0

    def write(self, row: Row) -> None:
        """Writes a row. The row is in the file when this returns."""
        values = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(row).items()}
        self._table.writerow(values | self._provenance)
        self._file.flush()
        self.num_rows += 1

    def close(self) -> None:
        self._file.close()


Call = Callable[[], Any]

_LEAST = 3
_LEAST_RESTED = 5
"""Minimum number of repeats if there are pauses. After a pause the host, like the GPU, is sometimes slow to begin."""
MOST_REPEATS = 50


def repeat_us(work: Call, seconds: float, *, warm_ups: int = 1) -> list[float]:
    """Calls `work` again and again, and returns the sorted times of the calls in us. Stops after `seconds` s, but after
    3 calls at the earliest and 50 calls at the latest. warm_ups: number of calls before the timed calls.
    """
    return repeat_each_us(repeat(work), seconds, warm_ups=warm_ups)


def repeat_each_us(
    works: Iterator[Call], seconds: float, *, warm_ups: int = 1, pause_seconds: float = 0
) -> list[float]:
    """Does similar pieces of work one after another, and returns their sorted times in us. Stops after `seconds` s, but
    after 3 times at the earliest (5 with pauses) and 50 times at the latest. warm_ups: number of first pieces, which
    are not timed. pause_seconds: pause in s before each timed piece.
    """
    for _ in range(warm_ups):
        next(works)()
    times_us: list[float] = []
    end_ns = perf_counter_ns() + seconds * 1e9
    least = _LEAST_RESTED if pause_seconds else _LEAST
    while len(times_us) < least or (len(times_us) < MOST_REPEATS and perf_counter_ns() < end_ns):
        work = next(works)
        sleep(pause_seconds)
        times_us.append(once_us(work))
    return sorted(times_us)


def once_us(work: Call) -> float:
    begin_ns = perf_counter_ns()
    work()
    return (perf_counter_ns() - begin_ns) / 1e3
