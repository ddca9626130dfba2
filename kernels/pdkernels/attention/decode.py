"""Decode attention over pages, for one new query token per sequence, or for several that are verified together. Query
heads are grouped, and programs have equal work, whatever the sequences' lengths (the last programs may have less).

For one new token per sequence the kernel computes reference.paged_decode_reference. A step must read K and V of every
cached token of the batch once, 2 * tokens * kv_heads * head_dim elements; all other reads are small. Each program
computes one KV head over one share of the batch (shares.py), for all new tokens and all query heads that use the KV
head, so each K and V is read once. For a layer with a window only the last tokens of each sequence are divided into
shares and read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdkernels.attention.shares import DecodeWorkspace, share_of, store_part
from pdkernels.launch import can_begin_early, wait_for_earlier

_LOG2_E = 1.4426950408889634
_BLOCK_TOKENS = 64


@triton.jit
def row_offset(page, head, slot, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, HND: tl.constexpr):
    """Returns the offset in elements of the row of one KV head, for the token in this slot of a page. HEADS: KV heads.
    DIM: head dimension. PAGE: tokens per page. HND: True: pages have order HND; False: NHD.
    """
    row = (page * HEADS + head) * PAGE + slot if HND else (page * PAGE + slot) * HEADS + head
    return row * DIM


@triton.jit
def token_range(lengths, sequence, first_block, last_block, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns (index of the first token, index behind the last token) of the blocks first_block to last_block - 1 of a
    sequence. lengths: number of tokens of each sequence. sequence: index of the sequence in `lengths`. Block 0 begins
    where the sequence's window begins. TOKENS: tokens per block. WINDOW: tokens of the window; 0: none.
    """
    length = tl.load(lengths + sequence)
    skipped = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    return skipped + first_block * TOKENS, tl.minimum(skipped + last_block * TOKENS, length)


@triton.jit
def decode_part_kernel(
    query, key_pages, value_pages, block_table, lengths, bounds, first_sequences, parts, part_stats, output,
    scale_log2, query_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HND: tl.constexpr, TOKENS: tl.constexpr, BATCH: tl.constexpr, SHARES: tl.constexpr, WINDOW: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    """Attends with one KV head to the tokens of one share, sequence by sequence. Each sequence's result goes to
    `output`, or to `parts` and `part_stats` if the share has only a part of the sequence (store_part).

    GROUP: query heads of the KV head times NEW; the heads lie token after token. NEW: new tokens of each sequence.
    ROWS: GROUP, rounded up to a power of two from 16 on. HEADS: KV heads. DIM, PAGE, HND: as of row_offset. bounds,
    first_sequences: written by divide_kernel. parts, part_stats: tensors of a DecodeWorkspace. The other tensors are
    arguments of paged_decode. scale_log2: factor on the scores, times log2(e). query_stride, table_stride: elements
    from one row to the next. TOKENS: tokens per block. BATCH, SHARES: numbers of sequences and shares. WINDOW: tokens
    of the window; 0: none.
    """
    wait_for_earlier()
    head = tl.program_id(0)  # neighbouring programs read neighbouring heads of the same tokens
    share = tl.program_id(1)
    per_share = share_of(bounds, BATCH, SHARES)
    block = share * per_share
    end_block = tl.minimum(block + per_share, tl.load(bounds + BATCH))
    sequence = tl.load(first_sequences + share)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    used = row < GROUP
    new_token, query_head = row // (GROUP // NEW), head * (GROUP // NEW) + row % (GROUP // NEW)
    output_head = new_token * (HEADS * GROUP // NEW) + query_head
    while block < end_block:
        begin_block, next_block = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
        first_block, last_block = block - begin_block, tl.minimum(next_block, end_block) - begin_block
        start, end = token_range(lengths, sequence, first_block, last_block, TOKENS, WINDOW)
        query_row = (sequence * NEW + new_token) * query_stride
        query_offset = query_row[:, None] + query_head[:, None] * DIM + dim[None, :]
        num_seen = tl.load(lengths + sequence) - NEW + 1 + new_token
        q = tl.load(query + query_offset, mask=used[:, None], other=0.0)

        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total, out = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
        for first in tl.range(start, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            live = token < end
            page = tl.load(block_table + sequence * table_stride + token // PAGE, mask=live, other=0).to(tl.int64)
            offset = row_offset(page, head, token % PAGE, HEADS, DIM, PAGE, HND)
            k = tl.load(key_pages + offset[:, None] + dim[None, :], mask=live[:, None], other=0.0)
            v = tl.load(value_pages + offset[:, None] + dim[None, :], mask=live[:, None], other=0.0)
            scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee") * scale_log2
            scores = tl.where(live[None, :], scores, -float("inf"))
            if NEW > 1:  # finite, because an early token may see none of these
                scores = tl.where(token[None, :] < num_seen[:, None], scores, -1e30)
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, 1)
            out = tl.dot(weights.to(q.dtype), v.to(q.dtype), out * shrink[:, None], input_precision="ieee")
            largest = new_largest

        is_whole = (block == begin_block) & (next_block <= end_block)
        store_part(
            parts, part_stats, output, share + sequence, sequence, is_whole, output_head, used, largest, total, out,
            HEADS * GROUP, DIM,
        )  # fmt: skip
        block = tl.minimum(next_block, end_block)
        sequence += 1


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How one program of decode attention runs: number of warps, and blocks that are loaded ahead."""

    warps: int = 2
    stages: int = 3


def decode_workspace(
    batch: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    shares: int | None = None,
    block_tokens: int = _BLOCK_TOKENS,
    num_new: int = 1,
) -> DecodeWorkspace:
    """Makes a workspace for decode attention, in which the tokens of a batch are divided into equal shares. batch:
    number of sequences, with padded ones. block_tokens: tokens that a program reads at once. shares: number of shares,
    each read by one program per KV head; None: as many as fill the device. num_new: number of new tokens of each
    sequence.
    """
    return DecodeWorkspace(batch, num_new * query_heads, kv_heads, head_dim, block_tokens, device, shares)


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
    num_new: int = 1,
) -> torch.Tensor:
    """Attention of the last num_new tokens of each sequence over its cached tokens up to themselves (append first).

    Args: query: [batch * num_new, query_heads, head_dim], contiguous, except that tokens may have gaps between them;
    bf16 or fp16. key_pages, value_pages: one layer's planes, NHD [slots, kv_heads, head_dim] or HND [pages, kv_heads,
    page_size, head_dim]. block_table: int32 [batch, most pages of a sequence], contiguous, except that sequences may
    have gaps between them. lengths: int32 [batch], cached tokens per sequence, new ones included; 0 is a padded row,
    which gives zeros. page_size: tokens per page for NHD; HND pages say it themselves. scale: factor on the scores;
    None: 1 / sqrt(head_dim). output: tensor to write to, as large as the query; None: a new tensor. workspace: made by
    decode_workspace. Its method `divide` must have been called for these lengths, once a step for all layers with the
    same window; only tokens within that window are read. None: a new workspace without a window. num_new: number of new
    tokens of each sequence. More than 1 need a workspace without a window.

    Raises:
        ValueError: a shape or dtype does not fit, or the workspace is divided over other lengths.

    """
    num_tokens, query_heads, head_dim = query.shape
    kv_heads, is_hnd = key_pages.shape[1], key_pages.dim() == 4
    page_size = key_pages.shape[2] if is_hnd else page_size or 1
    _check_decode(query, key_pages, value_pages, block_table, lengths, num_new)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if output is None else output
    workspace = workspace or _divided(query, kv_heads, lengths, num_new)
    _check_workspace(workspace, lengths, num_new)
    tiling, group = tiling or DecodeTiling(), num_new * query_heads // kv_heads
    decode_part_kernel[kv_heads, workspace.shares](
        query,
        key_pages,
        value_pages,
        block_table,
        lengths,
        workspace.bounds,
        workspace.first_sequences,
        workspace.parts,
        workspace.stats,
        output,
        (head_dim**-0.5 if scale is None else scale) * _LOG2_E,
        query.stride(0),
        block_table.stride(0),
        HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),  # a tensor core takes 16 rows
        DIM=head_dim,
        PAGE=page_size,
        HND=is_hnd,
        TOKENS=workspace.block_tokens,
        BATCH=num_tokens // num_new,
        SHARES=workspace.shares,
        WINDOW=workspace.window,
        NEW=num_new,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        launch_pdl=can_begin_early(query.device),
    )
    workspace.join(output)
    return output


def _check_workspace(workspace: DecodeWorkspace, lengths: torch.Tensor, num_new: int) -> None:
    workspace.check(lengths)
    if num_new > 1 and workspace.window:
        raise ValueError("several new tokens of a sequence see all tokens before them; divide without a window")


def _divided(query: torch.Tensor, kv_heads: int, lengths: torch.Tensor, num_new: int) -> DecodeWorkspace:
    """Returns a new workspace in which sequences of these lengths, int32 [batch], are divided into equal shares for the
    programs.
    """
    _, query_heads, head_dim = query.shape
    workspace = decode_workspace(len(lengths), query_heads, kv_heads, head_dim, query.device, num_new=num_new)
    workspace.divide(lengths)
    return workspace


def _check_decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    num_new: int,
) -> None:
    num_tokens, query_heads, head_dim = query.shape
    batch = num_tokens // num_new
    if num_tokens % num_new:
        raise ValueError(f"{num_tokens} tokens are not {num_new} of each sequence")
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
