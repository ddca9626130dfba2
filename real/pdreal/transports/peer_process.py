"""A process of this host whose memory is mapped here; a process descriptor (pidfd) tells whether it lives."""

import os
import select

from pdreal.transports.protocol import TransferError


class PeerProcess:
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
