"""What a transfer engine does for a rank, and how it fails."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Addresses = NDArray[np.int64]
"""Of memory, or lengths of it, in bytes."""


Peer = TypeVar("Peer")


class TransferError(Exception):
    """A write did not succeed, as far as is known: some or all of its bytes may have landed, or may land yet."""


class UnavailableError(Exception):
    """This machine cannot run this engine; says what to install or change."""


def connected(peers: Mapping[str, Peer], address: str) -> Peer:
    """Raises TransferError if another thread has disconnected it."""
    try:
        return peers[address]
    except KeyError:
        raise TransferError("the peer is not connected any more") from None


class Transport(Protocol):
    """One engine in one rank. First all memory is registered, then the address is given to peers."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], zeros: memory that peers can write to once it is registered."""
        ...

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """All memory that is read or written, each region once. Raises UnavailableError if the engine refuses it."""
        ...

    @property
    def address(self) -> str:
        """What a peer needs to write here."""
        ...

    def connect(self, address: str) -> None:
        """Make ready to write to a peer. Raises TransferError if it is gone."""
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
