"""python -m pdreal.transfer_bench --out rows.csv: how long a write takes, by engine, bytes and descriptors.

Two processes: the other one only registers memory. Ranges are equal blocks, in order here and in random order there.
Beside the engines stands `copy`, the same ranges copied within one process: memcpy, or a batch of copies from GPU to
GPU, which is what the link can do.
"""

import argparse
import csv
import datetime as dt
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from pdreal.measure.rows import installed, machine_name, repeat_us
from pdreal.transports.choice import NAMES, open_transport
from pdreal.transports.protocol import Addresses, UnavailableError
from pdreal.transports.raw import RawCopy

Devices = tuple[torch.device, torch.device]
"""Of the sender and of the target."""

COPY = "copy"
ENGINES = {
    "cpu": (COPY, "shared-memory", "nixl-cma", "mooncake-tcp"),
    "cuda": (COPY, "cuda-ipc", "mooncake-nvlink", "nixl-cuda-ipc", "mooncake-tcp"),
}
SIZES = tuple(4096 << shift for shift in range(0, 17, 2))
DESCRIPTORS = (1, 4, 16, 64, 256, 1024, 4096)
LEAST_BLOCK_BYTES = 1024

_FILL = 7
_WHEELS = {"mooncake": ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"), "nixl": ("nixl-cu13",)}


@dataclass(frozen=True, slots=True)
class Row:
    """Times are those of the calling thread, from the call to all bytes in place."""

    transport: str
    payload_bytes: int
    num_descriptors: int
    block_bytes: int
    time_us: float
    """Median."""
    min_us: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Provenance:
    machine: str
    engine: str
    cores: int
    load: float
    """Of the last minute, before the measurement."""
    torch_version: str
    python_version: str
    command: str
    date: str

    @classmethod
    def here(cls, transport: str, device: torch.device) -> "Provenance":
        return cls(
            machine=machine_name(device),
            engine=installed(*_WHEELS.get(transport.split("-", maxsplit=1)[0], ())),
            cores=os.cpu_count() or 1,
            load=os.getloadavg()[0],
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            command=shlex.join(["python", "-m", "pdreal.transfer_bench", *sys.argv[1:]]),
            date=dt.datetime.now(dt.UTC).date().isoformat(),
        )


class Writer(Protocol):
    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None: ...


def measure(transport: str, cases: Sequence[tuple[int, int]], devices: Devices, budget_s: float) -> Iterator[Row]:
    """A row for each case: bytes in all, and descriptors. Raises UnavailableError."""
    largest = max(num_bytes for num_bytes, _ in cases)
    with _opened(transport, largest, devices) as (writer, address, local, remote):
        for num_bytes, num_descriptors in cases:
            ranges = _ranges(local, remote, num_bytes // num_descriptors, num_descriptors)
            times_us = repeat_us(partial(writer.write, address, *ranges), budget_s)
            median = statistics.median(times_us)
            block_bytes = num_bytes // num_descriptors
            yield Row(transport, num_bytes, num_descriptors, block_bytes, median, times_us[0], len(times_us))


def _ranges(local: int, remote: int, block_bytes: int, num_blocks: int) -> tuple[Addresses, Addresses, Addresses]:
    order = np.random.default_rng(0).permutation(num_blocks)
    blocks = np.arange(num_blocks) * block_bytes
    return local + blocks, remote + blocks[order], np.full(num_blocks, block_bytes)


@contextmanager
def _opened(transport: str, num_bytes: int, devices: Devices) -> Iterator[tuple[Writer, str, int, int]]:
    """The engine, the target's address, and where the memory of the sender and of the target begins."""
    here, there = devices
    if transport == COPY:
        source, target = (torch.full((num_bytes,), _FILL, dtype=torch.uint8, device=device) for device in devices)
        yield RawCopy(source, target), "", source.data_ptr(), target.data_ptr()
        return
    engine = open_transport(transport, here)
    source = engine.allocate(num_bytes).fill_(_FILL)
    engine.register([source])
    spawn = multiprocessing.get_context("spawn")
    connection, end = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(end, transport, there, num_bytes), daemon=True)
    process.start()
    end.close()
    try:
        address, begin = connection.recv()
        engine.connect(address)
        yield engine, address, source.data_ptr(), begin
        connection.send(None)
        if not connection.recv():
            raise AssertionError(f"{transport} did not write what it was given")
    finally:
        process.kill()
        process.join()
        engine.close()


def _serve(connection: Connection, transport: str, device: torch.device, num_bytes: int) -> None:
    engine = open_transport(transport, device)
    memory = engine.allocate(num_bytes)
    engine.register([memory])
    connection.send((engine.address, memory.data_ptr()))
    connection.recv()
    connection.send(bool((memory == _FILL).all()))
    connection.recv()


def cases(sizes: Sequence[int], descriptors: Sequence[int]) -> list[tuple[int, int]]:
    """From the smallest; blocks are no smaller than LEAST_BLOCK_BYTES. The largest size fills the target's memory."""
    return [(size, count) for size in sorted(sizes) for count in descriptors if size // count >= LEAST_BLOCK_BYTES]


def main(arguments: Sequence[str] | None = None) -> None:
    given = _arguments(arguments)
    last = torch.cuda.device_count() - 1
    here, there = (torch.device(f"cuda:{i}" if given.device == "cuda" else "cpu") for i in (0, last))
    columns = [field.name for kind in (Row, Provenance) for field in fields(kind)]
    with given.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        for transport in given.transport or ENGINES[given.device]:
            provenance = asdict(Provenance.here(transport, here))
            try:
                for row in measure(transport, cases(given.size, given.descriptors), (here, there), given.seconds):
                    table.writerow(asdict(row) | provenance)
                    file.flush()
                    print(_line(row), flush=True)
            except UnavailableError as missing:
                print(f"{transport}: left out: {missing}", file=sys.stderr)


def _line(row: Row) -> str:
    rate = row.payload_bytes / row.time_us / 1e3
    return (
        f"{row.transport:16} {row.payload_bytes:>11} B {row.num_descriptors:>5} x {row.block_bytes:>10} B "
        f"{row.time_us:>11.1f} us (least {row.min_us:.1f}) {rate:>7.2f} GB/s"
    )


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdreal.transfer_bench", description="Measure transfers here.")
    parser.add_argument("--out", "-o", type=Path, required=True, help="CSV of rows to write")
    parser.add_argument("--device", choices=ENGINES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transport", nargs="*", choices=(COPY, *NAMES), help="instead of those of the device")
    parser.add_argument("--size", nargs="*", type=int, default=SIZES, help="bytes in all")
    parser.add_argument("--descriptors", nargs="*", type=int, default=DESCRIPTORS)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row, but no less than three repeats")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
