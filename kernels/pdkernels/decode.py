"""Decode attention over pages: one new query token per sequence, split over the context, grouped query heads.

What it computes is reference.paged_decode_reference. It must read K and V of every cached token of the batch once, 2 *
tokens * kv_heads * head_dim elements; all else is small. A program takes one KV head of one part of one sequence, with
all query heads of its group, so that each K and V is read once. Few parts are joined by the program that comes last
with its own, many by a second kernel. Grids depend on shapes only, and lengths are read on the device: all can be
captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdkernels.launch import can_begin_early, wait_for_earlier

_LOG2_E = 1.4426950408889634
_FEW_PARTS = 4
"""Parts that one program reads as fast as many would."""


@triton.jit
def decode_part_kernel(
    query,
    key_pages,
    value_pages,
    block_table,
    lengths,
    parts,
    part_stats,
    arrived,
    output,
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
    SPLITS: tl.constexpr,
    JOINS: tl.constexpr,
):
    """Attends with one KV head over one part: unnormalised output, maximum and sum of the softmax, in float32."""
    wait_for_earlier()
    head = tl.program_id(0)  # neighbouring programs read neighbouring heads of the same tokens
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths + sequence)
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), TOKENS) * TOKENS
    start = split * per_split
    end = tl.minimum(start + per_split, length)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    used = row < GROUP
    query_head = head * GROUP + row
    query_offset = sequence * query_stride + query_head[:, None] * DIM + dim[None, :]
    q = tl.load(query + query_offset, mask=used[:, None], other=0.0)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
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
        scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :], scores, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(q.dtype), v.to(q.dtype), out * shrink[:, None], input_precision="ieee")
        largest = new_largest

    first_part = (sequence * HEADS * GROUP + query_head) * SPLITS
    is_last = SPLITS == 1
    if SPLITS > 1:
        part = first_part + split
        tl.store(parts + part[:, None] * DIM + dim[None, :], out, mask=used[:, None])
        tl.store(part_stats + part * 2, largest, mask=used)
        tl.store(part_stats + part * 2 + 1, total, mask=used)
        if JOINS:
            tl.debug_barrier()
            is_last = tl.atomic_add(arrived + sequence * HEADS + head, 1) == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.store(arrived + sequence * HEADS + head, 0)
            out, total = add_parts(parts, part_stats, first_part, used, dim, ROWS, DIM, SPLITS)
        joined = out / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (sequence * HEADS * GROUP + query_head)[:, None] * DIM + dim[None, :]
        tl.store(output + place, joined.to(output.dtype.element_ty), mask=used[:, None])


@triton.jit
def add_parts(parts, part_stats, first_part, used, dim, ROWS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Parts of some query heads weighed by their softmax: unnormalised output, and sum."""
    largest = tl.full([ROWS], -1e30, tl.float32)  # finite, so that empty parts (-inf) weigh nothing
    for i in tl.static_range(SPLITS):
        stats = part_stats + (first_part + i) * 2
        largest = tl.maximum(largest, tl.load(stats, mask=used, other=0.0, cache_modifier=".cg"))
    total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
    for i in tl.static_range(SPLITS):
        stats, rows = part_stats + (first_part + i) * 2, (first_part + i)[:, None] * DIM + dim[None, :]
        weight = tl.exp2(tl.load(stats, mask=used, other=0.0, cache_modifier=".cg") - largest)
        total += weight * tl.load(stats + 1, mask=used, other=0.0, cache_modifier=".cg")
        out += weight[:, None] * tl.load(parts + rows, mask=used[:, None], other=0.0, cache_modifier=".cg")
    return out, total


@triton.jit
def decode_join_kernel(parts, part_stats, output, SPLITS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr):
    """Weigh the parts of one query head by their softmax sums."""
    wait_for_earlier()
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
    warps: int = 2
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
        self.arrived = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
        """Counts of each one's parts that have come. The last one leaves zero behind."""


def default_splits(batch: int, kv_heads: int, device: torch.device) -> int:
    """Parts per sequence: enough programs to fill the device, few enough to cost nothing."""
    if device.type != "cuda":
        return 2
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(32, programs // (batch * kv_heads)))


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
        workspace.arrived,
        output,
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
        SPLITS=workspace.splits,
        JOINS=workspace.splits <= _FEW_PARTS,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=can_begin_early(query.device),
    )
    if workspace.splits <= _FEW_PARTS:
        return output
    decode_join_kernel[(batch * query_heads,)](
        workspace.parts,
        workspace.stats,
        output,
        SPLITS=workspace.splits,
        PADDED=triton.next_power_of_2(workspace.splits),
        DIM=head_dim,
        num_warps=4,
        launch_pdl=can_begin_early(query.device),
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
