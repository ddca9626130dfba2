"""The few calls of the CUDA runtime that torch does not offer: IPC handles and batches of copies."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdreal.transports.protocol import Addresses, UnavailableError

_OPEN_LAZILY = 1  # cudaIpcMemLazyEnablePeerAccess
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_WITHOUT_INDEX_OF_FAILURE = 13000  # from this version on the batch call has one argument less
_HAS_BATCHES = 12080


class CudaError(Exception):
    """A call failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: order of access, hints of two locations (type, id), flags."""

    _fields_ = (("access_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaRuntime:
    """The runtime library that torch has loaded."""

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
        """Where the allocation begins in which this address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if code:
            raise CudaError(f"cuMemGetAddressRange: error {code}")
        return base.value

    def export(self, address: int) -> str:
        """A handle, in hexadecimal, of the whole allocation that an address lies in."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle).hex()

    def open(self, handle: str) -> int:
        """Where another process's allocation is mapped, on the current device."""
        mapped = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(mapped), opened, ctypes.c_uint(_OPEN_LAZILY))
        assert mapped.value is not None
        return mapped.value

    def close(self, mapped: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(mapped))

    def copy_batch(self, sources: Addresses, targets: Addresses, lengths: Addresses, stream: torch.cuda.Stream) -> None:
        """All ranges in one call; returns when it is submitted."""
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
    """The file of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(library):
            return path
    raise UnavailableError(f"torch has not loaded {library}")
