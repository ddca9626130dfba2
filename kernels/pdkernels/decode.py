"""Decode attention over pages: one new query token per sequence, split over the context, grouped query heads.

What it computes is reference.paged_decode_reference. It must read K and V of every cached token of the batch once, 2 *
tokens * kv_heads * head_dim elements; all else is small. A program takes one KV head of one part of one sequence, with
all query heads of its group, so that each K and V is read once; a second kernel joins the parts. Both grids depend on
shapes only, and lengths are read on the device: the pair can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


@triton.jit
def decode_part_kernel(
    query,
    key_pages,
    value_pages,
    block_table,
    lengths,
    parts,
    part_stats,
    scale_log2,
    query_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HND: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One KV head of one part: unnormalised output, maximum and sum of the softmax, in float32."""
    head = tl.program_id(0)  # neighbouring programs read neighbouring heads of the same tokens
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    per_split = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    used = row < GROUP
    query_head = head * GROUP + row
    query_offset = sequence * query_stride + query_head[:, None] * DIM + dim[None, :]
    q = tl.load(query + query_offset, mask=used[:, None], other=0.0)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for first in tl.range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        live = token < end
        page = tl.load(block_table + sequence * table_stride + token // PAGE, mask=live, other=0).to(tl.int64)
        if HND:
            offset = ((page * HEADS + head) * PAGE + token % PAGE) * DIM
        else:
            offset = ((page * PAGE + token % PAGE) * HEADS + head) * DIM
        k = tl.load(key_pages + offset[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        v = tl.load(value_pages + offset[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype).T) * scale_log2
        scores = tl.where(live[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(q.dtype), v.to(q.dtype), out * shrink[:, None])
        largest = new_largest

    part = (sequence * HEADS * GROUP + query_head) * splits + split
    tl.store(parts + part[:, None] * DIM + dim[None, :], out, mask=used[:, None])
    tl.store(part_stats + part * 2, largest, mask=used)
    tl.store(part_stats + part * 2 + 1, total, mask=used)


@triton.jit
def decode_join_kernel(parts, part_stats, output, SPLITS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr):
    """Weigh the parts of one query head by their softmax sums."""
    query_head = tl.program_id(0)
    split = tl.arange(0, PADDED)
    dim = tl.arange(0, DIM)
    live = split < SPLITS
    part = query_head * SPLITS + split
    largest = tl.load(part_stats + part * 2, mask=live, other=-float("inf"))
    total = tl.load(part_stats + part * 2 + 1, mask=live, other=0.0)
    overall = tl.maximum(tl.max(largest, 0), -1e30)  # finite, so that empty parts (-inf) weigh nothing
    weight = tl.exp2(largest - overall)
    out = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=live[:, None], other=0.0)
    whole = tl.sum(total * weight, 0)
    joined = tl.sum(out * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(output + query_head * DIM + dim, joined.to(output.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Sizes of decode attention's pieces: tokens per step, warps per program, steps in flight."""

    tokens: int = 64
    warps: int = 4
    stages: int = 3


class DecodeWorkspace:
    """Memory for the parts, made once per largest batch, so that captured graphs keep their addresses.

    Args:
        splits: parts per sequence; by default enough that a full batch fills the device.

    """

    def __init__(
        self,
        batch: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        splits: int | None = None,
    ) -> None:
        self.splits = splits or default_splits(batch, kv_heads, device)
        rows = batch * query_heads * self.splits
        self.parts = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows, 2, dtype=torch.float32, device=device)


def default_splits(batch: int, kv_heads: int, device: torch.device) -> int:
    """Parts per sequence: enough programs for an even load when lengths differ, few enough to cost nothing."""
    if device.type != "cuda":
        return 2
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(64, programs // (batch * kv_heads)))


def paged_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int | None = None,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    tiling: DecodeTiling | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its cached tokens, itself included (append first).

    Args:
        query: [batch, query_heads, head_dim], contiguous but for the stride of sequences; bf16 or fp16.
        key_pages, value_pages: the planes of one layer, NHD [slots, kv_heads, head_dim] or HND [pages, kv_heads,
            page_size, head_dim].
        block_table: int32 [batch, most pages of a sequence], contiguous but for the stride of sequences.
        lengths: int32 [batch], cached tokens per sequence; 0 is a padded row, which gives zeros.
        page_size: tokens per page for NHD; HND pages say it themselves.
        scale: of the scores; 1 / sqrt(head_dim) if None.
        output: where to write, [batch, query_heads, head_dim]; new if None.
        workspace: kept over calls (and needed for a CUDA graph); new if None.

    Raises:
        ValueError: a shape or dtype does not fit.

    """
    batch, query_heads, head_dim = query.shape
    order = "HND" if key_pages.dim() == 4 else "NHD"
    kv_heads = key_pages.shape[1]
    page_size = key_pages.shape[2] if order == "HND" else page_size or 1
    _check_decode(query, key_pages, value_pages, block_table, lengths)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if output is None else output
    workspace = workspace or DecodeWorkspace(batch, query_heads, kv_heads, head_dim, query.device)
    tiling = tiling or DecodeTiling()
    group = query_heads // kv_heads
    decode_part_kernel[kv_heads, workspace.splits, batch](
        query,
        key_pages,
        value_pages,
        block_table,
        lengths,
        workspace.parts,
        workspace.stats,
        (head_dim**-0.5 if scale is None else scale) * _LOG2_E,
        query.stride(0),
        block_table.stride(0),
        HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),  # a tensor core takes 16 rows
        DIM=head_dim,
        PAGE=page_size,
        HND=order == "HND",
        TOKENS=tiling.tokens,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    decode_join_kernel[(batch * query_heads,)](
        workspace.parts,
        workspace.stats,
        output,
        SPLITS=workspace.splits,
        PADDED=triton.next_power_of_2(workspace.splits),
        DIM=head_dim,
        num_warps=4,
    )
    return output


def _check_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    batch, query_heads, head_dim = query.shape
    if key_pages.shape != value_pages.shape or not (key_pages.is_contiguous() and value_pages.is_contiguous()):
        raise ValueError(f"K and V pages must be contiguous and alike: {key_pages.shape}, {value_pages.shape}")
    if key_pages.shape[-1] != head_dim or query_heads % key_pages.shape[1]:
        raise ValueError(f"query {list(query.shape)} does not fit pages {list(key_pages.shape)}")
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim must be a power of two, not {head_dim}")
    if query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"the heads of a query must be contiguous, not of strides {query.stride()}")
    if block_table.dtype != torch.int32 or len(block_table) != batch or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table must be int32 [{batch}, pages], not {block_table.dtype} {list(block_table.shape)}"
        )
    if lengths.dtype != torch.int32 or lengths.shape != (batch,):
        raise ValueError(f"lengths must be int32 [{batch}], not {lengths.dtype} {list(lengths.shape)}")
