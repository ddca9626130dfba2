"""Gather: the KV of some heads, all layers, from scattered pages into one contiguous staging span, in one launch.

Computes reference.gather_reference. Bytes to move, for T tokens, P planes and R bytes of moved heads per token and
plane: T * P * R bytes read and as many written, plus 4 bytes of page number per page, which stay in L2. At the copy
bandwidth of the device, 2 * T * P * R / bandwidth is the floor.

The staging span is [slice, plane, token, head, head_dim]: one slice per target rank, each contiguous, so that one
launch serves several target ranks, and each slice is one transfer. Planes are K of all layers, then V of all layers.
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
def gather_kernel(
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
        source = plane_pointer(table_entry(table, plane) + first_byte)
        target = plane_pointer(staging + plane * plane_bytes)
        tile = tl.program_id(0)
        while tile < tiles:
            unit = tile * UNITS + tl.arange(0, UNITS)
            live = unit < tokens * ROW
            from_unit = unit_in_pool(pages, unit, live, ROW, HEAD, HEADS, PAGE, HND)
            to_unit = unit_in_staging(unit, tokens, ROW, SLICES, PLANES)
            moved = tl.load(source + words(from_unit), mask=live[:, None], eviction_policy="evict_first")
            tl.store(target + words(to_unit), moved, mask=live[:, None], eviction_policy="evict_first")
            tile += tl.num_programs(0)
        plane += tl.num_programs(2)


GATHER = StagingCopy(gather_kernel, tilings.GATHER)


def gather(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    *,
    heads: range | None = None,
    slices: int = 1,
    offset_bytes: int = 0,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Gathers one request into a staging span.

    Args: pool: source pages. pages: int32 [ceil(tokens / page_size) or more] on the pool's device, in the order of the
    prompt; with pages of one token these are token slots. tokens: number of tokens; the last page may be used in part.
    staging: uint8 [bytes] on the pool's device; see staging_bytes. heads: heads of the pool's rank; None: all. slices:
    number of target ranks that share the heads evenly. offset_bytes: beginning of the span in staging, a multiple of
    16. programs: at most this many programs (thus streaming multiprocessors) at a time; no limit if None.

    Raises:
        ValueError: a shape, dtype or offset does not fit.

    """
    ready = GATHER.ready(pool, heads, slices, tiling, limited=programs is not None, batched=False)
    ready.request(pages, tokens, staging, offset_bytes, programs)


def gather_batch(
    pool: Pool,
    pages: torch.Tensor,
    spans: torch.Tensor,
    staging: torch.Tensor,
    *,
    longest_tokens: int,
    heads: range | None = None,
    slices: int = 1,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Gathers several requests in one launch. The device reads their lengths, so the launch can be captured in a CUDA
    graph.

    Args:
        pages: int32 [n], the page lists of all requests.
        spans: int64 [requests, 3]: index of the first page in pages, tokens, offset in staging in bytes.
        longest_tokens: upper bound of a request's tokens; it sizes the grid, not the work.
        programs: maximum number of programs per request; no limit if None.

    The other arguments are those of `gather`.

    Raises:
        ValueError: a shape or dtype does not fit.

    """
    ready = GATHER.ready(pool, heads, slices, tiling, limited=programs is not None, batched=True)
    ready.batch(pages, spans, staging, longest_tokens, programs)
