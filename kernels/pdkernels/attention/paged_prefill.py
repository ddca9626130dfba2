"""Causal attention of prompts packed one after another over the pages of their KV, for CUDA graphs.

The result is that of reference.packed_prefill_reference, but keys and values are read from pages. A tile consists of
neighbouring new tokens of one sequence. Programs read the list of tiles on the device, and each takes tiles and query
heads in turn, so the same launch fits all batches of prompts.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdkernels.addressing import aligned
from pdkernels.attention.prefill import HEAD_DIMS, LOG2_E, attend, first_and_masked, in_sight
from pdkernels.launch import TYPES, Launcher

TILE_TOKENS = 64
"""Maximum number of new tokens in a tile."""
_TOKENS, _TOKENS_FP32 = 64, 32
"""Context tokens that a program reads per step of its loop: for queries in 16-bit types, and in fp32. Of 13 tilings
these were the fastest on an H200, with 128 to 2,048 tokens and contexts to 8,192."""
_PROGRAMS = 3
"""Number of programs that are launched per multiprocessor. A multiprocessor runs two at a time; the third begins when
one of them ends.
"""


class Tile(NamedTuple):
    """Neighbouring new tokens of one sequence. A tile may also be padding, for which the output is 0."""

    row: int
    """Row of the tile's first token among all new tokens."""
    num_tokens: int
    num_before: int
    """Number of tokens of the sequence before the tile. -1: the tile is padding."""
    first_page: int
    """Index in `pages` at which the sequence's page list begins."""


def prefill_tiles(
    num_new: Iterable[int], num_context: Iterable[int], num_pages: Iterable[int], size: int
) -> list[Tile]:
    """Returns the tiles of sequences, and of padding up to a size. Tiles with the most work come first.

    Args:
        num_new: number of new tokens of each sequence, in the order of packing.
        num_context: tokens of each sequence before its new ones.
        num_pages: pages of each sequence; page lists lie one behind another.
        size: number of new tokens of all sequences, with padding.

    """
    tiles, row, page = [], 0, 0
    for new, context, pages in zip(num_new, num_context, num_pages, strict=True):
        tiles += [Tile(row + at, min(TILE_TOKENS, new - at), context + at, page) for at in range(0, new, TILE_TOKENS)]
        row, page = row + new, page + pages
    tiles.sort(key=lambda tile: tile.num_before + tile.num_tokens, reverse=True)
    return tiles + [Tile(at, min(TILE_TOKENS, size - at), -1, 0) for at in range(row, size, TILE_TOKENS)]


@triton.jit(do_not_specialize=("query", "key_pages", "value_pages", "output", "tiles", "num_tiles", "pages"))
def paged_prefill_kernel(
    query: tl.int64,
    key_pages: tl.int64,
    value_pages: tl.int64,
    output: tl.int64,
    tiles: tl.int64,
    num_tiles: tl.int64,
    pages: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Computes the attention of all tiles. An item of work is one tile with one query head; each program computes every
    num_programs-th item. Arguments of type int64 are addresses of the tensors of `paged_prefill`.

    TYPE: data type of queries and output. NARROW: data type of the pages. HEADS: query heads. GROUP: query heads per KV
    head. PAGE: tokens per page. ROWS: maximum number of new tokens of a tile. TOKENS: tokens of KV per block. WINDOW:
    as `window` of `paged_prefill`.
    """
    ROW: tl.constexpr = HEADS // GROUP * DIM
    work = tl.load(num_tiles.to(tl.pointer_type(tl.int32))) * HEADS
    offset, dim, step = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0)):
        head = item % HEADS
        tile = tiles.to(tl.pointer_type(tl.int32)) + item // HEADS * 4
        first, rows = tl.load(tile).to(tl.int64), tl.load(tile + 1)
        before = tl.load(tile + 2)
        table = pages.to(tl.pointer_type(tl.int32)) + tl.load(tile + 3)
        live = (offset < rows)[:, None]
        q = tl.load(
            aligned(query, TYPE) + (first + offset)[:, None] * QUERY_STRIDE + head * DIM + dim[None, :],
            mask=live,
            other=0.0,
        )
        keys = aligned(key_pages, NARROW) + head // GROUP * DIM + dim[None, :]
        values = aligned(value_pages, NARROW) + head // GROUP * DIM + dim[None, :]
        largest = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, DIM], tl.float32)
        start, seen_by_all = first_and_masked(before, TOKENS, WINDOW)
        for begin in tl.range(start, seen_by_all, TOKENS):
            token = begin + step
            slot = tl.load(table + token // PAGE).to(tl.int64) * PAGE + token % PAGE
            k = tl.load(keys + slot[:, None] * ROW).to(q.dtype)
            v = tl.load(values + slot[:, None] * ROW).to(q.dtype)
            scores = tl.dot(q, k.T, input_precision="ieee") * SCALE_LOG2
            largest, total, out = attend(q, v, scores, largest, total, out)
        num_all = tl.where(before < 0, 0, before + rows)
        for begin in tl.range(seen_by_all, num_all, TOKENS):
            token = begin + step
            is_there = token < num_all
            slot = tl.load(table + token // PAGE, mask=is_there, other=0).to(tl.int64) * PAGE + token % PAGE
            k = tl.load(keys + slot[:, None] * ROW, mask=is_there[:, None], other=0.0).to(q.dtype)
            v = tl.load(values + slot[:, None] * ROW, mask=is_there[:, None], other=0.0).to(q.dtype)
            is_seen = in_sight((before + offset)[:, None], token[None, :], WINDOW)
            scores = tl.where(is_seen, tl.dot(q, k.T, input_precision="ieee") * SCALE_LOG2, -1e30)
            largest, total, out = attend(q, v, scores, largest, total, out)
        outputs = aligned(output, TYPE) + (first + offset)[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
        tl.store(outputs, (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(TYPE), mask=live)


def can_page(head_dim: int) -> bool:
    """True if the kernel supports heads of this dimension."""
    return head_dim in HEAD_DIMS


def paged_prefill(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_size: int,
    window: int = 0,
) -> torch.Tensor:
    """Returns the attention of new tokens to all tokens of their sequences up to themselves, in the query's shape. The
    KV of the new tokens is already in the pages.

    Args: query: [new tokens and padding, query_heads, head_dim]. Only the dimension of tokens may have gaps between its
    entries. key_pages, value_pages: the planes of one layer, [slots, kv_heads, head_dim]. tiles: int32 [tiles, 4], of
    prefill_tiles. num_tiles: int32 [1], number of tiles. pages: int32, page lists of all sequences. page_size: tokens
    per page. window: last tokens that each token sees, itself included; 0: all.

    Raises:
        ValueError: a shape does not fit.

    """
    _, query_heads, head_dim = query.shape
    _check(query, key_pages, value_pages, (tiles, num_tiles, pages))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    types = query.dtype, key_pages.dtype
    launch = _launcher(*types, query_heads, key_pages.shape[1], head_dim, page_size, query.stride(0), window)
    tensors = query, key_pages, value_pages, output, tiles, num_tiles, pages
    launch(query.device, (_num_programs(query.device), 1, 1), *[x.data_ptr() for x in tensors])
    return output


@cache
def _launcher(
    dtype: torch.dtype,
    narrow: torch.dtype,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    query_stride: int,
    window: int,
) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "NARROW": TYPES[narrow],
        "HEADS": query_heads,
        "GROUP": query_heads // kv_heads,
        "DIM": head_dim,
        "PAGE": page_size,
        "QUERY_STRIDE": query_stride,
        "SCALE_LOG2": head_dim**-0.5 * LOG2_E,
        "ROWS": TILE_TOKENS,
        "TOKENS": _TOKENS if dtype.itemsize == 2 else _TOKENS_FP32,
        "WINDOW": window,
    }
    return Launcher(paged_prefill_kernel, constants, warps=4, stages=2)


@cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, lists: Sequence[torch.Tensor]
) -> None:
    _, query_heads, head_dim = query.shape
    if key_pages.shape != value_pages.shape or key_pages.shape[2] != head_dim or query_heads % key_pages.shape[1]:
        raise ValueError(f"query {list(query.shape)} does not fit pages {list(key_pages.shape)}")
    if not can_page(head_dim):
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, not {head_dim}")
    if query.stride()[1:] != (head_dim, 1) or query.stride(0) % 8 or not key_pages.is_contiguous():
        raise ValueError("the heads of a token must be contiguous, and tokens at multiples of 16 bytes")
    if any(part.dtype != torch.int32 or not part.is_contiguous() for part in lists):
        raise ValueError("tiles and pages must be contiguous int32")
