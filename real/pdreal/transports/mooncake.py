"""Mooncake Transfer Engine: one-sided writes over TCP, NVLink or RDMA, chosen by environment variables.

Settings apply to the whole process and must be set before the engine starts. If the engine lacks the requested
transport, it may use another one without an error. So this module checks that RDMA has a device, that NVLink between
nodes is in the wheel, and that NVLink refuses host memory, which TCP takes.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_ACCEPTCONN, SO_BINDTODEVICE, SOL_SOCKET, socket
from typing import Any, Literal, get_args

import torch

from pdreal.settings.host import LOOPBACK
from pdreal.transports.protocol import Addresses, TransferError, UnavailableError, load_engine
from pdreal.transports.streams import synchronize_engines

Kind = Literal["tcp", "nvlink", "rdma", "mnnvl"]

TIMEOUT_S = 5
"""Maximum time of one call to the engine, with at most BATCH_DESCRIPTORS ranges: this number of seconds, plus one
second per GB. The engine accepts no shorter time.
"""

_LOG = logging.getLogger("pdreal")
_SWITCHES: dict[Kind, str] = {"tcp": "MC_FORCE_TCP", "nvlink": "MC_INTRANODE_NVLINK", "mnnvl": "MC_FORCE_MNNVL"}
_SETTINGS = {
    "MC_TRANSFER_TIMEOUT": str(TIMEOUT_S),
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # with 2,048, larger batches fail at once
    "MC_LOG_LEVEL": "ERROR",
}
BATCH_DESCRIPTORS = 2048
"""Maximum number of descriptors in one call to the engine. The engine takes 0.3 us to read each descriptor, and
meanwhile no Python code runs: for all slices of a request this would take as long as a forward."""
_POLLED_BYTES = 1 << 20
"""If each range of a TCP write has at least this size, the thread that writes sleeps while it waits: the engine's own
wait would keep a CPU core busy that the engine's I/O needs. If models compute on the CPU, the thread sleeps for all TCP
writes.
"""
_POLL_S = 20e-6
_DONE, _RUNNING = 1, 0


class MooncakeTransport:
    def __init__(self, kind: Kind, device: torch.device, address: str = LOOPBACK) -> None:
        """kind: transport that the engine is to use. device: where the rank's KV lies. address: where peers reach this
        host. Raises UnavailableError if the engine cannot be loaded or does not start, if this machine has no RDMA
        device for RDMA, if the wheel lacks NVLink between nodes, or if the engine uses TCP instead of NVLink.
        """
        _choose(kind)
        module = load_engine(("mooncake.engine",), wheel_for(device))
        self._kind = kind
        self._device = device
        self._engine = module.TransferEngine()
        if self._engine.initialize(address, "P2PHANDSHAKE", "rdma" if kind == "rdma" else "tcp", ""):
            raise UnavailableError(f"Mooncake does not start with {kind}")
        if address == LOOPBACK:
            hide_from_the_network()
        self.address = f"{address}:{self._engine.get_rpc_port()}"
        _check_installed(kind, module, self._engine)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        begins, sizes = [region.data_ptr() for region in regions], [region.nbytes for region in regions]
        if code := self._engine.batch_register_memory(begins, sizes):
            raise UnavailableError(f"Mooncake {self._kind} refuses memory of {self._device} (code {code})")

    def connect(self, address: str) -> None:
        """No effect: the engine connects to a peer at the first write."""

    def disconnect(self, address: str) -> None:
        """No effect: the engine forgets peers by itself."""

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        if not len(lengths):
            return
        begins = range(0, len(lengths), BATCH_DESCRIPTORS)
        batches = (
            [each[begin : begin + BATCH_DESCRIPTORS].tolist() for each in (local, remote, lengths)] for begin in begins
        )
        write_batch = self._write_asleep if self._waits_asleep(lengths) else self._write_at_once
        written = all(write_batch(address, *batch) for batch in batches)  # after one that is not, none is begun
        synchronize_engines(self._device)
        if not written:
            raise TransferError(f"Mooncake could not write {lengths.sum()} bytes to {address}")

    def _waits_asleep(self, lengths: Addresses) -> bool:
        return self._kind == "tcp" and (self._device.type == "cpu" or bool(lengths.min() >= _POLLED_BYTES))

    def _write_at_once(self, address: str, *ranges: list[int]) -> bool:
        return int(self._engine.batch_transfer_sync_write(address, *ranges)) == 0

    def _write_asleep(self, address: str, *ranges: list[int]) -> bool:
        """Writes all ranges while this thread sleeps. Each range is a write of its own, because the engine's check
        whether a write has ended looks at one range only. ranges: local addresses, remote addresses, and lengths in
        bytes. Returns True if all ranges are written within the time limit.

        The time limit is the engine's own as _SETTINGS sets it (TIMEOUT_S). Without a limit TCP would keep trying for a
        quarter of an hour after a link is cut.
        """
        submitted = [self._engine.transfer_submit_write(address, *each) for each in zip(*ranges, strict=True)]
        until_s = time.monotonic() + TIMEOUT_S + sum(ranges[2]) / 1e9
        ended = [self._ended(write, until_s) for write in submitted]  # waits for all, failed or not
        return all(status == _DONE for status in ended)

    def _ended(self, write: int, until_s: float) -> int:
        if write <= 0:
            return write
        while (status := self._engine.transfer_check_status(write)) == _RUNNING and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return int(status)

    def close(self) -> None:
        del self._engine


def kind_of(name: str) -> Kind:
    """Returns the kind of Mooncake that a transport names: tcp for mooncake-tcp."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    return next(kind for kind in kinds if name == f"mooncake-{kind}")


def _choose(kind: Kind) -> None:
    if kind == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
        raise UnavailableError("Mooncake over RDMA: this machine has no RDMA device")
    for switch in _SWITCHES.values():
        os.environ.pop(switch, None)
    if kind in _SWITCHES:
        os.environ[_SWITCHES[kind]] = "1"
    apply_settings()


def apply_settings() -> None:
    """Sets the engine's time limit, its limit of queued TCP transfers and its log level, each unless the user has set
    it.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def wheel_for(device: torch.device) -> str:
    return "mooncake-transfer-engine-non-cuda" if device.type == "cpu" else "mooncake-transfer-engine-cuda13"


def hide_from_the_network() -> None:
    """Makes all sockets of this process that listen on all interfaces accept connections from this machine only,
    because any peer may write to the memory that the engine has registered. If Linux does not permit this (before 5.7),
    logs a warning.
    """
    for listening in _sockets_that_listen_everywhere():
        with listening:
            try:
                listening.setsockopt(SOL_SOCKET, SO_BINDTODEVICE, b"lo")
            except PermissionError:  # before Linux 5.7
                port = listening.getsockname()[1]
                _LOG.warning("Mooncake lets the whole network write here, at port %d: it needs a firewall", port)


def _sockets_that_listen_everywhere() -> Iterator[socket]:
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if not str(link.readlink()).startswith("socket:"):
                continue
            found = socket(fileno=os.dup(int(link.name)))
            is_listening = found.family in {AF_INET, AF_INET6} and found.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)
            if is_listening and ip_address(found.getsockname()[0]).is_unspecified:
                yield found
            else:
                found.close()


def _check_installed(kind: Kind, module: Any, engine: Any) -> None:
    if kind == "mnnvl" and not getattr(module, "SUPPORT_MNNVL", False):
        raise UnavailableError("this wheel of Mooncake has no NVLink between nodes (SUPPORT_MNNVL)")
    if kind == "nvlink":
        host = torch.zeros(4096, dtype=torch.uint8)
        if engine.register_memory(host.data_ptr(), host.nbytes) == 0:  # its NVLink refuses what is not of a GPU
            raise UnavailableError("Mooncake took TCP, not NVLink: it needs the wheel mooncake-transfer-engine-cuda13")
