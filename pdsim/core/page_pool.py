"""The KV pages of one instance and which of them are free."""

from collections import deque
from collections.abc import Iterable

from pdsim.core.pages import PageRuns, join_runs


class PagePool:
    """Hands out pages in the order of its free list.

    Freed pages wait aside until the list runs dry, and only then are sorted into a new one (SGLang's allocators with
    need_sort). So page tables are contiguous on a fresh server and break up with churn. Taking a + b pages gives the
    same pages as taking a and then b. Page 0 is reserved for padding.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free: deque[range] = deque([range(1, num_pages + 1)] if num_pages else [])
        self._released: list[range] = []

    def allocate(self, num_pages: int) -> PageRuns:
        """The next num_pages free pages. The caller has seen num_free: asking for more is a bug."""
        if num_pages > self.num_free:
            raise RuntimeError(f"asked for {num_pages} pages, {self.num_free} of {self.num_pages} are free")
        self.num_free -= num_pages
        taken = []
        while num_pages:
            if not self._free:
                self._free, self._released = deque(self.free_runs()), []
            run = self._free[0]
            if len(run) > num_pages:
                self._free[0] = run[num_pages:]
                taken.append(run[:num_pages])
                break
            taken.append(self._free.popleft())
            num_pages -= len(run)
        return tuple(taken)

    def free(self, runs: Iterable[range]) -> None:
        for run in runs:
            self.num_free += len(run)
            self._released.append(run)
        if self.num_free > self.num_pages:
            raise RuntimeError(f"double free: {self.num_free} of {self.num_pages} pages are free")

    def free_runs(self) -> list[range]:
        """Every free page, in ascending order. Raises RuntimeError if one is free twice."""
        return join_runs((*self._free, *self._released))
