"""Decode attention in waves of thread blocks over the SMs of a GPU.

FlashAttention-3 gives each KV head of each request a thread block, and deals its context to several where they leave
SMs idle. As many run at a time as there are SMs. A wave takes as long as the memory takes for all it reads, and no less
than an SM for a block: the last wave of a step is not cheaper for being nearly empty. Measured on an H200, in
experiments/sglang-h200.
"""

from math import ceil
from typing import NamedTuple

from pdsim.cost.model import FRACTION_BITS, DecodeLine

SM_BANDWIDTH = 62e9
"""KV in bytes that one SM of an H200 takes in a second, in experiments/sglang-h200; others are taken to be alike."""
_BLOCKS_PER_SM = 1.1
"""FlashAttention-3 splits contexts while its blocks, by so much more, leave SMs idle (num_splits_heuristic)."""


class AttentionWaves(NamedTuple):
    """Waves of one GPU: it computes all layers of its KV heads."""

    num_sms: int
    num_heads: int
    """KV heads on one GPU."""
    token_ns: float
    """Time of an SM for a token of one KV head."""
    merge_ns: float = 0
    """Added where contexts are split."""

    @property
    def num_requests(self) -> float:
        """Requests of a full wave."""
        return self.num_sms / self.num_heads

    def num_splits(self, num_requests: int) -> int:
        """Parts of a long context."""
        return max(1, ceil(self.num_sms / (_BLOCKS_PER_SM * num_requests * self.num_heads)))

    def merging_ns(self, num_requests: int) -> float:
        return self.merge_ns if self.num_splits(num_requests) > 1 else 0.0

    def line(self, num_requests: int, smooth: DecodeLine) -> DecodeLine:
        """The same step in waves. `smooth` counts what tokens take of the memory.

        Of contexts of equal lengths. What is not distinct within a wave costs the time of SMs alone.
        """
        one_ns = 1 << FRACTION_BITS
        read = (smooth.per_context_token + smooth.per_distinct_token) / self.num_heads
        computed = self.token_ns * one_ns
        num_splits = self.num_splits(num_requests)
        full, rest = divmod(num_requests * self.num_heads * num_splits, self.num_sms)
        sizes = full * [self.num_sms] + ([rest] if rest else [])
        tokens = num_requests * num_splits
        per_token = round(sum(max(size * read, computed) for size in sizes) / tokens)
        per_context_token = round(len(sizes) * computed / tokens)
        base = smooth.base + round(self.merging_ns(num_requests) * one_ns)
        return DecodeLine(base, per_context_token, per_token - per_context_token)
