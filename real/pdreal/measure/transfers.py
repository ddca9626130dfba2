"""Times of moving KV: gather and scatter within a rank, and writes between processes with several transfer engines.

The receiving process is `pdreal host`, on this or another host, whose first line of input asks for a target of
transfers. The process answers on standard output, with one JSON object per line, and ends when its standard input is
closed.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from pdreal.measure.forwards import free_bytes, kv_page_bytes
from pdreal.measure.rows import Kind, Row, repeat_each_us, repeat_us, row_of
from pdreal.memory.geometry import CacheGeometry, RankPair
from pdreal.memory.page_copies import KernelStaging, Staging, push_of, staging_of
from pdreal.memory.paged_kv import PagedKv
from pdreal.settings.host import BETWEEN_HOSTS, LOOPBACK, Hosts
from pdreal.settings.model import ModelConfig
from pdreal.transports.opening import open_transport
from pdreal.transports.protocol import Addresses, MappingTransport, Transport, UnavailableError

_SHARE_OF_MEMORY = 0.4
"""Fraction of the free memory for the KV cache. Staged cells take as much memory as the cache."""


def copy_rows(
    kinds: Sequence[Kind],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    page_counts: Sequence[int],
    seconds: float,
) -> Iterator[Row]:
    """Measures gather and scatter, and yields a row for each kind and number of pages. A gather copies half of the KV
    heads into one staging cell. A scatter copies two cells, one for each half. Numbers of pages that need more than 40%
    of the free memory are left out. The model must have an even number of KV heads. kinds: gather, scatter or both.
    page_size: number of tokens of a page. page_counts: numbers of pages of a copy. seconds: time to spend on each row.
    """
    page_bytes = kv_page_bytes(config, dtype, page_size)
    most_pages = int(_SHARE_OF_MEMORY * free_bytes(device)) // page_bytes
    counts = [count for count in page_counts if count <= most_pages]
    kv = PagedKv(
        num_pages=max(counts, default=1),
        page_size=page_size,
        num_layers=config.num_kv_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    staging = staging_of(kv.planes, page_size)
    half = config.num_kv_heads // 2
    halves = [range(half), range(half, 2 * half)]
    for num_pages in counts:
        pages = Random(num_pages).sample(range(1, kv.num_pages + 1), num_pages)
        cells = torch.zeros(num_pages * page_bytes, dtype=torch.uint8, device=device)
        cell = cells.chunk(2)[0]
        if "gather" in kinds:
            yield _copy_row("gather", staging, (pages, halves[0], cell), len(cell), seconds)
        if "scatter" in kinds:
            yield _copy_row("scatter", staging, (pages, halves, cells), len(cells), seconds)


def _copy_row(kind: Kind, staging: Staging, arguments: tuple[Any, ...], payload_bytes: int, seconds: float) -> Row:
    times_us = repeat_us(partial(getattr(staging, kind), *arguments), seconds)
    submit_us = None
    if isinstance(staging, KernelStaging):
        submit_us = _submit_us(partial(getattr(staging, f"launch_{kind}"), *arguments), len(times_us))
    return row_of(kind, times_us, payload_bytes=payload_bytes, submit_us=submit_us)


def _submit_us(launch: Callable[[], torch.cuda.Stream], repeats: int) -> float:
    """Returns the median time in us that the host takes to launch work. Each launch waits for the last work to end;
    this wait is not counted.
    """
    times_us = []
    for _ in range(repeats):
        begin_ns = perf_counter_ns()
        stream = launch()
        times_us.append((perf_counter_ns() - begin_ns) / 1e3)
        stream.synchronize()
    return median(times_us)


ENGINES: dict[str, tuple[str, ...]] = {
    "cpu": ("shared-memory", "push", "nixl-cma", "mooncake-tcp"),
    "cuda": ("cuda-ipc", "push", "mooncake-nvlink", "nixl-cuda-ipc", "mooncake-tcp"),
}
_LEAST_BLOCK_BYTES = 1024


def engines(device_type: str, hosts: Hosts | None) -> Sequence[str]:
    """Returns the transfer engines to measure, within one host or between two hosts."""
    return ENGINES[device_type] if hosts is None else BETWEEN_HOSTS


def transfer_rows(
    device: torch.device,
    sizes: Sequence[int],
    descriptors: Sequence[int],
    seconds: float,
    left_out: Callable[[str], None],
    hosts: Hosts | None = None,
) -> Iterator[Row]:
    """Measures transfers, and yields a row for each measurement. The transfers go from this host's first GPU to its
    last GPU, or to the first GPU of another host. If `device` is a CPU, the transfers are between host memories. sizes:
    bytes. descriptors: numbers of descriptors of a transfer. Pairs of size and number with less than 1 KiB for each
    descriptor are left out. left_out: called with a text for each missing engine: its name and the reason. seconds:
    time to spend on each row.
    """
    last = torch.device("cuda", torch.cuda.device_count() - 1) if device.type == "cuda" and hosts is None else device
    shapes = [(size, count) for size in sorted(sizes) for count in descriptors if size // count >= _LEAST_BLOCK_BYTES]
    for transport in engines(device.type, hosts):
        try:
            if transport == "push":
                yield from push_rows(sizes, (device, last), seconds)
            else:
                yield from measure_engine(transport, shapes, (device, last), seconds, hosts)
        except UnavailableError as missing:
            left_out(f"{transport}: {missing}")


def measure_engine(
    transport: str,
    shapes: Sequence[tuple[int, int]],
    devices: tuple[torch.device, torch.device],
    seconds: float,
    hosts: Hosts | None = None,
) -> Iterator[Row]:
    """Measures transfers, and yields one row per shape. shapes: (total bytes, number of descriptors). devices: the
    sender's, the receiver's. Raises UnavailableError if the engine cannot run. seconds: time to spend on each row.
    """
    with opened(transport, max(num_bytes for num_bytes, _ in shapes), devices, hosts) as (
        engine,
        address,
        source,
        remote,
    ):
        local = source.data_ptr()
        for num_bytes, num_descriptors in shapes:
            ranges = scattered_ranges(local, remote, num_bytes // num_descriptors, num_descriptors)
            times_us = repeat_us(partial(engine.write, address, *ranges), seconds)
            yield row_of(
                "transfer", times_us, transport=transport, payload_bytes=num_bytes, num_descriptors=num_descriptors
            )


_PUSHED = CacheGeometry(num_pages=0, page_size=16, num_layers=32, num_kv_heads=8, head_dim=128, itemsize=2)
"""Cache of the rank that receives in `push_rows`. This rank holds 8 KV heads and the sender 4, so each push fills half
of each page."""


def push_rows(sizes: Sequence[int], devices: tuple[torch.device, torch.device], seconds: float) -> Iterator[Row]:
    """Measures pushes, in which a kernel (torch on a CPU) writes pages straight into the receiver's memory. Yields one
    row per size, with the time of one push. sizes: bytes, rounded down to whole pages of the sender; sizes below one
    page are left out. devices: the sender's, the receiver's. seconds: time to spend on each row. Raises
    UnavailableError if the sender cannot write to the receiver's memory.
    """
    page_bytes = _PUSHED.num_planes * _PUSHED.page_bytes
    counts = [size // (page_bytes // 2) for size in sizes if size >= page_bytes // 2]
    if not counts:
        return
    with opened("push", max(counts) * page_bytes, devices, None) as (engine, address, source, remote):
        assert isinstance(engine, MappingTransport)
        for num_pages in counts:
            target = replace(_PUSHED, num_pages=num_pages)
            plane_bytes = num_pages * target.page_bytes
            planes = source[: num_pages * page_bytes // 2].view(torch.bfloat16).view(target.num_planes, -1, 4, 128)
            begins = remote + plane_bytes * np.arange(target.num_planes)
            with engine.mapped(address) as regions:
                addresses = regions.translate(begins, np.full_like(begins, plane_bytes))
                halves = [
                    push_of(planes.unbind(), addresses, RankPair(0, 0, 0, range(4), heads), target)
                    for heads in (range(4), range(4, 8))
                ]
                pages = range(num_pages), Random(num_pages).sample(range(num_pages), num_pages)
                pushes = cycle(partial(push, *pages) for push in halves)
                times_us = repeat_each_us(pushes, seconds, warm_ups=len(halves))
            size = num_pages * page_bytes // 2
            yield row_of("transfer", times_us, transport="push", payload_bytes=size, num_descriptors=1)


def scattered_ranges(
    local: int, remote: int, block_bytes: int, num_blocks: int
) -> tuple[Addresses, Addresses, Addresses]:
    order = np.random.default_rng(0).permutation(num_blocks)
    blocks = np.arange(num_blocks) * block_bytes
    return local + blocks, remote + blocks[order], np.full(num_blocks, block_bytes)


@contextmanager
def opened(
    transport: str, num_bytes: int, devices: tuple[torch.device, torch.device], hosts: Hosts | None
) -> Iterator[tuple[Transport, str, torch.Tensor, int]]:
    """Context with a receiving process. Yields the engine, the receiver's address, the sender's memory, and the address
    of the receiver's memory. transport: name of the engine. num_bytes: size of each side's memory. devices: device of
    the sender, and device of the receiver. hosts: the receiver runs on the first other host; None: on this host.
    Raises UnavailableError if a side cannot run the engine. Raises AssertionError at the end if a byte of the
    receiver's memory was not written.
    """
    here, there = devices
    engine = open_transport(transport, here, LOOPBACK if hosts is None else hosts.home_address)
    source = engine.allocate(num_bytes).fill_(FILL)
    engine.register([source])
    try:
        with target_of(transport, there, num_bytes, hosts) as target:
            engine.connect(target.address)
            yield engine, target.address, source, target.begin
            if not target.is_full():
                raise AssertionError(f"{transport} did not write the bytes that it was given")
    finally:
        engine.close()


FILL = 7
_HERE = (sys.executable, "-m", "pdreal", "host")


class Target:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        answer = self._hear()
        self.address: str = answer["address"]
        self.begin: int = answer["begin"]
        """Address at which the target's memory begins."""

    def is_full(self) -> bool:
        """True if every byte of the receiver's memory was written."""
        assert self._process.stdin is not None
        self._process.stdin.write("all is written\n")
        self._process.stdin.flush()
        return bool(self._hear()["is_full"])

    def _hear(self) -> dict[str, Any]:
        """Reads an answer of the receiving process. Raises UnavailableError if that process cannot continue."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"wrong": "the target ended"}
        if "wrong" in answer:
            raise UnavailableError(answer["wrong"])
        return answer


@contextmanager
def target_of(transport: str, device: torch.device, num_bytes: int, hosts: Hosts | None) -> Iterator[Target]:
    """Context with a receiving process. hosts: the process runs on the first other host; None: on this host. Raises
    UnavailableError if the process cannot run the engine. transport: name of the engine. device: where the process's
    memory lies. num_bytes: size of this memory.
    """
    command: Sequence[str] = _HERE
    address = LOOPBACK
    if hosts is not None:
        entry = hosts.others[0][1]
        command, address = shlex.split(entry.start or ""), str(entry.address)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  the user's
    assert process.stdin is not None
    ticket = {"transport": transport, "device": str(device), "num_bytes": num_bytes, "address": address}
    try:
        process.stdin.write(json.dumps({"target": ticket}) + "\n")
        process.stdin.flush()
        yield Target(process)
    finally:
        process.kill()
        process.communicate()


def serve_target(transport: str, device: str, num_bytes: int, address: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some engines print

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        engine = open_transport(transport, torch.device(device), address)
        memory = engine.allocate(num_bytes)
        engine.register([memory])
    except UnavailableError as wrong:
        tell(wrong=str(wrong))
        return
    tell(address=engine.address, begin=memory.data_ptr())
    if sys.stdin.readline():
        tell(is_full=bool((memory == FILL).all()))
        sys.stdin.readline()
    os._exit(0)  # whatever a thread of the engine still does
