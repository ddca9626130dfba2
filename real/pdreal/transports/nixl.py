"""Transfers by NIXL with UCX. UCX uses system calls (cma) between processes of a host, CUDA IPC between GPUs of a host,
and RDMA between hosts.
"""

import base64
import json
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pdreal.transports.protocol import Addresses, TransferError, UnavailableError, connected, load_engine

TIMEOUT_S = 30.0
"""Maximum time of a write in s. The engine itself has no limit."""

_WHEEL = "--no-deps nixl-cu13"
_ENOUGH_CORES = 16
"""Minimum number of CPU cores with which NIXL runs its own progress thread, because that thread keeps one core busy."""
_PROGRESS_S = 0.01
_POLL_S = 20e-6


class NixlTransport:
    def __init__(self, device: torch.device) -> None:
        """Raises UnavailableError if the engine cannot be loaded."""
        api = load_engine(("nixl_cu13._api", "nixl_cu12._api"), _WHEEL)
        progresses = (os.cpu_count() or 1) >= _ENOUGH_CORES
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=progresses, backends=["UCX"], sync_mode=strict)
        self._device = device
        self._memory = "DRAM" if device.type == "cpu" else "VRAM"
        self._agent = api.nixl_agent(f"pdreal-{uuid.uuid4().hex}", config)
        self._registered: list[Any] = []
        self._peers: dict[str, tuple[str, int]] = {}
        """Name of each peer's NIXL agent, and index of the peer's GPU, by the peer's address."""
        self._closed = threading.Event()
        if not progresses:
            threading.Thread(target=self._progress, name="nixl progress", daemon=True).start()

    def _progress(self) -> None:
        """Lets the engine make progress now and then, because a peer can connect only if this side takes part. Data
        needs no such help.
        """
        while not self._closed.wait(_PROGRESS_S):
            self._agent.get_new_notifs()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    @property
    def _index(self) -> int:
        return self._device.index or 0

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        rows = [(region.data_ptr(), region.nbytes, self._index, "") for region in regions]
        try:
            self._registered.append(self._agent.register_memory(rows, self._memory))
        except Exception as wrong:  # noqa: BLE001 - the engine's exceptions have no class in common
            raise UnavailableError(f"NIXL refuses memory of {self._device}: {wrong!r}") from None

    @property
    def address(self) -> str:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "device": self._index})

    def connect(self, address: str) -> None:
        peer = json.loads(address)
        try:
            name = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        except Exception as wrong:  # noqa: BLE001
            raise TransferError(f"NIXL cannot reach the peer: {wrong!r}") from None
        self._peers[address] = (name if isinstance(name, str) else name.decode(), peer["device"])

    def disconnect(self, address: str) -> None:
        if address in self._peers:
            self._agent.remove_remote_agent(self._peers.pop(address)[0])

    def write(self, address: str, local: Addresses, remote: Addresses, lengths: Addresses) -> None:
        if not len(lengths):
            return
        peer, device = connected(self._peers, address)
        try:
            self._write(peer, self._ranges(local, lengths, self._index), self._ranges(remote, lengths, device))
        except TransferError:
            raise
        except Exception as wrong:  # noqa: BLE001
            raise TransferError(f"NIXL could not write {lengths.sum()} bytes: {wrong!r}") from None

    def _ranges(self, begins: Addresses, lengths: Addresses, device: int) -> Any:
        rows = np.stack([begins, lengths, np.full(len(lengths), device)], axis=1).astype(np.uint64)
        return self._agent.get_xfer_descs(rows, self._memory)

    def _write(self, peer: str, local: Any, remote: Any) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        transfer = self._agent.initialize_xfer("WRITE", local, remote, peer)
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TransferError(f"NIXL did not end a write within {TIMEOUT_S:g} s")
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(transfer)
        finally:
            self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise TransferError(f"NIXL ended a write with {state}")

    def close(self) -> None:
        self._closed.set()
        for address in list(self._peers):
            self.disconnect(address)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
