"""The protocol of transfer engines, and their errors."""

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

Peer = TypeVar("Peer")


class TransferError(Exception):
    """Raised if a write failed or its outcome is unknown. Some or all of its bytes may have arrived, or may still
    arrive.
    """


class UnavailableError(Exception):
    """Raised if this machine cannot run an engine. The message says what to install or change."""


def connected(peers: Mapping[str, Peer], address: str) -> Peer:
    """Returns the connection to a peer. peers: connections by the peer's address. Raises TransferError if the peer is
    not connected, for example because another thread has disconnected the peer.
    """
    try:
        return peers[address]
    except KeyError:
        raise TransferError("the peer is not connected any more") from None


class Transport(Protocol):
    """A transfer engine in one rank. The rank first registers all its memory, then gives its address to peers."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocates memory, uint8 [num_bytes], filled with zeros. Peers can write to the memory after it is
        registered.
        """
        ...

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Registers all memory from which or to which the engine copies, each region once. Raises UnavailableError if
        the engine refuses a region.
        """
        ...

    @property
    def address(self) -> str:
        """Text that a peer needs to write into this rank's memory."""
        ...

    def connect(self, address: str) -> None:
        """Prepares writes to a peer. Raises TransferError if the peer is gone."""
        ...

    def disconnect(self, address: str) -> None:
        """Drops the connection to a peer."""
        ...

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        """Copies each local range to the remote range. Returns when all bytes are in place. Several threads may write
        at a time. local, remote: addresses at which ranges begin, here and in the peer. lengths: sizes in bytes. Entry
        i of each belongs to range i. address: of the peer. Raises TransferError if the write failed or its outcome is
        unknown; if the peer died, within seconds.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class MappingTransport(Transport, Protocol):
    """A transfer engine that maps the memory of its peers into this process."""

    def mapped(self, address: str) -> AbstractContextManager["Regions"]:
        """Context in which a peer's memory is mapped, so that kernels can write to it. Raises TransferError, also if
        the peer died.
        """
        ...


DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def load_engine(modules: tuple[str, ...], wheel: str) -> ModuleType:
    """Imports and returns the first of these modules that is installed and can be imported. wheel: package to install,
    with options of pip, for the message. Raises UnavailableError if there is none; its message has the problem of each
    installed module.
    """
    problems = []
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as wrong:
            problems.append(f"{module}: {wrong}{_hint(str(wrong))}")
    raise UnavailableError("; ".join(problems) or f"{modules[0]} is not installed: pip install {wheel}")


def _hint(problem: str) -> str:
    for library, package in DEBIAN_PACKAGES.items():
        if library in problem:
            return f"; on Debian: apt-get install {package}"
    return ""


class Regions:
    def __init__(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """rows: for each region: its address in the peer, its size in bytes, and the address at which it is mapped
        here.
        """
        begins, sizes, mapped = np.array(sorted(rows), np.int64).reshape(-1, 3).T
        self._begins, self._ends, self._mapped = begins, begins + sizes, mapped

    def translate(self, addresses: Addresses, lengths: Addresses) -> Addresses:
        """Returns this process's addresses of ranges of a peer's memory. addresses, lengths: begin and bytes of each
        range at the peer. Raises TransferError if a range does not lie within one mapped region.
        """
        region = np.searchsorted(self._begins, addresses, "right") - 1
        if (region < 0).any() or (addresses + lengths > self._ends[region]).any():
            raise TransferError("a range is not within registered memory")
        return self._mapped[region] + addresses - self._begins[region]


class PeerProcess:
    """A process of this host whose memory is mapped here. A process descriptor (pidfd) tells whether the
    process lives.
    """

    def __init__(self, pid: int) -> None:
        """Raises TransferError if the process is gone."""
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise TransferError(f"process {pid} is gone") from None

    def check_alive(self) -> None:
        """Raises TransferError if the process died."""
        poll = select.poll()  # one for each thread: it refuses to be asked by two at a time
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(0):
            raise TransferError(f"process {self._pid} died")

    def close(self) -> None:
        os.close(self._descriptor)
