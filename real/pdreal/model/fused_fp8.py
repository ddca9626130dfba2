"""Products of bf16 activations and matrices in e4m3 with block scales, which are read as they are."""

from functools import cache

import torch
import triton
import triton.language as tl
from pdkernels.addressing import aligned
from pdkernels.launch import TYPES, Launcher
from torch import Tensor
from torch.nn import functional

from pdreal.model.block_scaled import BLOCK, BlockScaled

_FEW_TOKENS = 128
"""Up to so many, reading the matrix is what takes the time; beyond, a wide copy of it costs less than it saves."""


@triton.jit(do_not_specialize=("x", "weights", "scales", "out", "tokens", "stride"))
def scaled_linear_kernel(
    x: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    stride: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Some outputs of some tokens: a block of inputs at a time, and its sum scaled."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, BLOCK_SIZE)
    live = (row < tokens)[:, None]
    inputs = aligned(x, TYPE) + row.to(tl.int64)[:, None] * stride + step[None, :]
    matrix = aligned(weights, NARROW) + column.to(tl.int64)[None, :] * INPUTS + step[:, None]
    scale = aligned(scales, tl.float32) + (tl.program_id(0) * COLUMNS // BLOCK_SIZE) * (INPUTS // BLOCK_SIZE)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, INPUTS, BLOCK_SIZE):
        part = tl.dot(tl.load(inputs + at, mask=live, other=0.0), tl.load(matrix + at).to(TYPE), input_precision="ieee")
        total += part * tl.load(scale + at // BLOCK_SIZE)
    tl.store(aligned(out, TYPE) + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :], total.to(TYPE), mask=live)


@triton.jit(do_not_specialize=("weights", "scales", "out"))
def widen_kernel(
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some rows of one block."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    at = row.to(tl.int64)[:, None] * INPUTS + column[None, :]
    block = (tl.program_id(1) * ROWS // BLOCK_SIZE) * (INPUTS // BLOCK_SIZE) + tl.program_id(0)
    value = tl.load(aligned(weights, NARROW) + at).to(tl.float32) * tl.load(aligned(scales, tl.float32) + block)
    tl.store(aligned(out, TYPE) + at, value.to(TYPE))


@cache
def _linear(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "NARROW": TYPES[torch.float8_e4m3fn],
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "ROWS": rows,
        "COLUMNS": _COLUMNS,
        "BLOCK_SIZE": BLOCK,
    }
    return Launcher(scaled_linear_kernel, constants, warps=4, stages=4)


@cache
def _widen(dtype: torch.dtype, inputs: int) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "NARROW": TYPES[torch.float8_e4m3fn],
        "INPUTS": inputs,
        "BLOCK_SIZE": BLOCK,
        "ROWS": 32,
    }
    return Launcher(widen_kernel, constants, warps=4)


_COLUMNS = 32


def linear(x: Tensor, matrix: BlockScaled) -> Tensor:
    """[tokens, outputs]; sizes of the matrix are multiples of 128. Can be captured in a CUDA graph."""
    num_tokens = len(x)
    outputs, inputs = matrix.values.shape
    if num_tokens > _FEW_TOKENS:
        return functional.linear(x, widened(matrix, x.dtype))
    x = x.contiguous()
    out = x.new_empty(num_tokens, outputs)
    rows = max(16, min(64, triton.next_power_of_2(num_tokens)))
    grid = outputs // _COLUMNS, triton.cdiv(num_tokens, rows), 1
    pointers = [tensor.data_ptr() for tensor in (x, matrix.values, matrix.scales, out)]
    _linear(x.dtype, outputs, inputs, rows)(x.device, grid, *pointers, num_tokens, x.stride(0))
    return out


def widened(matrix: BlockScaled, dtype: torch.dtype) -> Tensor:
    outputs, inputs = matrix.values.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=matrix.values.device)
    pointers = [tensor.data_ptr() for tensor in (matrix.values, matrix.scales, out)]
    _widen(dtype, inputs)(out.device, (inputs // BLOCK, outputs // 32, 1), *pointers)
    return out
