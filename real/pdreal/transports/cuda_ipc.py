"""Transfers through CUDA IPC, which maps GPU memory of one process into another process of the same host. The receiver
does the copying: a sender asks the receiver to read from the sender's memory.

Reads through a mapping reach the rate of the link, and one call queues many copies. Writes by the same call were ten
times slower where this was measured (experiments/transfer-micro/fits.yaml). Kernels may also write directly into a
peer's memory, through the addresses that `mapped` gives.
"""

import ctypes
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdreal.transports.protocol import Addresses, PeerProcess, Regions, TransferError, UnavailableError, connected
from pdreal.transports.pull import PullClient, PullServer
from pdreal.transports.streams import copy_stream

_OPEN_LAZILY = 1  # cudaIpcMemLazyEnablePeerAccess
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_WITHOUT_INDEX_OF_FAILURE = 13000  # from this version on the batch call has one argument less
_HAS_BATCHES = 12080
COPIES_PER_CALL = 1024
"""Largest number of copies that one call queues. The driver holds a lock during the call, and other threads of the
process launch nothing meanwhile. While single calls queued 71,000 copies each, decode steps waited up to 122 ms
(experiments/four-h100)."""


class CudaError(Exception):
    """Raised if a call of the CUDA runtime fails."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of access, hints of two locations (type, id), flags."""

    _fields_ = (("access_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaRuntime:
    """The CUDA runtime library that torch loaded."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError("CUDA IPC needs a CUDA device, and torch finds none")
        torch.cuda.init()
        self._runtime = ctypes.CDLL(_loaded("libcudart"))
        self._driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        self._call("cudaRuntimeGetVersion", ctypes.byref(version))
        self._version = version.value
        if self._version < _HAS_BATCHES:
            raise UnavailableError(f"CUDA IPC needs CUDA 12.8 or later, found {self._version // 1000}")

    def allocation_of(self, address: int) -> int:
        """Returns the start of the CUDA allocation in which an address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if code:
            raise CudaError(f"cuMemGetAddressRange: error {code}")
        return base.value

    def export(self, address: int) -> str:
        """Returns a handle, as hexadecimal text, for the whole allocation that contains an address."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle).hex()

    def open(self, handle: str) -> int:
        """Maps another process's allocation on the current device. Returns its address here."""
        mapped = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(mapped), opened, ctypes.c_uint(_OPEN_LAZILY))
        assert mapped.value is not None
        return mapped.value

    def close(self, mapped: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(mapped))

    def copy(self, sources: Addresses, targets: Addresses, lengths: Addresses, stream: torch.cuda.Stream) -> None:
        """Copies ranges, at most COPIES_PER_CALL per CUDA call. Returns when all bytes are in place. Other threads can
        launch their work between two CUDA calls. sources, targets: addresses at which ranges begin, in this process's
        address space. lengths: sizes in bytes. Entry i of each belongs to range i.
        """
        for first in range(0, len(lengths), COPIES_PER_CALL):
            part = slice(first, first + COPIES_PER_CALL)
            self.copy_batch(sources[part], targets[part], lengths[part], stream)
            stream.synchronize()

    def copy_batch(self, sources: Addresses, targets: Addresses, lengths: Addresses, stream: torch.cuda.Stream) -> None:
        """Copies all ranges in one call. Returns when the copies are queued in the stream. The arguments are those of
        `copy`.
        """
        source, target, size = (np.ascontiguousarray(each, np.uint64) for each in (sources, targets, lengths))
        attributes, first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)
        failed = () if self._version >= _WITHOUT_INDEX_OF_FAILURE else (ctypes.byref(ctypes.c_size_t()),)
        self._call(
            "cudaMemcpyBatchAsync",
            *(ctypes.c_void_p(each.ctypes.data) for each in (target, source, size)),
            ctypes.c_size_t(len(size)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream.cuda_stream),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise CudaError(f"{name}: {self._runtime.cudaGetErrorString(code).decode()}")


def _loaded(library: str) -> str:
    """Returns the path of a library that this process has loaded. library: beginning of the file's name."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(library):
            return path
    raise UnavailableError(f"torch has not loaded {library}")


class CudaIpcTransport:
    def __init__(self, device: torch.device) -> None:
        """Raises UnavailableError if the device is no GPU."""
        self._runtime = CudaRuntime()
        self._device = device
        self._regions: list[tuple[int, int, int, str]] = []
        """Address, bytes, start of the allocation and its handle, for each region."""
        self._peers: dict[str, PullClient] = {}
        self._targets: dict[str, _Target] = {}
        self._opened = _OpenAllocations(self._runtime)
        self._server = PullServer(self._open_sender)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Registers memory that cudaMalloc allocated. torch's default allocator uses cudaMalloc, unless expandable
        segments are on.
        """
        try:
            for region in regions:
                begin = self._runtime.allocation_of(region.data_ptr())
                self._regions.append((region.data_ptr(), region.nbytes, begin, self._runtime.export(begin)))
        except CudaError as wrong:
            raise UnavailableError(f"CUDA IPC refuses memory of {self._device}: {wrong}") from None

    @property
    def address(self) -> str:
        return json.dumps({"socket": self._server.name, "pid": os.getpid(), "regions": self._regions})

    def connect(self, address: str) -> None:
        described = json.loads(address)
        self._peers[address] = PullClient(described["socket"], self._regions)
        self._targets[address] = _Target(self._opened, described["pid"], described["regions"])

    def disconnect(self, address: str) -> None:
        if address in self._peers:
            torch.cuda.set_device(self._device)  # what is mapped is so for this one
            self._peers.pop(address).close()
            self._targets.pop(address).close()

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        if len(lengths):
            connected(self._peers, address).write(local, remote, lengths)

    @contextmanager
    def mapped(self, address: str) -> Iterator[Regions]:
        with connected(self._targets, address).mapped() as regions:
            yield regions

    def _open_sender(self, regions: Any) -> "_Sender":
        torch.cuda.set_device(self._device)
        targets = Regions((address, num_bytes, address) for address, num_bytes, *_ in self._regions)
        return _Sender(self._runtime, _Mapping(self._opened, regions), targets, copy_stream(self._device))

    def close(self) -> None:
        self._server.close()
        for address in list(self._peers):
            self.disconnect(address)


class _OpenAllocations:
    """Allocations of other processes that are mapped here. Each is opened once, however many peers use it.

    An allocation is closed when its last peer disconnects, because memory of a dead process is not freed while it is
    mapped elsewhere.
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


class _Mapping:
    """Memory of another process that is mapped for the current GPU. Raises TransferError if the memory cannot be
    mapped. regions: for each region: its address in the other process, its size in bytes, the begin of its allocation
    there, and the CUDA IPC handle of the allocation in hex.
    """

    def __init__(self, opened: _OpenAllocations, regions: Any) -> None:
        self._opened = opened
        begins: dict[str, int] = {}
        self._handles = begins.keys()
        try:
            for handle in sorted({handle for *_, handle in regions}):
                begins[handle] = opened.acquire(handle)
        except CudaError as wrong:
            self.close()
            raise TransferError(f"CUDA IPC: {wrong}") from None
        self.regions = Regions(
            (address, num_bytes, begins[handle] + address - begin) for address, num_bytes, begin, handle in regions
        )

    def close(self) -> None:
        for handle in self._handles:
            self._opened.release(handle)


class _Target:
    """A peer into whose memory kernels of this process write directly. The memory is mapped here at the first use of
    `mapped`, which one thread at a time can enter. pid: id of the peer's process. regions: the peer's memory. For each
    region: its address in the peer, its size in bytes, the begin of its allocation there, and the CUDA IPC handle of
    the allocation in hex.
    """

    def __init__(self, opened: _OpenAllocations, pid: int, regions: Any) -> None:
        self._opened = opened
        self._pid = pid
        self._regions = regions
        self._lock = threading.Lock()
        self._process: PeerProcess | None = None
        self._mapping: _Mapping | None = None
        self._is_closed = False

    @contextmanager
    def mapped(self) -> Iterator[Regions]:
        with self._lock:
            if self._is_closed:
                raise TransferError("the peer is not connected any more")
            self._process = self._process or PeerProcess(self._pid)
            self._process.check_alive()
            self._mapping = self._mapping or _Mapping(self._opened, self._regions)
            yield self._mapping.regions
            self._process.check_alive()

    def close(self) -> None:
        """Waits for the thread that writes, then unmaps the peer's memory, which the thread's kernel needs."""
        with self._lock:
            self._is_closed = True
            for held in (self._process, self._mapping):
                if held is not None:
                    held.close()


class _Sender:
    """A sender's memory, from which this receiver reads ranges. mapping: the sender's memory, mapped here. targets:
    regions of this receiver. stream: the CUDA stream that runs the copies.
    """

    def __init__(self, runtime: CudaRuntime, mapping: _Mapping, targets: Regions, stream: torch.cuda.Stream) -> None:
        self._runtime = runtime
        self._mapping = mapping
        self._targets = targets
        self._stream = stream

    def copy(self, sources: Addresses, targets: Addresses, lengths: Addresses) -> None:
        ranges = self._mapping.regions.translate(sources, lengths), self._targets.translate(targets, lengths), lengths
        try:
            self._runtime.copy(*ranges, self._stream)
        except (CudaError, RuntimeError) as wrong:
            raise TransferError(f"CUDA IPC: {wrong}") from None

    def close(self) -> None:
        self._mapping.close()
