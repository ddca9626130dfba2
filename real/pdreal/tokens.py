"""Token ids of a workload's prompts: the same stream and offset is the same token, whoever asks."""

from collections.abc import Sequence

from pdsim.core.sequence import Spans, TokenIds

_MASK = (1 << 64) - 1


def token_at(stream: int, offset: int, vocab_size: int) -> int:
    """SplitMix64's finalizer over the pair: fixed, and spread over the vocabulary."""
    z = (stream * 0x9E3779B97F4A7C15 + offset * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return (z ^ (z >> 31)) % vocab_size


class Tokens:
    """Spans as token ids. Outputs are what the model said, once that is known: a session's next turn repeats them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._said: dict[tuple[int, int], int] = {}

    def ids(self, spans: Spans) -> TokenIds:
        said, size = self._said, self._vocab_size
        return TokenIds(
            said[stream, i] if (stream, i) in said else token_at(stream, i, size)
            for stream, offset, length in spans.spans
            for i in range(offset, offset + length)
        )

    def learn(self, output: Spans, ids: Sequence[int]) -> None:
        """These tokens were generated where the workload has this output."""
        places = [(stream, i) for stream, offset, length in output.spans for i in range(offset, offset + length)]
        self._said.update(zip(places, ids, strict=False))
