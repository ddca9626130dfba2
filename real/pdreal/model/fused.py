"""The operations of operations.py as one Triton kernel each: at decode, launches and small reads are what they cost."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads of a token that one program rotates."""
_COLUMNS = 1024
"""Of a token's gate that one program multiplies."""


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """One token: the residual in place, its normalised value to out."""
    column = tl.arange(0, PADDED)
    live = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    total = tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    total += tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=live)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = value * scale * tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=live)


@triton.jit
def norm_rotate_kernel(
    heads,
    query_norm,
    key_norm,
    angles,
    positions,
    row_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token, in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    live = (head < ALL_HEADS)[:, None]
    at = heads + token * row_stride + head[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (head < QUERY_HEADS)[:, None]
        query_first, query_second = tl.load(query_norm + column), tl.load(query_norm + HALF + column)
        key_first, key_second = tl.load(key_norm + column), tl.load(key_norm + HALF + column)
        first *= scale * tl.where(is_query, query_first[None, :], key_first[None, :])
        second *= scale * tl.where(is_query, query_second[None, :], key_second[None, :])
    angle = angles + tl.load(positions + token).to(tl.int64) * (2 * HALF) + column
    cos, sin = tl.load(angle)[None, :], tl.load(angle + HALF)[None, :]
    tl.store(at, (first * cos - second * sin).to(heads.dtype.element_ty), mask=live)
    tl.store(at + HALF, (second * cos + first * sin).to(heads.dtype.element_ty), mask=live)


@triton.jit
def silu_and_multiply_kernel(gate_up, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=live)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual in place."""
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    add_rms_norm_kernel[(num_tokens,)](x, residual, weight, out, eps, SIZE=size, PADDED=padded, num_warps=8)
    return out, residual


def norm_rotate_(
    heads: Tensor,
    num_query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: Tensor,
    positions: Tensor,
) -> Tensor:
    """In place. Heads of a token lie side by side; head_dim is a power of two."""
    num_tokens, num_heads, head_dim = heads.shape
    query_norm, key_norm = norms or (angles, angles)
    norm_rotate_kernel[num_tokens, triton.cdiv(num_heads, _HEADS)](
        heads,
        query_norm,
        key_norm,
        angles,
        positions,
        heads.stride(0),
        eps,
        QUERY_HEADS=num_query_heads,
        ALL_HEADS=num_heads,
        HALF=head_dim // 2,
        NORM=norms is not None,
        HEADS=_HEADS,
        num_warps=4,
    )
    return heads


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = num_tokens, triton.cdiv(size, _COLUMNS)
    silu_and_multiply_kernel[grid](gate_up, out, SIZE=size, COLUMNS=_COLUMNS, num_warps=4)
    return out
