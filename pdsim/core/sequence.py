"""Token sequences: spans of named streams in simulation, token ids in real mode. Both implement `TokenSequence`.

`UnseenOutput` is a prompt with placeholders for output tokens that are not known, such as those of a running request.
"""

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable
from typing import Any

StreamSpan = tuple[int, int, int]
"""(stream, offset, length): tokens [offset, offset + length) of a stream, a numbered, endless sequence of tokens that
stand for a text. Two tokens are equal if their streams and their offsets are equal."""


class Spans:
    """A sequence made of spans, so that a 55,000-token prompt needs only a few objects.

    Adjoining spans are joined, so that equal sequences have equal spans.
    """

    __slots__ = ("_ends", "_length", "spans")

    def __init__(self, spans: Iterable[StreamSpan]) -> None:
        joined: list[StreamSpan] = []
        ends: list[int] = []
        length = 0
        for stream, offset, n in spans:
            if n <= 0:
                continue
            if joined and (before := joined[-1])[0] == stream and before[1] + before[2] == offset:
                joined[-1] = (stream, before[1], before[2] + n)
                ends[-1] += n
            else:
                joined.append((stream, offset, n))
                ends.append(length + n)
            length += n
        self.spans = tuple(joined)
        self._ends = tuple(ends) if len(ends) > 1 else ()
        """End of each span, in tokens from the beginning of the sequence. Empty if the sequence has no span, or one
        span, the most frequent case."""
        self._length = length

    @classmethod
    def of(cls, stream: int, length: int) -> "Spans":
        """Returns the first `length` tokens of a stream. stream: number of the stream (see StreamSpan)."""
        return cls(((stream, 0, length),))

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"Spans({list(self.spans)})"

    def page_key(self, start: int, size: int) -> Hashable:
        i = bisect_right(self._ends, start) if start else 0
        end = self._end(i)
        if start + size <= end:
            stream, offset, length = self.spans[i]
            return (stream, start + offset + length - end)
        return tuple(self._slice(start, start + size))

    def common_prefix(self, start: int, other: "Spans", other_start: int) -> int:
        limit = min(self._length - start, other._length - other_start)
        n = 0
        i = bisect_right(self._ends, start) if start else 0
        j = bisect_right(other._ends, other_start) if other_start else 0
        while n < limit:
            mine, theirs = self._end(i) - start, other._end(j) - other_start
            stream, offset, length = self.spans[i]
            other_stream, other_offset, other_length = other.spans[j]
            if stream != other_stream or offset + length - mine != other_offset + other_length - theirs:
                return n
            n = min(mine, theirs)
            i += n == mine
            j += n == theirs
        return limit

    def _end(self, i: int) -> int:
        return self._ends[i] if self._ends else self._length

    def then(self, other: "Spans") -> "Spans":
        return Spans((*self.spans, *other.spans))

    def first(self, num_tokens: int) -> "Spans":
        return Spans(self._slice(0, min(num_tokens, self._length)))

    def _slice(self, start: int, stop: int) -> list[StreamSpan]:
        pieces = []
        i = bisect_right(self._ends, start)
        while start < stop:
            (stream, offset, length), end = self.spans[i], self._end(i)
            n = min(stop, end) - start
            pieces.append((stream, offset + length - end + start, n))
            start += n
            i += 1
        return pieces


class TokenIds:
    """A sequence of real token ids, stored as bytes of 32-bit integers, so that comparing slices is as fast as
    comparing memory.
    """

    __slots__ = ("_bytes",)

    def __init__(self, ids: Iterable[int] = (), *, data: bytes | None = None) -> None:
        self._bytes = array("I", ids).tobytes() if data is None else data

    def __bytes__(self) -> bytes:
        return self._bytes

    def __len__(self) -> int:
        return len(self._bytes) // 4

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __repr__(self) -> str:
        return f"TokenIds({self.ids()})"

    def ids(self) -> list[int]:
        return memoryview(self._bytes).cast("I").tolist()

    def page_key(self, start: int, size: int) -> Hashable:
        return self._bytes[4 * start : 4 * (start + size)]

    def common_prefix(self, start: int, other: "TokenIds", other_start: int) -> int:
        low, high = 0, min(len(self) - start, len(other) - other_start)
        if self._same(start, other, other_start, high):
            return high
        while high - low > 1:  # equal up to low, different before high
            middle = (low + high) // 2
            if self._same(start + low, other, other_start + low, middle - low):
                low = middle
            else:
                high = middle
        return low

    def then(self, other: "TokenIds") -> "TokenIds":
        return TokenIds(data=self._bytes + other._bytes)

    def _same(self, start: int, other: "TokenIds", other_start: int, n: int) -> bool:
        mine = memoryview(self._bytes)[4 * start : 4 * (start + n)]
        return mine == memoryview(other._bytes)[4 * other_start : 4 * (other_start + n)]


class UnseenOutput:
    """A prompt, followed by placeholders for the outputs of one request. Pages with placeholders of different requests
    have different keys (page_key).
    """

    __slots__ = ("_length", "_num_prompt_tokens", "_prompt", "_request_id")

    def __init__(self, prompt: Any, request_id: int, num_output_tokens: int) -> None:
        self._prompt = prompt
        self._request_id = request_id
        self._num_prompt_tokens = len(prompt)
        self._length = len(prompt) + num_output_tokens

    def __len__(self) -> int:
        return self._length

    def page_key(self, start: int, size: int) -> Hashable:
        if start + size <= self._num_prompt_tokens:
            key: Hashable = self._prompt.page_key(start, size)
            return key
        return ("unseen", self._request_id, start)

    def common_prefix(self, start: int, other: Any, other_start: int) -> int:
        """Number of equal tokens from `start` in this sequence and from other_start in `other`. The caller has checked
        that the page from `start` and the page from other_start have equal keys. If `other` is an UnseenOutput, too,
        all tokens count as equal up to the end of the shorter sequence.
        """
        if isinstance(other, UnseenOutput):
            return min(self._length - start, other._length - other_start)
        num_tokens: int = self._prompt.common_prefix(start, other, other_start)
        return num_tokens

    def then(self, other: Any) -> Any:
        raise TypeError("no token can follow outputs whose tokens are unknown")
