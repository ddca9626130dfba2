"""Scatter: staging spans of several writers (source ranks) into the pages of a cache with another head layout, in one
launch.

The kernel does the same as reference.scatter_reference. Like the gather, it reads and writes each payload byte once.

The span is [writer, plane, token, head, head_dim]; writer w sends the w-th equal part of the heads. A tile covers a
token's heads of all writers, so each row of a page is written at once and in full. If writers arrive at different
times, each can be scattered alone: call with that writer's heads and writers=1.
"""

import torch
import triton
import triton.language as tl

from pdkernels.addressing import (
    RUN_TIME,
    plane_pointer,
    request_of,
    table_entry,
    unit_in_pool,
    unit_in_staging,
    words,
)
from pdkernels.copies import tiling as tilings
from pdkernels.copies.staging import StagingCopy
from pdkernels.copies.tiling import Tiling
from pdkernels.layout import Pool


@triton.jit(do_not_specialize=RUN_TIME)
def scatter_kernel(
    table: tl.int64,
    pages: tl.int64,
    spans: tl.int64,
    staging: tl.int64,
    tokens: tl.int32,
    first_byte: tl.int64,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HND: tl.constexpr,
    SLICES: tl.constexpr,
    PLANES: tl.constexpr,
    BATCHED: tl.constexpr,
    UNITS: tl.constexpr,
):
    pages, staging, tokens = request_of(spans, pages, staging, tokens, BATCHED)
    tiles = tl.cdiv(tokens * ROW, UNITS)
    plane_bytes = tokens.to(tl.int64) * (ROW // SLICES * 16)
    plane = tl.program_id(2)
    while plane < PLANES:  # each loop runs once, unless the grid was made smaller than the work
        source = plane_pointer(staging + plane * plane_bytes)
        target = plane_pointer(table_entry(table, plane) + first_byte)
        tile = tl.program_id(0)
        while tile < tiles:
            unit = tile * UNITS + tl.arange(0, UNITS)
            live = unit < tokens * ROW
            from_unit = unit_in_staging(unit, tokens, ROW, SLICES, PLANES)
            to_unit = unit_in_pool(pages, unit, live, ROW, HEAD, HEADS, PAGE, HND)
            moved = tl.load(source + words(from_unit), mask=live[:, None], eviction_policy="evict_first")
            tl.store(target + words(to_unit), moved, mask=live[:, None], eviction_policy="evict_first")
            tile += tl.num_programs(0)
        plane += tl.num_programs(2)


SCATTER = StagingCopy(scatter_kernel, tilings.SCATTER)


def scatter(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    *,
    heads: range | None = None,
    writers: int = 1,
    offset_bytes: int = 0,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Scatters one request from the staging span that the source ranks filled.

    Args:
        pool: target pages.
        pages, tokens, staging, heads, offset_bytes, programs: as for gather.
        writers: number of source ranks that share the heads evenly.

    Raises:
        ValueError: a shape, dtype or offset does not fit.

    """
    ready = SCATTER.ready(pool, heads, writers, tiling, limited=programs is not None, batched=False)
    ready.request(pages, tokens, staging, offset_bytes, programs)


def scatter_batch(
    pool: Pool,
    pages: torch.Tensor,
    spans: torch.Tensor,
    staging: torch.Tensor,
    *,
    longest_tokens: int,
    heads: range | None = None,
    writers: int = 1,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Scatters several requests in one launch. The device reads their lengths, so the launch can be captured in a CUDA
    graph. writers: number of prefill ranks whose heads each span holds. Other arguments: see gather_batch.
    """
    ready = SCATTER.ready(pool, heads, writers, tiling, limited=programs is not None, batched=True)
    ready.batch(pages, spans, staging, longest_tokens, programs)
