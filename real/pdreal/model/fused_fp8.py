"""Products of activations with e4m3 matrices that have block scales. For few tokens a kernel reads the e4m3 matrix
directly. For more tokens the matrix is first widened to the type of the activations.
"""

from functools import cache
from math import prod

import torch
import triton
import triton.language as tl
from pdkernels.addressing import aligned
from pdkernels.launch import TYPES, Launcher, wait_for_earlier
from torch import Tensor
from torch.nn import functional

from pdreal.model.block_scaled import BLOCK, BlockScaled

_FEW_TOKENS = 128
"""Maximum number of tokens for which the kernel reads the e4m3 matrix directly. For more tokens, widening the matrix
first is faster."""
_COLUMNS = 64
"""Number of outputs that one Triton program computes. With few tokens, tensor cores of an H200 need at least 64."""
_MOST_PARTS, _MOST_PROGRAMS = 8, 384
"""Maximum number of parts into which the inputs of a product are divided. Maximum number of programs of a product whose
inputs are divided: as many as an H200 runs at once."""


@triton.jit(do_not_specialize=("x", "weights", "scales", "out", "sums", "arrived", "tokens"))
def scaled_linear_kernel(
    x: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    sums: tl.int64,
    arrived: tl.int64,
    tokens: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Computes COLUMNS outputs of ROWS tokens over one of PARTS parts of the inputs, block by block; the product with
    each block of weights is multiplied by the block's scale. If there are several parts, the program that finishes last
    adds up all of them, always in the same order.

    x: [tokens, INPUTS] in TYPE. weights: [OUTPUTS, INPUTS] in NARROW. scales: one for each block of BLOCK_SIZE x
    BLOCK_SIZE weights, in fp32. out: [tokens, OUTPUTS] in TYPE. sums: results of the parts, [PARTS, tokens, OUTPUTS] in
    fp32. arrived: for each tile of the output, the number of parts that have ended.
    """
    wait_for_earlier()
    part = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, BLOCK_SIZE)
    live = (row < tokens)[None, :]
    inputs = aligned(x, TYPE) + row.to(tl.int64)[None, :] * INPUTS + step[:, None]
    matrix = aligned(weights, NARROW) + column.to(tl.int64)[:, None] * INPUTS + step[None, :]
    scale = aligned(scales, tl.float32) + (tl.program_id(0) * COLUMNS // BLOCK_SIZE) * (INPUTS // BLOCK_SIZE)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    first = part * (INPUTS // PARTS)
    for at in range(first, first + INPUTS // PARTS, BLOCK_SIZE):
        block = tl.load(matrix + at).to(TYPE)
        product = tl.dot(block, tl.load(inputs + at, mask=live, other=0.0), input_precision="ieee")
        total += product * tl.load(scale + at // BLOCK_SIZE)
    place = row.to(tl.int64)[None, :] * OUTPUTS + column[:, None]
    if PARTS > 1:
        sum_of = aligned(sums, tl.float32) + place
        tl.store(sum_of + part * tokens * OUTPUTS, total, mask=live)
        tl.debug_barrier()
        counter = aligned(arrived, tl.int32) + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == PARTS - 1:
            total = tl.load(sum_of, mask=live, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(sum_of + other * tokens * OUTPUTS, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(aligned(out, TYPE) + place, total.to(TYPE), mask=live)
            tl.store(counter, 0)
    else:
        tl.store(aligned(out, TYPE) + place, total.to(TYPE), mask=live)


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
    """Each program multiplies ROWS rows of one block of BLOCK_SIZE x BLOCK_SIZE e4m3 weights by the block's scale, and
    stores the products in TYPE.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    at = row.to(tl.int64)[:, None] * INPUTS + column[None, :]
    block = (tl.program_id(1) * ROWS // BLOCK_SIZE) * (INPUTS // BLOCK_SIZE) + tl.program_id(0)
    value = tl.load(aligned(weights, NARROW) + at).to(tl.float32) * tl.load(aligned(scales, tl.float32) + block)
    tl.store(aligned(out, TYPE) + at, value.to(TYPE))


@cache
def _linear(dtype: torch.dtype, outputs: int, inputs: int, rows: int, parts: int) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "NARROW": TYPES[torch.float8_e4m3fn],
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "ROWS": rows,
        "COLUMNS": _COLUMNS,
        "BLOCK_SIZE": BLOCK,
        "PARTS": parts,
    }
    return Launcher(scaled_linear_kernel, constants, warps=4, stages=3, early=True)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Returns the device's counters of finished parts; a product uses one for each tile of its output. The program that
    finishes a tile's last part sets the tile's counter back to 0. All products share the counters, so products on a
    device must run one after another.
    """
    return torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)


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


def linear(x: Tensor, matrix: BlockScaled) -> Tensor:
    """Returns the product of x, [tokens, inputs], and an fp8 matrix: [tokens, outputs]. Sizes of the matrix must be
    multiples of 128. A CUDA graph can capture the call.
    """
    num_tokens = len(x)
    outputs, inputs = matrix.values.shape
    if num_tokens > _FEW_TOKENS:
        return functional.linear(x, widened(matrix, x.dtype))
    x = x.contiguous()
    out = x.new_empty(num_tokens, outputs)
    rows = max(16, min(64, triton.next_power_of_2(num_tokens)))
    tiles = outputs // _COLUMNS, triton.cdiv(num_tokens, rows)
    parts = _num_parts(inputs // BLOCK, prod(tiles))
    sums = x.new_empty(parts if parts > 1 else 0, num_tokens, outputs, dtype=torch.float32)
    tensors = x, matrix.values, matrix.scales, out, sums, _arrivals(x.device)
    launch = _linear(x.dtype, outputs, inputs, rows, parts)
    launch(x.device, (tiles[0], parts, tiles[1]), *(part.data_ptr() for part in tensors), num_tokens)
    return out


def _num_parts(num_blocks: int, num_tiles: int) -> int:
    """Returns into how many equal parts the inputs are divided: the largest power of two, at most 8, that divides
    num_blocks and with which all programs can run at the same time. 1: there is no such power of two above 1.
    num_blocks: number of blocks of inputs. num_tiles: number of tiles of the output. One program computes one part of
    one tile.
    """
    parts = 1
    while parts < _MOST_PARTS and num_blocks % (2 * parts) == 0 and num_tiles * 2 * parts <= _MOST_PROGRAMS:
        parts *= 2
    return parts


def widened(matrix: BlockScaled, dtype: torch.dtype) -> Tensor:
    outputs, inputs = matrix.values.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=matrix.values.device)
    pointers = [tensor.data_ptr() for tensor in (matrix.values, matrix.scales, out)]
    _widen(dtype, inputs)(out.device, (inputs // BLOCK, outputs // 32, 1), *pointers)
    return out
