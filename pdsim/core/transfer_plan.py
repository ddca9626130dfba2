"""What a prefill instance sends and when: one cursor per request that only moves forward."""

from collections.abc import Sequence
from typing import NamedTuple


class TransferUnit(NamedTuple):
    """A command: move a part of a prompt's KV, queued behind the earlier units of this pair of instances.

    Pages are ids on both sides; bytes and descriptors are those of one pair of ranks (core/wire.py). After a request's
    last unit the driver answers with KvArrived and KvSent.
    """

    request_id: int
    source: str
    target: str
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    num_descriptors: int
    is_last: bool
    first_token_ends: bool = False
    """Travels with the last unit, as the first token does."""


Pages = tuple[tuple[int, ...], tuple[int, ...]]


class SendCursor:
    """Cuts one request's KV into units.

    Tokens before num_sent_tokens are sent, or were cached on the decode side. A unit that is not the last ends on a
    page boundary and is never empty; the last is always sent, for it carries the first token.
    """

    __slots__ = ("_page_size", "_start_pages", "_target_pages", "num_sent_tokens")

    def __init__(self, num_cached_tokens: int, target_pages: tuple[int, ...], page_size: int) -> None:
        self.num_sent_tokens = num_cached_tokens
        self._start_pages = num_cached_tokens // page_size
        self._target_pages = target_pages
        self._page_size = page_size

    def advance(self, end_tokens: int, table: Sequence[int], *, is_last: bool) -> Pages | None:
        """Source and target pages of the next unit, up to end_tokens; None when there is nothing to send yet."""
        if not is_last:
            end_tokens -= end_tokens % self._page_size
            if end_tokens <= self.num_sent_tokens:
                return None
        first, stop = self.num_sent_tokens // self._page_size, -(-end_tokens // self._page_size)
        self.num_sent_tokens = end_tokens
        target = self._target_pages[first - self._start_pages : stop - self._start_pages]
        source = tuple(table[first:stop])
        assert len(source) == len(target)
        return source, target
