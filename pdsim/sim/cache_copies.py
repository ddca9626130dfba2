"""Copies between the pages of one instance, its host cache and storage, in simulated time."""

from collections.abc import Callable
from typing import Literal

from pdsim.core.messages import (
    Command,
    LoadBack,
    LoadedBack,
    LoadRetracted,
    PrefetchKv,
    StopPrefetch,
    StoreKv,
    Tell,
    WriteBackup,
)
from pdsim.cost.copies import HostLink, end_behind_load
from pdsim.metrics.records import HostCopyRecord
from pdsim.sim.storage import StorageClient
from pdsim.sim.timeline import Timeline


class CacheCopies:
    """Loads hold up the forward that reads them, or are told of; some writes hold up the loop."""

    def __init__(
        self,
        timeline: Timeline,
        instance_id: str,
        link: HostLink,
        *,
        num_layers: int,
        record: Callable[[HostCopyRecord], None],
        tell: Callable[[Tell], None] | None,
        storage: StorageClient | None = None,
    ) -> None:
        """tell: gives messages to an instance that waits for its loads."""
        self.blocked_until_ns = 0
        """The loop waits for what is written back, and for retracted requests."""
        self._timeline = timeline
        self._instance_id = instance_id
        self._link = link
        self._num_layers = num_layers
        self._record = record
        self._tell = tell
        self._storage = storage
        self._written_ns = 0
        """Time when the last write to host memory ends."""
        self._load: tuple[int, int] | None = None
        """Start and end of loads into pages that the next forward reads."""

    def begin(self, commands: list[Command]) -> list[Command]:
        """Begin the copies among these commands. Returns the others."""
        others: list[Command] = []
        for command in commands:
            if isinstance(command, WriteBackup):
                _, self._written_ns = self._copy("write", len(command.pages))
                if command.blocks:
                    self._block_until(self._written_ns)
            elif isinstance(command, LoadRetracted):
                self._block_until(self._copy("load", len(command.pages))[1])
            elif isinstance(command, LoadBack):
                self._on_load(command, *self._copy("load", len(command.pages)))
            elif isinstance(command, StoreKv | PrefetchKv | StopPrefetch):
                self._on_storage(command)
            else:
                others.append(command)
        return others

    def _block_until(self, time_ns: int) -> None:
        self.blocked_until_ns = max(self.blocked_until_ns, time_ns)

    def kill(self) -> None:
        if self._storage is not None:
            self._storage.kill()

    def forward_end_ns(self, start_ns: int, duration_ns: int) -> int:
        """End of a forward that begins at start_ns, behind the loads since the last one."""
        load, self._load = self._load, None
        return (
            start_ns + duration_ns if load is None else end_behind_load(start_ns, duration_ns, load, self._num_layers)
        )

    def _on_storage(self, command: StoreKv | PrefetchKv | StopPrefetch) -> None:
        assert self._storage is not None
        if isinstance(command, StoreKv):
            self._storage.store(command, max(self._written_ns, self._timeline.now_ns))
        elif isinstance(command, PrefetchKv):
            self._storage.prefetch(command)
        else:
            self._storage.stop(command)

    def _on_load(self, command: LoadBack, start_ns: int, end_ns: int) -> None:
        if self._tell is None:
            self._load = (start_ns if self._load is None else self._load[0], end_ns)
        else:
            loaded = Tell(self._instance_id, LoadedBack(command.request_id))
            self._timeline.after(end_ns - self._timeline.now_ns, self._tell, loaded)

    def _copy(self, kind: Literal["load", "write"], num_pages: int) -> tuple[int, int]:
        start_ns, end_ns = self._link.copy(kind, num_pages, self._timeline.now_ns)
        num_bytes = self._link.num_bytes(num_pages)
        self._record(HostCopyRecord(self._instance_id, kind, start_ns, end_ns, num_pages, num_bytes))
        return start_ns, end_ns
