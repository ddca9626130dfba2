"""Host memory that two processes of one machine map. The sender writes with memcpy.

Memory is an anonymous file (memfd) that peers open through /proc: it has no name to clean up when a process is killed.
Linux only.
"""

import ctypes
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from pdreal.transports.protocol import Addresses, PeerProcess, Regions, TransferError, UnavailableError, connected

_NO_FAULTS = mmap.MAP_SHARED | mmap.MAP_POPULATE


class SharedMemoryTransport:
    def __init__(self, device: torch.device) -> None:
        """Raises UnavailableError if the device is a GPU."""
        if device.type != "cpu":
            raise UnavailableError(f"shared memory is memory of the host, not of {device}")
        self._allocated: list[tuple[int, int, int]] = []
        """Address, size in bytes and file descriptor of each allocation."""
        self._peers: dict[str, _Peer] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        file = os.memfd_create("kv")
        os.ftruncate(file, num_bytes)
        memory = torch.frombuffer(mmap.mmap(file, num_bytes, _NO_FAULTS), dtype=torch.uint8)
        self._allocated.append((memory.data_ptr(), num_bytes, file))
        return memory.zero_()

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Does nothing: memory of `allocate` is shared already. Other memory can be read from, but peers cannot write
        to it.
        """

    @property
    def address(self) -> str:
        return json.dumps({"pid": os.getpid(), "regions": self._allocated})

    def connect(self, address: str) -> None:
        self._peers[address] = _Peer(**json.loads(address))

    def disconnect(self, address: str) -> None:
        if address in self._peers:
            self._peers.pop(address).process.close()

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        with self.mapped(address) as regions:
            copy_ranges(local, regions.translate(remote, lengths), lengths)

    @contextmanager
    def mapped(self, address: str) -> Iterator[Regions]:
        peer = connected(self._peers, address)
        peer.process.check_alive()
        yield peer.regions
        peer.process.check_alive()

    def close(self) -> None:
        for address in list(self._peers):
            self.disconnect(address)
        for _, _, file in self._allocated:
            os.close(file)
        self._allocated.clear()


class _Peer:
    """A process whose memory is mapped here. regions: for each region, its address in the process, its size in bytes,
    and its file descriptor in the process. Raises TransferError if the process is gone.
    """

    def __init__(self, pid: int, regions: list[tuple[int, int, int]]) -> None:
        self.process = PeerProcess(pid)
        try:
            self._maps = [_map(f"/proc/{pid}/fd/{file}", num_bytes) for _, num_bytes, file in regions]
        except FileNotFoundError:
            raise TransferError(f"process {pid} is gone") from None
        here = [np.frombuffer(memory, np.uint8).ctypes.data for memory in self._maps]
        self.regions = Regions(
            (address, num_bytes, at) for (address, num_bytes, _), at in zip(regions, here, strict=True)
        )


def copy_ranges(sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
    """Copies each range by memcpy. All ranges lie in host memory that this process has mapped. sources, targets:
    addresses at which ranges begin. lengths: sizes in bytes, one per range.
    """
    for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(target, source, length)


def _map(path: str, num_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, num_bytes, _NO_FAULTS)
    finally:
        os.close(file)
