"""The staging memory of one decode rank: a ring of bytes. Spans of the ring are lent before their bytes are free.

The prefill ranks that write to a span learn the span's position first, and must wait until the bytes are free:
`may_write`. The watermark tells which bytes are free: all before the start of the oldest span that is still lent. Spans
become free in the order of lending. If a span does not fit into the tail of the ring, the tail stays unused in this
round (SGLang 0.5.23, disaggregation/common/staging_handler.py: StagingAllocator, is_watermark_ready).
"""

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """Sizes of staging memory (SGLang 0.5.23, staging_handler.py)."""

    cell_pages: int
    """Maximum pages of a staging cell (KV that is sent through the ring together): the number of pages that one forward
    can compute."""
    buffer_bytes: int | None
    """Size in bytes of a prefill worker's staging buffer. A request whose cells are larger is sent as slices of pages.
    None: every cell fits."""
    ring_bytes: int
    """Size in bytes of a decode rank's ring. A request fails if one of its cells, with the parts of all prefill ranks
    that write to the cell, is larger."""


class Span(NamedTuple):
    """Bytes [offset, end) of the ring in one round through the ring."""

    offset: int
    round: int
    """Number of the round through the ring, from 0. Offsets begin at 0 in each round."""
    end: int


class Watermark(NamedTuple):
    """Start of the oldest lent span; if no span is lent, where the next span will start. All bytes before this place in
    this round, and all earlier rounds, are free.
    """

    round: int = 0
    offset: int = 0


def may_write(span: Span, watermark: Watermark) -> bool:
    """True if the watermark shows that earlier holders of the span's bytes have given all of them back, so that a
    writer may write to the span.
    """
    if span.round == 0 or span.round - 1 < watermark.round:
        return True
    return span.round - 1 == watermark.round and span.end <= watermark.offset


@dataclass(slots=True)
class _Lent:
    key: Hashable
    span: Span
    freed: bool = False


class StagingRing:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.watermark = Watermark()
        self._head = 0
        self._round = 0
        self._lent: deque[_Lent] = deque()
        """Spans in the order of lending. A freed span stays included while an earlier span is still lent."""
        self._live: dict[Hashable, _Lent] = {}

    @property
    def num_live_bytes(self) -> int:
        return sum(lent.span.end - lent.span.offset for lent in self._live.values())

    def __contains__(self, key: Hashable) -> bool:
        """True if `key` holds a part of the ring's memory."""
        return key in self._live

    def span(self, key: Hashable) -> Span:
        """Returns the part of the ring's memory that `key` holds. Raises KeyError if `key` holds none."""
        return self._live[key].span

    def assign(self, key: Hashable, num_bytes: int) -> Span | None:
        """Lends a span of the ring. The caller gives the span back with `free` and the same key. Earlier holders may
        still use the span's bytes: the writer must wait until `may_write` is True. None: num_bytes exceeds the whole
        ring.
        """
        assert key not in self._live, f"{key} holds a span already"
        if num_bytes > self.num_bytes:
            return None
        if num_bytes > self.num_bytes - self._head:
            self._round += 1
            self._head = 0
        span = Span(self._head, self._round, self._head + num_bytes)
        self._head = span.end
        lent = _Lent(key, span)
        self._lent.append(lent)
        self._live[key] = lent
        return span

    def free(self, key: Hashable) -> Watermark:
        """Frees the span that was lent under `key`. Returns the watermark: the place in the ring up to which all spans
        are free. The watermark moves only when the oldest lent span is freed.
        """
        self._live.pop(key).freed = True
        while self._lent and self._lent[0].freed:
            self._lent.popleft()
        if self._lent:
            oldest = self._lent[0].span
            self.watermark = Watermark(oldest.round, oldest.offset)
        else:
            self._round += 1
            self._head = 0
            self.watermark = Watermark(self._round, 0)
        return self.watermark
