"""Sizes the chunks of a long prompt so that all take equally long in a pipeline stage (SGLang's DynamicChunkSizer)."""

from dataclasses import dataclass
from math import sqrt

SMOOTHNESS = 0.75
"""Share of the step from the first chunk's size to that of equal time (SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR)."""
LEAST_SHARE = 4
"""No chunk is less than this part of the first one."""
LEAST_ALIGNMENT, MARGIN_TOKENS = 64, 100


@dataclass(frozen=True)
class ChunkSizer:
    """A prompt of n tokens takes quadratic n^2 + linear n, and a constant time that makes no difference to sizes."""

    quadratic: float
    linear: float
    first_tokens: int
    max_tokens: int
    context_tokens: int
    """The model's context."""
    page_size: int

    def num_tokens(self, num_before: int) -> int:
        """Tokens of the next forward of a prompt that has num_before computed: more than 0."""
        if self.quadratic <= 0:
            return self.first_tokens
        alignment = max(self.page_size, LEAST_ALIGNMENT)
        chunk = self.first_tokens + SMOOTHNESS * (self.equal_tokens(num_before) - self.first_tokens)
        aligned = max(int(chunk), self.first_tokens // LEAST_SHARE) // alignment * alignment
        most = min(self.max_tokens, self.context_tokens - num_before - MARGIN_TOKENS)
        found = min(max(aligned, alignment), most) // alignment * alignment
        return found if found > 0 else self.first_tokens

    def equal_tokens(self, num_before: int) -> float:
        """Tokens behind num_before that take as long as the first chunk."""
        first, slope = self.first_tokens, 2 * self.quadratic * num_before + self.linear
        target = self.quadratic * first * first + self.linear * first
        return (sqrt(slope * slope + 4 * self.quadratic * target) - slope) / (2 * self.quadratic)
