"""Token ids of a workload's prompts: the same stream and offset is the same token, whoever asks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdsim.core.sequence import Spans, StreamSpan, TokenIds

_MASK = (1 << 64) - 1
_STEP = 0xD1B54A32D192ED03


def tokens_at(span: StreamSpan, vocab_size: int) -> NDArray[np.int32]:
    """SplitMix64's finalizer over stream and offset: fixed, and spread over the vocabulary."""
    begin = (span.stream * 0x9E3779B97F4A7C15 + span.offset * _STEP + 0x8CB92BA72F3D8DD7) & _MASK
    z = np.uint64(begin) + np.arange(span.length, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(vocab_size)).astype(np.int32)


class Tokens:
    """Spans as token ids. Outputs are what the model said, once that is known: a session's next turn repeats them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._said: dict[int, list[tuple[int, NDArray[np.int32]]]] = {}
        """By stream: where something was said, and what."""

    def ids(self, spans: Spans) -> TokenIds:
        return TokenIds(data=b"".join(self._tokens(span).tobytes() for span in spans.spans))

    def learn(self, output: Spans, ids: Sequence[int]) -> None:
        """These tokens were generated where the workload has this output."""
        begin = 0
        for stream, offset, length in output.spans:
            said = np.array(ids[begin : begin + length], np.int32)
            self._said.setdefault(stream, []).append((offset, said))
            begin += length

    def _tokens(self, span: StreamSpan) -> NDArray[np.int32]:
        tokens = tokens_at(span, self._vocab_size)
        for offset, said in self._said.get(span.stream, ()):
            first, stop = max(offset, span.offset), min(offset + len(said), span.offset + span.length)
            if first < stop:
                tokens[first - span.offset : stop - span.offset] = said[first - offset : stop - offset]
        return tokens
