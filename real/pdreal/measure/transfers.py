"""How long writes take from one process to another, by every engine of the device that this machine can run.

The other process only registers memory. Ranges are equal blocks, in order here and in random order there.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from pdreal.measure.rows import Row, repeat_us, row_of
from pdreal.transports.choice import open_transport
from pdreal.transports.protocol import Addresses, Transport, UnavailableError

ENGINES = {
    "cpu": ("shared-memory", "nixl-cma", "mooncake-tcp"),
    "cuda": ("cuda-ipc", "mooncake-nvlink", "nixl-cuda-ipc", "mooncake-tcp"),
}
_LEAST_BLOCK_BYTES = 1024
_FILL = 7


def transfer_rows(
    device: torch.device,
    sizes: Sequence[int],
    descriptors: Sequence[int],
    seconds: float,
    left_out: Callable[[str], None],
) -> Iterator[Row]:
    """Rows from the first GPU to the last, where there are several. Engines that are missing are told."""
    last = torch.device("cuda", torch.cuda.device_count() - 1) if device.type == "cuda" else device
    shapes = [(size, count) for size in sorted(sizes) for count in descriptors if size // count >= _LEAST_BLOCK_BYTES]
    for transport in ENGINES[device.type]:
        try:
            yield from measure_engine(transport, shapes, (device, last), seconds)
        except UnavailableError as missing:
            left_out(f"{transport}: {missing}")


def measure_engine(
    transport: str, shapes: Sequence[tuple[int, int]], devices: tuple[torch.device, torch.device], seconds: float
) -> Iterator[Row]:
    """A row for each shape: bytes in all, and descriptors. devices: of sender and target. Raises UnavailableError."""
    with _opened(transport, max(num_bytes for num_bytes, _ in shapes), devices) as (engine, address, local, remote):
        for num_bytes, num_descriptors in shapes:
            ranges = _ranges(local, remote, num_bytes // num_descriptors, num_descriptors)
            times_us = repeat_us(partial(engine.write, address, *ranges), seconds)
            yield row_of(
                "transfer", times_us, transport=transport, payload_bytes=num_bytes, num_descriptors=num_descriptors
            )


def _ranges(local: int, remote: int, block_bytes: int, num_blocks: int) -> tuple[Addresses, Addresses, Addresses]:
    order = np.random.default_rng(0).permutation(num_blocks)
    blocks = np.arange(num_blocks) * block_bytes
    return local + blocks, remote + blocks[order], np.full(num_blocks, block_bytes)


@contextmanager
def _opened(
    transport: str, num_bytes: int, devices: tuple[torch.device, torch.device]
) -> Iterator[tuple[Transport, str, int, int]]:
    """The engine, the target's address, and where the memory of the sender and of the target begins."""
    here, there = devices
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
