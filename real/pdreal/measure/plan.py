"""Plans of measurements: all shapes, or a few for a quick test."""

from dataclasses import dataclass
from itertools import product

from pdreal.measure.forwards import DecodeCase, PrefillCase, SustainedCase
from pdreal.rank.graphs import SIZES

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    prefill: tuple[PrefillCase, ...]
    """Shapes of prefill forwards."""
    sustained: tuple[SustainedCase, ...]
    """Shapes of prefill forwards that are repeated without pause, on GPUs."""
    decode: tuple[DecodeCase, ...]
    """Shapes of decode steps."""
    copied_pages: tuple[int, ...]
    """Numbers of pages that one gather or scatter copies."""
    transferred_bytes: tuple[int, ...]
    """Sizes of transfers in bytes. Each size is measured with each number of descriptors for which a descriptor has at
    least 1024 bytes. Pushes are measured with one descriptor only."""
    descriptors: tuple[int, ...]
    """Numbers of descriptors into which the measured transfers are divided."""
    stored_pages: tuple[int, ...]
    """Numbers of pages in one operation of storage (a lookup, a read or a write), each of which is measured."""
    served_batches: tuple[int, ...]
    """Numbers of requests that are served together, from prefill to their last token."""
    served_tokens: int
    """Number of prompt tokens of each request of served_batches."""
    served_outputs: int
    """Number of output tokens of each request of served_batches. The number is so large that the first request still
    decodes when the last prompt is computed. All requests then decode together for a while.
    """
    seconds: float
    """Time in s to spend on each row. At least three repeats are made."""


_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
"""Batch sizes to measure: those of CUDA graphs, and some between them."""
_WITHIN = 16
"""Number of tokens by which a measured prompt is shorter than the CUDA graph in which it runs. Slightly shorter and
longer repeats then run in the same graph."""
_LENGTHS = (*(size - _WITHIN for size in SIZES[1:]), 2250, 2500, 2750, 3030, 3700, 5300, 6700)
"""Prompt lengths to measure, in tokens. Libraries choose kernels by size, so there is one length for each CUDA graph
except the smallest, which other rows measure. The last lengths run without graphs. As in a run, lengths are no
multiples of the tiles of matrix products.
"""
FULL = Plan(
    prefill=(
        *(PrefillCase(1, new) for new in _LENGTHS),
        *(PrefillCase(1, new, context) for context, new in product((0, 2048, 8192), (2**k for k in range(7, 14)))),
        *(PrefillCase(1, new, context) for new, context in product((16, 32), (0, 128, 512))),
        *(PrefillCase(prompts, 64, context) for prompts, context in product((1, 2, 4, 8), (0, 512, 2048, 8192))),
        *(PrefillCase(prompts, 256, context) for prompts, context in product((2, 4, 8), (0, 2048, 4096))),
        *(PrefillCase(*case) for case in ((16, 128), (4, 512), (16, 512), (8, 1024), (2, 4096))),
        *(PrefillCase(*case) for case in ((1, 1024, 16384), (16, 128, 2048), (4, 1024, 2048), (8, 512, 8192))),
    ),
    sustained=tuple(SustainedCase(prompts, 1024) for prompts in (1, 4, 8)),
    decode=(
        *(DecodeCase(batch, context) for batch in _BATCHES for context in (150, 300, 1100, 4200)),
        *(DecodeCase(batch, context) for batch, context in product((1, 2, 4, 8, 20, 32), (2500, 16200))),
        *(DecodeCase(batch, 700, longest) for batch, longest in product((4, 10, 32), (4200, 16200, 32000))),
    ),
    copied_pages=(1, 4, 16, 64, 256),
    transferred_bytes=(64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB),
    descriptors=(1, 16, 256, 4096, 32768),
    stored_pages=(1, 4, 16, 64, 128),
    served_batches=(1, 8, 16, 24, 64),
    served_tokens=256,
    served_outputs=320,
    seconds=0.2,
)
QUICK = Plan(
    prefill=tuple(PrefillCase(*case) for case in ((1, 128), (1, 512), (1, 1024), (1, 512, 1024), (4, 128))),
    sustained=(SustainedCase(1, 512),),
    decode=tuple(DecodeCase(*case) for case in product((1, 4, 16), (256, 1024))),
    copied_pages=(1, 4),
    transferred_bytes=(64 * _KIB, _MIB),
    descriptors=(1, 16),
    stored_pages=(1, 16),
    served_batches=(1, 8),
    served_tokens=128,
    served_outputs=160,
    seconds=0.02,
)
