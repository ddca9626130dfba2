"""What a prefill instance sends and when: one cursor per request that only moves forward."""

from collections.abc import Sequence
from typing import NamedTuple


class TransferUnit(NamedTuple):
    """A command: move a part of a prompt's KV, queued behind the earlier units of this pair of instances.

    Pages are ids on both sides; bytes and descriptors are those of one pair of ranks (core/wire.py).
    """

    request_id: int
    source: str
    target: str
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    num_descriptors: int
    planned_ns: int
    is_last: bool
    first_token_ends: bool = False
    """Travels with the last unit, as the first token does."""
    cell: int | None = None
    """Goes through staging memory, as this cell of the request's grid."""
    after_layers: tuple[int, int] | None = None
    """Waits until this step has computed this group of layers: (step_id, group)."""


class Piece(NamedTuple):
    """Pages that one unit moves, and the cell of the grid that they lie in."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    cell: int


class SendCursor:
    """Cuts one request's KV into pieces.

    Tokens before num_sent_tokens are sent, or were cached on the decode side. A piece that is not the last ends on the
    grid, counted from the first token sent, and is never empty; the last is always sent, for it carries the first
    token. No piece reaches across a cell of the grid. Without staging a cell is a page, and cells are sent together.
    """

    __slots__ = ("_cell_pages", "_page_size", "_start_pages", "_target_pages", "num_sent_tokens")

    def __init__(
        self, num_cached_tokens: int, target_pages: tuple[int, ...], page_size: int, cell_pages: int | None = None
    ) -> None:
        self.num_sent_tokens = num_cached_tokens
        self._start_pages = num_cached_tokens // page_size
        self._target_pages = target_pages
        self._page_size = page_size
        self._cell_pages = cell_pages

    @property
    def is_staged(self) -> bool:
        return self._cell_pages is not None

    def cell_sizes(self) -> list[int]:
        """Pages of each cell of the grid, from the first token sent to the prompt's end."""
        total, cell = len(self._target_pages), self._cell_pages or len(self._target_pages)
        return [min(cell, total - start) for start in range(0, total, cell)] if total else []

    def advance(self, end_tokens: int, table: Sequence[int], *, is_last: bool) -> list[Piece]:
        """The next pieces, up to end_tokens; none when there is nothing to send yet."""
        page_size, base = self._page_size, self._start_pages
        if not is_last:
            cell_tokens = page_size * (self._cell_pages or 1)
            end_tokens -= (end_tokens - base * page_size) % cell_tokens
            if end_tokens <= self.num_sent_tokens:
                return []
        stop = -(-end_tokens // page_size)
        first = self.num_sent_tokens // page_size if end_tokens > self.num_sent_tokens else stop
        self.num_sent_tokens = end_tokens
        if self._cell_pages is None or first >= stop:
            return [self._piece(first, stop, table, 0)]
        cells = range((first - base) // self._cell_pages, -(-(stop - base) // self._cell_pages))
        bounds = [(base + cell * self._cell_pages, cell) for cell in cells]
        return [
            self._piece(max(first, start), min(stop, start + self._cell_pages), table, cell) for start, cell in bounds
        ]

    def _piece(self, first: int, stop: int, table: Sequence[int], cell: int) -> Piece:
        target = self._target_pages[first - self._start_pages : stop - self._start_pages]
        source = tuple(table[first:stop])
        assert len(source) == len(target)
        return Piece(source, target, cell)


UNGRANTED = SendCursor(0, (), 1)
"""Of a request that decode has granted no pages. Never moved."""
