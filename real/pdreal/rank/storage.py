"""Storage behind the host cache, from the view of an instance's leader: all ranks look up, read and write the same
pages, and the instance gets only pages that all ranks have (SGLang 0.5.23, managers/cache_controller.py:1375,
_all_reduce).

The core may give a host page other KV while the page waits to be written to storage. The whole write with this page is
then dropped. SGLang, in contrast, locks pages that wait. If the write has begun, ranks wait for its end before they
overwrite the page.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from pdreal.control.clock import Timeline
from pdreal.control.logbook import InstanceLog
from pdreal.control.tasks import LookUpPages, ReadPages, StorePages
from pdreal.memory.stored_kv import Moved, page_hashes
from pdreal.rank.group import RankGroup
from pdreal.settings.rank import RankSpec
from pdsim.core import messages as m
from pdsim.core.memory.prefetch_queue import PrefetchQueue, Reading
from pdsim.metrics.records import HostCopyRecord
from pdsim.scenario.building.sizing import layout_of

_LOG = logging.getLogger("pdreal")


class Storage:
    def __init__(
        self,
        spec: RankSpec,
        group: RankGroup,
        timeline: Timeline,
        log: InstanceLog,
        tell: Callable[[m.Message], None],
    ) -> None:
        """tell: gives the instance a message."""
        self._instance_id = spec.instance_id
        self._page_size = spec.scenario.page_size
        self._page_bytes = layout_of(spec.scenario, spec.role).kv_token_bytes * self._page_size
        """Bytes of one page of one rank."""
        self._group = group
        self._timeline = timeline
        self._log = log
        self._tell = tell
        self._prefetches = PrefetchQueue(self._look_up, self._read, self._report)
        self._hashes: dict[int, list[str]] = {}
        """Hashes of each prefetch's pages, by request."""
        self._num_copies = 0
        """Number of copies to host memory that have begun."""
        self._num_copied = 0
        self._waiting: deque[tuple[int, m.StorageCopy]] = deque()
        """Commands in order, each as (number of copies to host memory whose end it awaits, command)."""
        self._writes: deque[m.StoreKv] = deque()
        self._is_writing = False

    # Order of copies.

    def on_copy(self, host_pages: Sequence[int]) -> None:
        """Counts a copy from GPU to host memory that begins, and drops writes to storage that have not begun and read
        the copy's target pages. host_pages: these pages.
        """
        self._num_copies += 1
        self._drop_writes(host_pages)

    def on_copied(self) -> None:
        """Counts a copy from GPU to host memory that has ended, and begins the commands that waited for it. Copies end
        in the order in which they begin.
        """
        self._num_copied += 1
        self._begin_due()

    def begin(self, command: m.StorageCopy) -> None:
        """Queues a command until all earlier copies from GPU to host memory have ended. Then begins it; a write waits
        until earlier writes have ended, a prefetch for earlier prefetches. A prefetch drops writes that have not begun
        and read its host pages.
        """
        if isinstance(command, m.PrefetchKv):
            self._drop_writes(command.host_pages)
        self._waiting.append((self._num_copies, command))
        self._begin_due()

    def _begin_due(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_copied:
            match self._waiting.popleft()[1]:
                case m.StoreKv() as command:
                    self._writes.append(command)
                    self._write_next()
                case m.PrefetchKv() as command:
                    self._prefetches.prefetch(command)
                case m.StopPrefetch() as command:
                    self._prefetches.stop(command)

    def _drop_writes(self, host_pages: Sequence[int]) -> None:
        """Drops writes that have not begun, of host pages which are about to get other KV."""
        pages = set(host_pages)
        self._writes = deque(write for write in self._writes if pages.isdisjoint(write.host_pages))
        self._waiting = deque(
            (number, command)
            for number, command in self._waiting
            if not isinstance(command, m.StoreKv) or pages.isdisjoint(command.host_pages)
        )

    # Writing.

    def _write_next(self) -> None:
        if self._writes and not self._is_writing:
            command = self._writes.popleft()
            host_pages = command.host_pages
            hashes = page_hashes(command.sequence, self._page_size, command.start_tokens, len(host_pages))
            self._is_writing = True
            self._group.begin(StorePages(hashes, host_pages[: len(hashes)]), self._on_written)

    def _on_written(self, results: list[Any], error: str | None) -> None:
        self._is_writing = False
        if self._succeeded("a write", error):
            ranks = [Moved(*result) for result in results]
            moved = [rank.num_pages for rank in ranks]
            self._record("store", ranks, max(moved), sum(moved))
        self._write_next()

    # Reading.

    def _look_up(self, reading: Reading) -> None:
        command = reading.command
        hashes = page_hashes(command.prompt, self._page_size, command.start_tokens, len(command.host_pages))
        self._hashes[command.request_id] = hashes
        self._group.begin(LookUpPages(hashes), self._on_looked_up)

    def _on_looked_up(self, results: list[Any], error: str | None) -> None:
        self._prefetches.on_looked_up(min(results) if self._succeeded("a lookup", error) else 0)

    def _read(self, reading: Reading, num_pages: int) -> bool:
        command, batch = reading.command, slice(reading.num_read, reading.num_read + num_pages)
        task = ReadPages(self._hashes[command.request_id][batch], command.host_pages[batch])
        self._group.begin(task, partial(self._on_read, num_pages))
        return True

    def _on_read(self, num_asked: int, results: list[Any], error: str | None) -> None:
        num_read = 0
        if self._succeeded("a read", error):
            ranks = [Moved(*result) for result in results]
            num_read = min(rank.num_pages for rank in ranks)
            self._record("read", ranks, num_read, num_read * len(ranks))
        self._prefetches.on_read(num_read, is_last=num_read < num_asked)

    def _report(self, message: m.Prefetched) -> None:
        if message.is_over:
            self._hashes.pop(message.request_id, None)
        self._tell(message)

    # Results: one Moved per rank; those of followers arrive as plain lists.

    def _succeeded(self, what: str, error: str | None) -> bool:
        if error is not None:
            _LOG.warning("%s: %s in storage failed: %s; its pages count as missing", self._instance_id, what, error)
        return error is None

    def _record(
        self, kind: Literal["read", "store"], ranks: Sequence[Moved], num_pages: int, num_rank_pages: int
    ) -> None:
        """Records a read or write, from the first rank's start to the last rank's end. num_pages: number of the
        instance's pages that were read or written. A page has one part on each rank. num_rank_pages: number of parts
        that the ranks read or wrote together. Records nothing if num_pages is 0.
        """
        if num_pages:
            start_ns = min(rank.start_ns for rank in ranks) - self._timeline.epoch_ns
            end_ns = max(rank.end_ns for rank in ranks) - self._timeline.epoch_ns
            num_bytes = num_rank_pages * self._page_bytes
            copy = HostCopyRecord(self._instance_id, kind, start_ns, end_ns, num_pages, num_bytes)
            self._log.note("on_host_copy", copy)
