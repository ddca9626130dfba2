"""Chunk sizes of a long prompt on an instance with pipeline stages."""

from math import sqrt

from pdsim.dataclass import dataclass

SMOOTHNESS = 0.75
"""A chunk's size is the weighted mean of two sizes: the size that keeps chunk times equal, with this weight, and the
first chunk's size, with weight 1 - 0.75 (SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR)."""
LEAST_SHARE = 4
"""A chunk has at least the first chunk's size divided by this number, before its size is rounded down to a multiple of
the page size (of 64 tokens, if pages are smaller) and limited by max_tokens and context_tokens."""
LEAST_ALIGNMENT, MARGIN_TOKENS = 64, 100


@dataclass(frozen=True)
class ChunkSizer:
    """Sizes the chunks of a long prompt so that each chunk takes equally long in a pipeline stage (SGLang's
    DynamicChunkSizer).

    A prompt of n tokens is assumed to take the time quadratic * n^2 + linear * n. The unit does not matter, and a
    constant term would not change the sizes. first_tokens: size of the first chunk. max_tokens: maximum size of a
    chunk.
    """

    quadratic: float
    linear: float
    first_tokens: int
    max_tokens: int
    context_tokens: int
    """Context length of the model in tokens."""
    page_size: int

    def num_tokens(self, num_before: int) -> int:
        """Size in tokens of a prompt's next chunk, above 0. The prompt may have fewer tokens left. num_before: number
        of the prompt's tokens before this chunk, above 0.
        """
        if self.quadratic <= 0:
            return self.first_tokens
        alignment = max(self.page_size, LEAST_ALIGNMENT)
        chunk = self.first_tokens + SMOOTHNESS * (self.equal_tokens(num_before) - self.first_tokens)
        aligned = max(int(chunk), self.first_tokens // LEAST_SHARE) // alignment * alignment
        most = min(self.max_tokens, self.context_tokens - num_before - MARGIN_TOKENS)
        found = min(max(aligned, alignment), most) // alignment * alignment
        return found if found > 0 else self.first_tokens

    def equal_tokens(self, num_before: int) -> float:
        """Size in tokens at which the chunk after num_before tokens takes as long as the first chunk."""
        first, slope = self.first_tokens, 2 * self.quadratic * num_before + self.linear
        target = self.quadratic * first * first + self.linear * first
        return (sqrt(slope * slope + 4 * self.quadratic * target) - slope) / (2 * self.quadratic)
