"""Matrices in e4m3 with a scale for each block of 128 x 128, as in DeepSeek-V3's and Qwen3's FP8 checkpoints.

On a CPU such matrices are widened when they are loaded. On a GPU they stay in e4m3: a Triton kernel reads them directly
if there are few tokens (fused_fp8.py); for many tokens they are widened before each product.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
_LARGEST = 448.0
"""The largest number in e4m3."""


class BlockScaled(NamedTuple):
    values: Tensor
    """Matrix values, [..., outputs, inputs] in e4m3."""
    scales: Tensor
    """Scales of blocks in fp32, [..., outputs / 128, inputs / 128], both sizes rounded up."""

    def part(self, rows: slice, columns: slice) -> "BlockScaled":
        """Returns a part of the matrix that consists of whole blocks. Raises ValueError for other parts."""
        blocks = []
        for cut, size in ((rows, self.values.shape[0]), (columns, self.values.shape[1])):
            start, stop, _ = cut.indices(size)
            if start % BLOCK or stop % BLOCK:
                raise ValueError(f"a rank's part is {stop - start} of {size}, not whole fp8 blocks of {BLOCK}")
            blocks.append(slice(start // BLOCK, stop // BLOCK))
        return BlockScaled(self.values[rows, columns], self.scales[blocks[0], blocks[1]])

    def to(self, device: torch.device) -> "BlockScaled":
        return BlockScaled(*(part.to(device, copy=True).contiguous() for part in self))


Matrix = Tensor | BlockScaled


def quantise(matrix: Tensor) -> BlockScaled:
    """Returns the matrix [outputs, inputs] in e4m3 with block scales."""
    rows, columns = matrix.shape
    padded = functional.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _LARGEST
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return BlockScaled(values.to(torch.float8_e4m3fn), scales)


def widen(matrix: BlockScaled, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the matrix [outputs, inputs] in `dtype`, with the scales applied."""
    rows, columns = matrix.values.shape
    scales = matrix.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (matrix.values.float() * scales).to(dtype)


def cat(parts: list[Matrix]) -> Matrix:
    """Returns matrices joined along their output dimension."""
    return _joined(parts, torch.cat)


def stack(parts: list[Matrix]) -> Matrix:
    return _joined(parts, torch.stack)


def _joined(parts: list[Matrix], join: object) -> Matrix:
    assert callable(join)
    if isinstance(parts[0], BlockScaled):
        return BlockScaled(*(join(pieces) for pieces in zip(*parts, strict=True)))
    joined: Tensor = join(parts)
    return joined
