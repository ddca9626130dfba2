"""The order in which storage serves one instance's prefetches: it looks up one prompt after another, and reads one
prompt after another, in batches of pages (SGLang 0.5.23, managers/cache_controller.py:1333, prefetch_thread_func, and
:1247, prefetch_io_aux_func). A driver does the lookups and reads, and reports when they have ended. Law:
tests/laws/test_storage.py.
"""

from collections import deque
from collections.abc import Callable

from pdsim.core.messages import Prefetched, PrefetchKv, StopPrefetch
from pdsim.dataclass import dataclass

BATCH_PAGES = 128
"""Maximum number of pages in one batch of lookups, reads or writes (mem_cache/hicache_storage.py:24,
STORAGE_BATCH_SIZE)."""


@dataclass(slots=True, eq=False)
class Reading:
    """A prefetch of KV from storage that is queued or running."""

    command: PrefetchKv
    num_found: int = 0
    """Number of consecutive pages that the lookup found in storage. Lowered to num_read if storage can read no further
    page."""
    num_read: int = 0
    """Number of the found pages that have been read."""
    is_stopped: bool = False
    """True: the instance has sent StopPrefetch, so no further read begins."""


class PrefetchQueue:
    def __init__(
        self,
        look_up: Callable[[Reading], None],
        read: Callable[[Reading, int], bool],
        tell: Callable[[Prefetched], None],
    ) -> None:
        """look_up: begins the lookup of a prompt. The driver calls `on_looked_up` when the lookup has ended.

        read: begins to read a prompt's next pages, at most the given number, and returns True. The driver calls
        `on_read` when the read has ended. If storage has lost the pages since the lookup, `read` begins nothing and
        returns False.

        tell: sends a message to the instance.
        """
        self._begin_look_up = look_up
        self._begin_read = read
        self._tell = tell
        self._lookups: deque[Reading] = deque()
        self._reads: deque[Reading] = deque()
        self._by_id: dict[int, Reading] = {}

    def prefetch(self, command: PrefetchKv) -> None:
        """Queues a prompt for lookup in storage. Reads of the prompt's pages begin after the reads of earlier
        prefetches.
        """
        reading = Reading(command)
        self._by_id[command.request_id] = reading
        self._lookups.append(reading)
        if len(self._lookups) == 1:
            self._look_up()

    def stop(self, command: StopPrefetch) -> None:
        """Stops a prefetch. The prefetch ends when the queue reaches it, or when its lookup or read under way ends. No
        effect if the prefetch has ended already.
        """
        if (reading := self._by_id.get(command.request_id)) is not None:
            reading.is_stopped = True

    def on_looked_up(self, num_found: int) -> None:
        """Called when the oldest lookup has ended. Queues the prefetch for its reads, or ends the prefetch if it is
        stopped or if num_found is less than PrefetchKv.least_pages. Then begins the next lookup. num_found: number of
        consecutive pages in storage after the first start_tokens tokens of the prompt.
        """
        reading = self._lookups.popleft()
        reading.num_found = num_found
        if reading.is_stopped or num_found < reading.command.least_pages:
            self._end(reading)
        else:
            self._report(reading)
            self._reads.append(reading)
            if len(self._reads) == 1:
                self._read_on()
        self._look_up()

    def on_read(self, num_pages: int, *, is_last: bool = False) -> None:
        """Called when the read under way, of num_pages pages, has ended. Begins the next read: of the same prompt until
        all found pages are read, then of the next prompt. is_last: True: storage can read no further page of this
        prompt.
        """
        reading = self._reads[0]
        reading.num_read += num_pages
        if is_last:
            reading.num_found = reading.num_read
        if reading.num_read < reading.num_found and not reading.is_stopped:
            self._report(reading)
        self._read_on()

    def _look_up(self) -> None:
        """Begins the lookup of the first queued prompt whose prefetch is not stopped. Ends the stopped prefetches
        before it.
        """
        while self._lookups:
            reading = self._lookups[0]
            if not reading.is_stopped:
                self._begin_look_up(reading)
                return
            self._end(self._lookups.popleft())

    def _read_on(self) -> None:
        """Begins the next read for the first prefetch in the queue. Before this, ends prefetches at the front that are
        stopped, or whose found pages have all been read or lost, and reports their end to the instance.
        """
        while self._reads:
            reading = self._reads[0]
            num_pages = min(BATCH_PAGES, reading.num_found - reading.num_read)
            if num_pages and not reading.is_stopped and self._begin_read(reading, num_pages):
                return
            self._end(self._reads.popleft())

    def _end(self, reading: Reading) -> None:
        self._by_id.pop(reading.command.request_id, None)
        self._report(reading, is_over=True)

    def _report(self, reading: Reading, *, is_over: bool = False) -> None:
        self._tell(Prefetched(reading.command.request_id, reading.num_found, reading.num_read, is_over))
