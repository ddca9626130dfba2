"""A page pool made of two sets. tests/laws/test_page_pool.py compares pdsim with this module."""


class NaivePagePool:
    """Hands out the lowest of the listed page ids. Freed pages are listed again only when too few pages are listed."""

    def __init__(self, num_pages: int) -> None:
        self.listed = set(range(1, num_pages + 1))
        self.freed: set[int] = set()

    def allocate(self, num_pages: int) -> list[int]:
        if num_pages > len(self.listed):
            self.listed, self.freed = self.listed | self.freed, set()
        pages = sorted(self.listed)[:num_pages]
        self.listed -= set(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        self.freed |= set(pages)
