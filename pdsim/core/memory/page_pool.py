"""The KV pages of one instance, and which of them are free. Law: tests/laws/test_page_pool.py."""

from collections.abc import Sequence


class PagePool:
    """Allocates page ids in the order of its free list.

    Freed pages are kept aside. When the free list is too short for an allocation, they are sorted into the list
    (SGLang's allocators with need_sort). Therefore page tables are contiguous on a fresh server, and fragment over
    time. Page 0 is reserved for padding.

    Explicit ids, not a counter: the cost of a transfer depends on which pages are contiguous on both sides, and a
    counter cannot detect a page with two owners.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._list: list[int] | range = range(1, num_pages + 1)
        self._next = 0
        self._freed: list[int] = []

    @property
    def num_listed(self) -> int:
        """Number of pages in the free list. Up to this number, allocating pages one by one gives the same order as all
        at once.
        """
        return len(self._list) - self._next

    def allocate(self, num_pages: int) -> list[int]:
        """Returns the next num_pages free pages. The caller has checked num_free."""
        if num_pages > self.num_free:
            raise RuntimeError(f"asked for {num_pages} pages, {self.num_free} of {self.num_pages} are free")
        stop = self._next + num_pages
        if stop > len(self._list):
            self._list = self.free_pages()
            self._list.sort()
            self._freed, self._next, stop = [], 0, num_pages
        self.num_free -= num_pages
        taken = self._list[self._next : stop]
        self._next = stop
        return taken if isinstance(taken, list) else list(taken)

    def free(self, pages: Sequence[int]) -> None:
        self._freed += pages
        self.num_free += len(pages)
        if self.num_free > self.num_pages:
            raise RuntimeError(f"double free: {self.num_free} of {self.num_pages} pages are free")

    def free_pages(self) -> list[int]:
        """All free pages, in any order."""
        return [*self._list[self._next :], *self._freed]
