"""Interfaces of cost models, and the linear functions that describe decode steps."""

from typing import Final, NamedTuple, Protocol

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.system.memory import Layout

FRACTION_BITS: Final = 20
"""Number of binary places in the times of decode steps: the times are counted in units of 2**-20 ns, so that the time
per KV token is not rounded to 0.
"""


class DecodeLine(NamedTuple):
    """Duration of a decode step of a fixed batch size: a line over the numbers of context tokens (KV tokens that the
    batch reads) and of distinct context tokens. All values are in units of 2**-20 ns.
    """

    base: int
    """Time of the step in 2**-20 ns, without the parts that grow with KV tokens."""
    per_context_token: int
    """Additional time of the step for each context token. A token that several requests read counts once for each of
    them.
    """
    per_distinct_token: int
    """Additional time of the step for each distinct context token. A token that several requests share counts once. If
    thread blocks of attention run in several waves (AttentionWaves), the token counts once per wave.
    """

    def stretched(self, factor: float) -> "DecodeLine":
        return DecodeLine(*(round(part * factor) for part in self))

    def later(self, delay_ns: int) -> "DecodeLine":
        """Returns the line of a step that takes delay_ns longer."""
        return DecodeLine(self.base + (delay_ns << FRACTION_BITS), self.per_context_token, self.per_distinct_token)

    def plus(self, other: "DecodeLine", times: int = 1) -> "DecodeLine":
        """Returns the sum of this line and `times` times the other line."""
        return DecodeLine(*(part + times * added for part, added in zip(self, other, strict=True)))

    @classmethod
    def of_ns(cls, base_ns: float, per_context_token_ns: float, per_distinct_token_ns: float) -> "DecodeLine":
        one_ns = 1 << FRACTION_BITS
        return cls(round(base_ns * one_ns), round(per_context_token_ns * one_ns), round(per_distinct_token_ns * one_ns))


NO_TIME = DecodeLine(0, 0, 0)
"""A decode step that takes no time, to which times are added."""

Terms = dict[str, float]
"""Terms of a duration in ns, by name, in the order in which they are printed."""


class CostModel(Protocol):
    """Durations of the steps of an instance or, with pipeline stages, of its largest stage. A duration depends on the
    step, and may depend on the step's start and on earlier steps of the same model.
    """

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        """Duration in ns of a forward that begins at start_ns, at least 1. The caller makes one call per forward, in
        order.
        """

    def decode_line(self, num_requests: int) -> DecodeLine:
        """Duration of a decode step with num_requests requests, as a line over the KV tokens that the batch reads.
        Equal arguments give equal results.
        """

    def prefill_terms(self, step: PrefillStep) -> Terms:
        """Terms of a forward's duration on a GPU that was idle before."""

    def decode_terms(self, num_requests: int) -> Terms:
        """Times in ns, by name, that add up to the part of a decode step's duration that does not depend on the amount
        of KV.
        """


class CostSettings(Protocol):
    """Settings of a cost model in a scenario. `model` makes the cost model of an instance from its layout."""

    def model(self, layout: Layout) -> CostModel: ...


LEAST_TILES = 4
"""Matrix kernels use their largest tiles (`tiled`) only for a forward with more tokens than this number of largest
tiles holds. They compute shorter forwards in smaller tiles."""


def tiled(num_tokens: int, tile_tokens: int) -> int:
    """Returns the number of tokens that matrix products compute for a forward of num_tokens tokens: whole tiles of
    tile_tokens tokens. For a forward of at most LEAST_TILES tiles: num_tokens, because kernels compute it in smaller
    tiles.

    SGLang's kernels for fp8 on Hopper compute tiles of 256 tokens from 1,025 tokens on (sgl-kernel 0.4,
    csrc/gemm/fp8_gemm_kernel.cu, sm90_fp8_dispatch_shape). vLLM's kernels have tiles of this size, too
    (scaled_mm_sm90_fp8_dispatch.cuh).
    """
    return num_tokens if num_tokens <= LEAST_TILES * tile_tokens else -(-num_tokens // tile_tokens) * tile_tokens


def window_pairs(chunk: PrefillChunk, window_tokens: int) -> float:
    """Number of pairs of tokens in the attention of a chunk, if each new token attends only to the last window_tokens
    tokens. A pair is a new token with one token to which it attends.
    """
    first, last = chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens
    beyond, before = max(0, last - window_tokens), max(0, first - window_tokens)
    return chunk.num_pairs - (beyond * beyond - before * before) / 2
