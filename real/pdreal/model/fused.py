"""The operations of operations.py as one Triton kernel each. Launches and small reads take most of the operations'
time, so fewer kernels are faster.

A prefill launches four of these kernels per layer, one by one. They are launched by a Launcher, and all their
parameters but addresses are compile-time constants. Every tensor except positions must begin at a multiple of 16 bytes.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from pdkernels.addressing import aligned
from pdkernels.launch import TYPES, Launcher, wait_for_earlier
from torch import Tensor

_HEADS = 8
"""Number of heads of a token that one program of norm_rotate_kernel rotates."""
_COLUMNS = 1024
"""Number of columns of a token that one program of silu_and_multiply_kernel computes."""


@triton.jit(do_not_specialize=("x", "residual", "weight", "out"))
def add_rms_norm_kernel(
    x: tl.int64,
    residual: tl.int64,
    weight: tl.int64,
    out: tl.int64,
    TYPE: tl.constexpr,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """For one token: adds x to the residual in place, and writes the normalised sum, multiplied by weight, to out. All
    four are addresses, of elements in TYPE. SIZE: hidden size. PADDED: SIZE, rounded up to a power of two.
    """
    wait_for_earlier()
    column = tl.arange(0, PADDED)
    live = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    total = tl.load(aligned(residual, TYPE) + at, mask=live, other=0.0).to(tl.float32)
    total += tl.load(aligned(x, TYPE) + at, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(TYPE)
    tl.store(aligned(residual, TYPE) + at, rounded, mask=live)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    normed = value * scale * tl.load(aligned(weight, TYPE) + column, mask=live, other=0.0).to(tl.float32)
    tl.store(aligned(out, TYPE) + at, normed.to(TYPE), mask=live)


@triton.jit(do_not_specialize=("heads", "query_norm", "key_norm", "angles", "positions"))
def norm_rotate_kernel(
    heads: tl.int64,
    query_norm: tl.int64,
    key_norm: tl.int64,
    angles: tl.int64,
    positions: tl.int64,
    TYPE: tl.constexpr,
    POSITION: tl.constexpr,
    EPS: tl.constexpr,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalises, if NORM, and rotates HEADS heads of one token in place. Arguments of type int64 are addresses of the
    tensors of norm_rotate_. TYPE, POSITION: data types of heads and of positions. ROW, HEAD: elements from one token,
    or one head, to the next. QUERY_HEADS, ALL_HEADS: numbers of heads. HALF: half of a head's dimension.
    """
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    live = (head < ALL_HEADS)[:, None]
    at = aligned(heads, TYPE) + token * ROW + head[:, None] * HEAD + column[None, :]
    first = tl.load(at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + EPS)[:, None]
        is_query = (head < QUERY_HEADS)[:, None]
        of_query, of_key = aligned(query_norm, TYPE) + column, aligned(key_norm, TYPE) + column
        first *= scale * tl.where(is_query, tl.load(of_query)[None, :], tl.load(of_key)[None, :])
        second *= scale * tl.where(is_query, tl.load(of_query + HALF)[None, :], tl.load(of_key + HALF)[None, :])
    position = tl.load(positions.to(tl.pointer_type(POSITION)) + token).to(tl.int64)
    angle = aligned(angles, tl.float32) + position * (2 * HALF) + column
    cos, sin = tl.load(angle)[None, :], tl.load(angle + HALF)[None, :]
    tl.store(at, (first * cos - second * sin).to(TYPE), mask=live)
    tl.store(at + HALF, (second * cos + first * sin).to(TYPE), mask=live)


@triton.jit(do_not_specialize=("gate_up", "out"))
def silu_and_multiply_kernel(
    gate_up: tl.int64, out: tl.int64, TYPE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Computes COLUMNS of the SIZE elements of silu(gate) * up, for one token. gate_up: address of [tokens, 2 * SIZE],
    with all gates of a token before its ups. out: address of [tokens, SIZE].
    """
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < SIZE
    at = aligned(gate_up, TYPE) + token * (2 * SIZE) + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=live, other=0.0).to(tl.float32)
    tl.store(aligned(out, TYPE) + token * SIZE + column, (gate * tl.sigmoid(gate) * up).to(TYPE), mask=live)


@cache
def _add_rms_norm(dtype: torch.dtype, eps: float, size: int) -> Launcher:
    constants = {"TYPE": TYPES[dtype], "EPS": eps, "SIZE": size, "PADDED": triton.next_power_of_2(size)}
    return Launcher(add_rms_norm_kernel, constants, warps=8, early=True)


@cache
def _norm_rotate(
    dtype: torch.dtype,
    position_dtype: torch.dtype,
    eps: float,
    strides: tuple[int, int],
    num_query_heads: int,
    num_heads: int,
    head_dim: int,
    normed: bool,
) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "POSITION": TYPES[position_dtype],
        "EPS": eps,
        "ROW": strides[0],
        "HEAD": strides[1],
        "QUERY_HEADS": num_query_heads,
        "ALL_HEADS": num_heads,
        "HALF": head_dim // 2,
        "NORM": normed,
        "HEADS": _HEADS,
    }
    return Launcher(norm_rotate_kernel, constants, warps=4, early=True)


@cache
def _silu_and_multiply(dtype: torch.dtype, size: int) -> Launcher:
    constants = {"TYPE": TYPES[dtype], "SIZE": size, "COLUMNS": _COLUMNS}
    return Launcher(silu_and_multiply_kernel, constants, warps=4, early=True)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual in place. Returns the normalised sum, and the residual. x, residual: [tokens, hidden].
    weight: of the norm, [hidden]. eps: added to the mean square.
    """
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()
    _add_rms_norm(x.dtype, eps, size)(x.device, (num_tokens, 1, 1), *pointers)
    return out, residual


def norm_rotate_(
    heads: Tensor,
    num_query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: Tensor,
    positions: Tensor,
) -> Tensor:
    """Normalises heads, if norms are given, and rotates them, in place. head_dim must be a power of two, and the
    numbers of a head must be contiguous. The arguments are those of operations.norm_rotate_.
    """
    num_tokens, num_heads, head_dim = heads.shape
    query_norm, key_norm = norms or (angles, angles)
    types, strides = (heads.dtype, positions.dtype), (heads.stride(0), heads.stride(1))
    launch = _norm_rotate(*types, eps, strides, num_query_heads, num_heads, head_dim, norms is not None)
    norm_pointers = query_norm.data_ptr(), key_norm.data_ptr()
    pointers = heads.data_ptr(), *norm_pointers, angles.data_ptr(), positions.data_ptr()
    launch(heads.device, (num_tokens, triton.cdiv(num_heads, _HEADS), 1), *pointers)
    return heads


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = num_tokens, triton.cdiv(size, _COLUMNS), 1
    _silu_and_multiply(gate_up.dtype, size)(gate_up.device, grid, gate_up.data_ptr(), out.data_ptr())
    return out
