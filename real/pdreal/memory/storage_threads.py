"""Three threads of one rank work on pages in storage: the first looks pages up, the second reads pages, the third
writes pages, as in SGLang (0.5.23, managers/cache_controller.py:455).
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from pdreal.control.tasks import LookUpPages, ReadPages, StorageTask, StorePages
from pdreal.memory.stored_kv import Moved, StoredKv


class StorageThreads:
    def __init__(self, stored: StoredKv) -> None:
        self._stored = stored
        self._threads = {
            task: ThreadPoolExecutor(1, f"storage-{task.__name__}") for task in (LookUpPages, ReadPages, StorePages)
        }
        self._writing: Future[Any] | None = None
        """The last write to storage."""
        self._written_pages: set[int] = set()
        """Host pages that the last write reads."""

    def submit(self, task: StorageTask) -> "Future[Any]":
        thread = self._threads[type(task)]
        match task:
            case LookUpPages(hashes):
                return thread.submit(self._stored.num_there, hashes)
            case ReadPages(hashes, host_pages):
                return thread.submit(self._read, hashes, host_pages, self.user_of(host_pages))
            case StorePages(hashes, host_pages):
                self._writing = writing = thread.submit(self._stored.write, hashes, host_pages)
                self._written_pages = set(host_pages)
                return writing

    def user_of(self, host_pages: Sequence[int]) -> "Future[Any] | None":
        """Returns the write to storage that must end before these host pages may be overwritten. None: no write reads
        these pages.
        """
        return None if self._written_pages.isdisjoint(host_pages) else self._writing

    def _read(self, hashes: Sequence[str], host_pages: Sequence[int], user: "Future[Any] | None") -> Moved:
        wait_for(user)
        return self._stored.read(hashes, host_pages)


def wait_for(user: "Future[Any] | None") -> None:
    """Waits until a write to storage has ended, whether it failed or not. None: there is no write to wait for."""
    if user is not None:
        wait([user])
