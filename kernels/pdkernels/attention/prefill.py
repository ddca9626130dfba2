"""Causal attention of prompts packed one after another, with grouped query heads. Each prompt attends to its context
and to itself.

The kernel computes reference.packed_prefill_reference. A program computes 128 new tokens of one query head, and walks
over the tokens that they may see: first blocks that all of them may see, without a mask, then blocks with a mask. The
programs for the end of a prompt have the most work, and begin first. With a window a program begins at the first token
that it may see, and masks all blocks.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from pdkernels.addressing import aligned
from pdkernels.launch import TYPES, Launcher

LOG2_E = 1.4426950408889634
HEAD_DIMS = 16, 32, 64, 128
_ROWS = 128
_TOKENS = 128
"""Tokens per block. Of 72 tilings this one was within 7 % of the fastest on an H200 with 8,192 tokens and 32 heads. The
faster tilings need tensor descriptors in memory, which each launch must upload."""


@triton.jit
def attend(q, v, scores, largest, total, out):
    """Adds a block of tokens to a running softmax, and returns its new (largest, total, out).

    q: queries, which give the data type of products. v: values of the block. scores: attention scores, [queries,
    tokens], scaled so that 2**score is the weight. largest: the largest score so far. total: sum of weights so far.
    out: weighted sum of values so far. Weights are relative to the largest score.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    out = tl.dot(weights.to(q.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new_largest, total * shrink + tl.sum(weights, 1), out


@triton.jit
def first_and_masked(position, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns two indices of tokens at which blocks of TOKENS tokens begin: (begin of the first block to compute, begin
    of the first block that needs a mask because some queries may not see all its tokens). With a window, all blocks get
    a mask. position: index of the first query's token in its sequence. WINDOW: last tokens that a query sees; 0: all.
    """
    if WINDOW:
        start = tl.maximum(position - WINDOW + 1, 0) // TOKENS * TOKENS
        masked = start
    else:
        start = 0
        masked = (position + 1) // TOKENS * TOKENS
    return start, masked


@triton.jit
def in_sight(position, token, WINDOW: tl.constexpr):
    """True where a query at a position may see a token: its own token and earlier ones, within the window if there is
    one.
    """
    is_seen = token <= position
    if WINDOW:
        is_seen = is_seen & (token > position - WINDOW)
    return is_seen


@triton.jit(do_not_specialize=("query", "key", "value", "output", "new_bounds", "all_bounds"))
def packed_prefill_kernel(
    query: tl.int64,
    key: tl.int64,
    value: tl.int64,
    output: tl.int64,
    new_bounds: tl.int64,
    all_bounds: tl.int64,
    TYPE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Computes the attention of up to ROWS new tokens of one sequence, for one query head. Arguments of type int64 are
    addresses of the tensors of `packed_prefill`.

    HEADS: query heads. GROUP: query heads per KV head. SCALE_LOG2: factor on the scores, times log2(e). TOKENS: tokens
    of KV per block. WINDOW: as `window`. Strides are in elements, from token to token.
    """
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    new_bound = new_bounds.to(tl.pointer_type(tl.int32)) + tl.program_id(2)
    all_bound = all_bounds.to(tl.pointer_type(tl.int32)) + tl.program_id(2)
    new_begin, all_begin = tl.load(new_bound).to(tl.int64), tl.load(all_bound).to(tl.int64)
    num_new, num_all = tl.load(new_bound + 1) - new_begin.to(tl.int32), tl.load(all_bound + 1) - all_begin.to(tl.int32)
    if first >= num_new:
        return
    context = num_all - num_new
    row, dim, step = first + tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    live = (row < num_new)[:, None]
    queries = aligned(query, TYPE) + (new_begin + row)[:, None] * QUERY_STRIDE + head * DIM + dim[None, :]
    q = tl.load(queries, mask=live, other=0.0)
    keys = aligned(key, TYPE) + all_begin * KEY_STRIDE + head // GROUP * DIM + dim[None, :]
    values = aligned(value, TYPE) + all_begin * VALUE_STRIDE + head // GROUP * DIM + dim[None, :]
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    start, seen_by_all = first_and_masked(context + first, TOKENS, WINDOW)
    for begin in tl.range(start, seen_by_all, TOKENS):
        token = (begin + step)[:, None]
        k = tl.load(keys + token * KEY_STRIDE)
        v = tl.load(values + token * VALUE_STRIDE)
        scores = tl.dot(q, k.T, input_precision="ieee") * SCALE_LOG2
        largest, total, out = attend(q, v, scores, largest, total, out)
    for begin in tl.range(seen_by_all, tl.minimum(context + first + ROWS, num_all), TOKENS):
        token = (begin + step)[:, None]
        k = tl.load(keys + token * KEY_STRIDE, mask=token < num_all, other=0.0)
        v = tl.load(values + token * VALUE_STRIDE, mask=token < num_all, other=0.0)
        is_seen = in_sight((context + row)[:, None], (begin + step)[None, :], WINDOW)
        scores = tl.where(is_seen, tl.dot(q, k.T, input_precision="ieee") * SCALE_LOG2, -1e30)
        largest, total, out = attend(q, v, scores, largest, total, out)
    outputs = aligned(output, TYPE) + (new_begin + row)[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    tl.store(outputs, (out / total[:, None]).to(TYPE), mask=live)


def is_fastest(query: torch.Tensor, num_new: Sequence[int]) -> bool:
    """True if packed_prefill can compute heads of this dimension, and is the fastest kernel for these sequences.
    packed_prefill starts one program for each query head of each block of up to 128 new tokens. If there are fewer
    programs than half of the GPU's multiprocessors, a kernel that also divides contexts among programs is faster.

    Args: query: as of packed_prefill. num_new: new tokens of each sequence.
    """
    _, query_heads, head_dim = query.shape
    num_programs = sum([triton.cdiv(tokens, _ROWS) for tokens in num_new]) * query_heads
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return head_dim in HEAD_DIMS and 2 * num_programs >= processors


def packed_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    new_bounds: torch.Tensor,
    all_bounds: torch.Tensor,
    longest: int,
    window: int = 0,
) -> torch.Tensor:
    """Returns causal attention, [new tokens, query_heads, head_dim]: each of a sequence's last tokens, which are new,
    sees itself and all earlier tokens of the sequence.

    Args: query: [new tokens, query_heads, head_dim]; bf16 or fp16. In each tensor, only the dimension of tokens may
    have gaps between its entries. key, value: [all tokens, kv_heads, head_dim]. new_bounds, all_bounds: int32
    [sequences + 1], where the tokens of each sequence begin and end. longest: number of new tokens of the longest
    sequence. window: number of latest tokens that each token sees, itself included; 0: no limit.

    Raises:
        ValueError: a shape does not fit.

    """
    _, query_heads, head_dim = query.shape
    _check(query, key, value)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    strides = query.stride(0), key.stride(0), value.stride(0)
    launch = _launcher(query.dtype, query_heads, key.shape[1], head_dim, strides, window)
    grid = query_heads, triton.cdiv(longest, _ROWS), len(new_bounds) - 1
    launch(query.device, grid, *[x.data_ptr() for x in (query, key, value, output, new_bounds, all_bounds)])
    return output


@cache
def _launcher(
    dtype: torch.dtype, query_heads: int, kv_heads: int, head_dim: int, strides: tuple[int, int, int], window: int
) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "HEADS": query_heads,
        "GROUP": query_heads // kv_heads,
        "DIM": head_dim,
        "QUERY_STRIDE": strides[0],
        "KEY_STRIDE": strides[1],
        "VALUE_STRIDE": strides[2],
        "SCALE_LOG2": head_dim**-0.5 * LOG2_E,
        "ROWS": _ROWS,
        "TOKENS": _TOKENS,
        "WINDOW": window,
    }
    return Launcher(packed_prefill_kernel, constants, warps=8, stages=3)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    _, query_heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[2] != head_dim or query_heads % key.shape[1]:
        raise ValueError(f"query {list(query.shape)} does not fit K {list(key.shape)} and V {list(value.shape)}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, not {head_dim}")
    if any(x.stride()[1:] != (head_dim, 1) or x.stride(0) % 8 for x in (query, key, value)):
        raise ValueError("the heads of a token must be contiguous, and tokens at multiples of 16 bytes")
    if max(x.shape[0] * x.stride(0) for x in (query, key, value)) >= 1 << 31:
        raise ValueError("the tokens of a tensor must lie within 2**31 elements")
