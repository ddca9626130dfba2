"""GPU memory mapped into another process of the host. The target reads: a sender asks it to pull.

Reads through a mapping run at the rate of the link and a batch of copies is one call. Writes through a mapping were ten
times slower where this was measured (experiments/transfer-micro/fits.yaml), so nothing is pushed.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch

from pdreal.streams import copy_stream
from pdreal.transports.cuda_runtime import CudaError, CudaRuntime
from pdreal.transports.protocol import Addresses, Regions, TransferError, UnavailableError, connected
from pdreal.transports.pull import PullClient, PullServer


class CudaIpcTransport:
    def __init__(self, device: torch.device) -> None:
        """Raises UnavailableError without a GPU."""
        self._runtime = CudaRuntime()
        self._device = device
        self._regions: list[tuple[int, int, int, str]] = []
        """Address, bytes, begin of the allocation and its handle."""
        self._peers: dict[str, PullClient] = {}
        self._opened = _Opened(self._runtime)
        self._server = PullServer(self._open_sender)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Memory of cudaMalloc: torch's default allocator, without expandable segments."""
        try:
            for region in regions:
                begin = self._runtime.allocation_of(region.data_ptr())
                self._regions.append((region.data_ptr(), region.nbytes, begin, self._runtime.export(begin)))
        except CudaError as wrong:
            raise UnavailableError(f"CUDA IPC refuses memory of {self._device}: {wrong}") from None

    @property
    def address(self) -> str:
        return json.dumps({"socket": self._server.name})

    def connect(self, address: str) -> None:
        self._peers[address] = PullClient(json.loads(address)["socket"], self._regions)

    def disconnect(self, address: str) -> None:
        if address in self._peers:
            self._peers.pop(address).close()

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        if len(lengths):
            connected(self._peers, address).write(local, remote, lengths)

    def _open_sender(self, regions: Any) -> "_Mapped":
        torch.cuda.set_device(self._device)
        targets = Regions((address, num_bytes, address) for address, num_bytes, *_ in self._regions)
        try:
            return _Mapped(self._runtime, self._opened, regions, targets, copy_stream(self._device))
        except CudaError as wrong:
            raise TransferError(f"CUDA IPC: {wrong}") from None

    def close(self) -> None:
        self._server.close()
        for address in list(self._peers):
            self.disconnect(address)


class _Opened:
    """Allocations of other processes that are mapped here, with how many senders use each: none is opened twice.

    They are closed with their last sender, for memory of a process that died is kept while it is mapped elsewhere.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._mapped: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def acquire(self, handle: str) -> int:
        with self._lock:
            mapped, users = self._mapped.get(handle, (0, 0))
            self._mapped[handle] = (mapped if users else self._runtime.open(handle), users + 1)
            return self._mapped[handle][0]

    def release(self, handle: str) -> None:
        with self._lock:
            mapped, users = self._mapped.pop(handle)
            if users > 1:
                self._mapped[handle] = mapped, users - 1
            else:
                self._runtime.close(mapped)


class _Mapped:
    """A sender's memory, mapped."""

    def __init__(
        self, runtime: CudaRuntime, opened: _Opened, regions: Any, targets: Regions, stream: torch.cuda.Stream
    ) -> None:
        self._runtime = runtime
        self._opened = opened
        self._targets = targets
        self._stream = stream
        self._handles = sorted({handle for *_, handle in regions})
        begins = {handle: opened.acquire(handle) for handle in self._handles}
        self._sources = Regions(
            (address, num_bytes, begins[handle] + address - begin) for address, num_bytes, begin, handle in regions
        )

    def copy(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        ranges = self._sources.translate(sources, lengths), self._targets.translate(targets, lengths), lengths
        try:
            self._runtime.copy_batch(*ranges, self._stream)
            self._stream.synchronize()
        except (CudaError, RuntimeError) as wrong:
            raise TransferError(f"CUDA IPC: {wrong}") from None

    def close(self) -> None:
        for handle in self._handles:
            self._opened.release(handle)
