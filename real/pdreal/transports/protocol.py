"""Transfer engines: what one does for a rank, how one is opened, and how it fails."""

import importlib
import os
import select
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Addresses = NDArray[np.int64]
"""Memory addresses, or lengths in bytes."""


"""Engines, as scenarios name them."""

Peer = TypeVar("Peer")


class TransferError(Exception):
    """A write failed, or its outcome is unknown: some or all of its bytes may have arrived, or may still arrive."""


class UnavailableError(Exception):
    """This machine cannot run this engine; the message says what to install or change."""


def connected(peers: Mapping[str, Peer], address: str) -> Peer:
    """Raises TransferError if another thread has disconnected it."""
    try:
        return peers[address]
    except KeyError:
        raise TransferError("the peer is not connected any more") from None


class Transport(Protocol):
    """An engine in one rank. First all memory is registered, then the address is given to peers."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that peers can write to once it is registered: uint8 [num_bytes], zeros."""
        ...

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Register all memory that is read or written, each region once. Raises UnavailableError if the engine refuses
        it.
        """
        ...

    @property
    def address(self) -> str:
        """Text that a peer needs to write into this rank's memory."""
        ...

    def connect(self, address: str) -> None:
        """Prepare to write to a peer. Raises TransferError if it is gone."""
        ...

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        ...

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        """Copy each local range to the remote one; returns when all bytes are in place.

        Several threads may write at a time. Raises TransferError, within seconds if the peer died.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class MappingTransport(Transport, Protocol):
    """An engine that maps the memory of its peers here."""

    def mapped(self, address: str) -> AbstractContextManager["Regions"]:
        """A peer's memory, to be written to for as long as this lasts. Raises TransferError, also if it died."""
        ...


DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def load_engine(modules: tuple[str, ...], wheel: str) -> ModuleType:
    """The first of these modules that can be imported. Raises UnavailableError if none can."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as wrong:
            raise UnavailableError(f"{module}: {wrong}{_hint(str(wrong))}") from None
    raise UnavailableError(f"{modules[0]} is not installed: pip install {wheel}")


def _hint(problem: str) -> str:
    for library, package in DEBIAN_PACKAGES.items():
        if library in problem:
            return f"; on Debian: apt-get install {package}"
    return ""


class Regions:
    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Rows of regions: address, bytes, and address of the mapping."""
        begins, sizes, mapped = np.array(sorted(rows), np.int64).reshape(-1, 3).T
        self._begins, self._ends, self._mapped = begins, begins + sizes, mapped

    def translate(self, addresses: Addresses, lengths: Addresses) -> Addresses:
        """Addresses at which these ranges are mapped. Raises TransferError if one is not within a region."""
        region = np.searchsorted(self._begins, addresses, "right") - 1
        if (region < 0).any() or (addresses + lengths > self._ends[region]).any():
            raise TransferError("a range is not within registered memory")
        return self._mapped[region] + addresses - self._begins[region]


class PeerProcess:
    """A process of this host whose memory is mapped here; a process descriptor (pidfd) tells whether it lives."""

    def __init__(self, pid: int) -> None:
        """Raises TransferError if it is gone."""
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise TransferError(f"process {pid} is gone") from None

    def check_alive(self) -> None:
        """Raises TransferError if it died."""
        poll = select.poll()  # one for each thread: it refuses to be asked by two at a time
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(0):
            raise TransferError(f"process {self._pid} died")

    def close(self) -> None:
        os.close(self._descriptor)
