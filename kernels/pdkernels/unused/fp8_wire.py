"""fp8 on the wire for a bf16 or fp16 cache: gather converts to float8_e4m3, and scatter converts back. Half as many
bytes are staged and sent.

Computes reference.gather_fp8_reference and reference.scatter_fp8_reference. Per element of a bf16 cache, a gather reads
2 bytes and writes 1, a scatter the reverse.

It is lossy, and so never a default. e4m3 has 3 bits of mantissa: a value whose magnitude is between 2^-6 and 448 times
its plane's scale comes back within 1/16 (6.25 %) of itself; smaller ones within 2^-10 times the scale; larger ones are
clamped. fp8_scales makes the largest value of each plane 448 times the scale.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from pdkernels.addressing import table_entry, unit_in_pool, unit_in_staging
from pdkernels.copies.staging import check_pages, check_staging
from pdkernels.launch import Launcher
from pdkernels.layout import Pool

LARGEST_E4M3 = 448.0
_LANES = 8  # elements per unit: 16 bytes of bf16, 8 bytes of fp8
_UNITS = 256
_RUN_TIME = ("table", "scales", "pages", "staging", "tokens", "first_byte")


@triton.jit(do_not_specialize=_RUN_TIME)
def gather_fp8_kernel(
    table: tl.int64,
    scales: tl.int64,
    pages: tl.int64,
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
    WIDE: tl.constexpr,
    UNITS: tl.constexpr,
):
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    plane = tl.program_id(1)
    live = unit < tokens * ROW
    lane = tl.arange(0, 8)[None, :]
    source = unit_in_pool(pages, unit, live, ROW, HEAD, HEADS, PAGE, HND)[:, None] * 8 + lane
    target = unit_in_staging(unit, tokens, ROW, SLICES, PLANES)[:, None] * 8 + lane
    wide = tl.multiple_of((table_entry(table, plane) + first_byte).to(tl.pointer_type(WIDE)), 16)
    span = staging + plane * (tokens.to(tl.int64) * (ROW // SLICES * 8))
    narrow = tl.multiple_of(span.to(tl.pointer_type(tl.float8e4nv)), 8)
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + plane)
    scaled = tl.load(wide + source, mask=live[:, None]).to(tl.float32) / scale
    clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    tl.store(narrow + target, clamped.to(tl.float8e4nv), mask=live[:, None])


@triton.jit(do_not_specialize=_RUN_TIME)
def scatter_fp8_kernel(
    table: tl.int64,
    scales: tl.int64,
    pages: tl.int64,
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
    WIDE: tl.constexpr,
    UNITS: tl.constexpr,
):
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    plane = tl.program_id(1)
    live = unit < tokens * ROW
    lane = tl.arange(0, 8)[None, :]
    source = unit_in_staging(unit, tokens, ROW, SLICES, PLANES)[:, None] * 8 + lane
    target = unit_in_pool(pages, unit, live, ROW, HEAD, HEADS, PAGE, HND)[:, None] * 8 + lane
    span = staging + plane * (tokens.to(tl.int64) * (ROW // SLICES * 8))
    narrow = tl.multiple_of(span.to(tl.pointer_type(tl.float8e4nv)), 8)
    wide = tl.multiple_of((table_entry(table, plane) + first_byte).to(tl.pointer_type(WIDE)), 16)
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + plane)
    scaled = tl.load(narrow + source, mask=live[:, None]).to(tl.float32) * scale
    tl.store(wide + target, scaled.to(WIDE), mask=live[:, None])


def fp8_scales(pool: Pool) -> torch.Tensor:
    """Returns scales, float32 [planes], from each plane's largest magnitude. Source and target must use the same
    scales.
    """
    largest = torch.stack([plane.abs().amax().float() for plane in pool.planes])
    return (largest / LARGEST_E4M3).clamp(min=torch.finfo(torch.float32).tiny)


def gather_fp8(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    scales: torch.Tensor,
    *,
    heads: range | None = None,
    slices: int = 1,
    offset_bytes: int = 0,
) -> None:
    """Gathers like `gather`, but into a span in float8_e4m3, which has half the size.

    Args:
        pool: bf16 or fp16.
        scales: float32 [planes]; what is stored is the value divided by its plane's scale.

    """
    _move(gather_fp8_kernel, pool, pages, tokens, staging, scales, heads, slices, offset_bytes)


def scatter_fp8(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    scales: torch.Tensor,
    *,
    heads: range | None = None,
    writers: int = 1,
    offset_bytes: int = 0,
) -> None:
    """Copies the KV of a request from a span that `gather_fp8` has filled into pages of a pool. Arguments that are not
    listed are those of `scatter`.

    Args:
        pool: bf16 or fp16.
        scales: float32 [planes]; each stored value is multiplied by its plane's scale.

    """
    _move(scatter_fp8_kernel, pool, pages, tokens, staging, scales, heads, writers, offset_bytes)


def _move(
    kernel: Any,
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    scales: torch.Tensor,
    heads: range | None,
    slices: int,
    offset_bytes: int,
) -> None:
    if tokens <= 0:
        return
    layout = pool.layout
    planes = len(pool.planes)
    checked = layout.check_heads(heads, slices)
    check_pages(pool, pages, tokens)
    span_bytes = planes * tokens * len(checked) * layout.head_dim
    check_staging(pool, staging, offset_bytes, span_bytes)
    if layout.dtype not in {torch.bfloat16, torch.float16}:
        raise ValueError(f"an fp8 wire needs a bf16 or fp16 cache, not {layout.dtype}")
    if scales.dtype != torch.float32 or scales.shape != (planes,) or scales.device != pool.device:
        raise ValueError(f"scales must be float32 [{planes}] on {pool.device}")
    row = len(checked) * layout.head_dim // _LANES
    key = (kernel, heads, slices)
    launch = pool.prepared.get(key)
    if launch is None:
        constants = {
            "ROW": row,
            "HEAD": layout.head_dim // _LANES,
            "HEADS": layout.heads,
            "PAGE": layout.page_size,
            "HND": layout.order == "HND",
            "SLICES": slices,
            "PLANES": planes,
            "WIDE": tl.bfloat16 if layout.dtype == torch.bfloat16 else tl.float16,
            "UNITS": _UNITS,
        }
        launch = pool.prepared[key] = Launcher(kernel, constants, warps=4)
    addresses = pool.table.data_ptr(), scales.data_ptr(), pages.data_ptr(), staging.data_ptr() + offset_bytes
    tiles = -(-tokens * row // _UNITS)
    launch(pool.device, (tiles, planes, 1), *addresses, tokens, layout.first_byte(checked.start))
