"""The staging memory of one decode rank: a ring of bytes that is lent before it is free.

The writer of a span may learn the span's position before these bytes are free. The writer must wait until the
watermark, the start of the oldest live span that it knows of, has passed: `may_write`. Spans are freed in the order of
lending. If a span does not fit into the tail of the ring, the tail is unused in this round (SGLang 0.5.23,
disaggregation/common/staging_handler.py: StagingAllocator, is_watermark_ready).
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes [offset, end) of the ring in one round."""

    offset: int
    round: int
    end: int


class Watermark(NamedTuple):
    """Start of the oldest live span: everything before it in this round, and all earlier rounds, is free."""

    round: int = 0
    offset: int = 0


def may_write(span: Span, watermark: Watermark) -> bool:
    """True if the watermark shows that no live bytes lie under the span."""
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
        """Spans in the order of lending. A span that was freed behind a live span is still included."""
        self._live: dict[Hashable, _Lent] = {}

    @property
    def num_live_bytes(self) -> int:
        return sum(lent.span.end - lent.span.offset for lent in self._live.values())

    def __contains__(self, key: Hashable) -> bool:
        """True if a span is lent under this key."""
        return key in self._live

    def span(self, key: Hashable) -> Span:
        """The span that was lent under a key."""
        return self._live[key].span

    def assign(self, key: Hashable, num_bytes: int) -> Span | None:
        """Lends bytes that may still be in use. None: the span is larger than the whole ring."""
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
        """Frees a span. The watermark moves only when the oldest live span is freed."""
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
