"""Decode attention over pages of latents: one new query token per sequence. All query heads share one latent per token.

The kernel computes reference.latent_decode_reference. A latent serves as key, and without its rotated part also as
value, so it is read once for a block of heads. Programs for other heads of the same tokens run at the same time, and
find the latents in L2. Each program computes a block of heads over an equal share of the batch's tokens (shares.py).
"""

import torch
import triton
import triton.language as tl

from pdkernels.attention.shares import DecodeWorkspace, share_of, store_part

_LOG2_E = 1.4426950408889634
_ROWS = 16
"""Query heads per program: as many as a tensor core needs, and no more than registers hold together with a tile of
latents."""
_BLOCK_TOKENS = 32


@triton.jit
def latent_part_kernel(
    query, latents, block_table, lengths, bounds, first_sequences, parts, part_stats, output,
    scale_log2, query_stride, table_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BATCH: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Attends with ROWS query heads to the tokens of one share, sequence by sequence. Each sequence's result goes to
    `output`, or to `parts` and `part_stats` if the share has only a part of the sequence (store_part). HEADS: query
    heads. RANK, ROTATED: widths of the two parts of a latent. Other arguments: as of latent_decode and
    decode_part_kernel.
    """
    share = tl.program_id(1)
    per_share = share_of(bounds, BATCH, SHARES)
    block = share * per_share
    end_block = tl.minimum(block + per_share, tl.load(bounds + BATCH))
    sequence = tl.load(first_sequences + share)

    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = tl.arange(0, RANK)
    rotated = RANK + tl.arange(0, ROTATED)
    used = head < HEADS
    while block < end_block:
        begin_block, next_block = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
        start = (block - begin_block) * TOKENS
        end = tl.minimum((tl.minimum(next_block, end_block) - begin_block) * TOKENS, tl.load(lengths + sequence))
        at = query + sequence * query_stride + head[:, None] * (RANK + ROTATED)
        q_low = tl.load(at + low[None, :], mask=used[:, None], other=0.0)
        q_rotated = tl.load(at + rotated[None, :], mask=used[:, None], other=0.0)

        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, RANK], tl.float32)
        for first in tl.range(start, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            live = token < end
            page = tl.load(block_table + sequence * table_stride + token // PAGE, mask=live, other=0).to(tl.int64)
            row = latents + (page * PAGE + token % PAGE)[:, None] * (RANK + ROTATED)
            seen = tl.load(row + low[None, :], mask=live[:, None], other=0.0).to(q_low.dtype)
            turned = tl.load(row + rotated[None, :], mask=live[:, None], other=0.0).to(q_low.dtype)
            scores = tl.dot(q_low, seen.T, input_precision="ieee")
            scores = tl.dot(q_rotated, turned.T, scores, input_precision="ieee") * scale_log2
            scores = tl.where(live[None, :], scores, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, 1)
            out = tl.dot(weights.to(q_low.dtype), seen, out * shrink[:, None], input_precision="ieee")
            largest = new_largest

        is_whole = (block == begin_block) & (next_block <= end_block)
        store_part(
            parts, part_stats, output, share + sequence, sequence, is_whole, head, used, largest, total, out,
            HEADS, RANK,
        )  # fmt: skip
        block = tl.minimum(next_block, end_block)
        sequence += 1


def latent_workspace(
    batch: int,
    query_heads: int,
    rank: int,
    device: torch.device,
    *,
    shares: int | None = None,
) -> DecodeWorkspace:
    """Makes a workspace for latent_decode, in which the tokens of a batch are divided into equal shares. batch: number
    of sequences, with padded ones. rank: width of the part of a latent that is also the value. shares: number of
    shares, each read by one program per block of heads; None: as many as fill the device.
    """
    return DecodeWorkspace(batch, query_heads, triton.cdiv(query_heads, _ROWS), rank, _BLOCK_TOKENS, device, shares)


def latent_decode(
    query: torch.Tensor,
    latents: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its cached latents, including its own (append first).

    Args: query: [batch, query_heads, rank | rotated], contiguous, except that sequences may have gaps between them.
    latents: the plane of one layer, [slots, 1, rank | rotated]. rank: width of the part of a latent that is also the
    value. This width and the width of the rotated part are powers of two. block_table: int32 [batch, most pages of a
    sequence]; contiguous like `query`. lengths: int32 [batch], cached tokens per sequence; 0 is a padded row, which
    gives zeros. page_size: tokens per page. scale: factor on the scores. workspace: made by latent_workspace. Its
    method `divide` must have been called for these lengths, once a step for all layers. None: a new workspace.

    Returns:
        [batch, query_heads, rank].

    Raises:
        ValueError: a shape or dtype does not fit, or the workspace is divided over other lengths.

    """
    batch, query_heads, width = query.shape
    rank = 1 << (width.bit_length() - 1)
    _check_latent(query, latents, block_table, lengths, rank)
    if workspace is None:
        workspace = latent_workspace(batch, query_heads, rank, query.device)
        workspace.divide(lengths)
    workspace.check(lengths)
    output = torch.empty(batch, query_heads, rank, dtype=query.dtype, device=query.device)
    latent_part_kernel[triton.cdiv(query_heads, _ROWS), workspace.shares](
        query,
        latents,
        block_table,
        lengths,
        workspace.bounds,
        workspace.first_sequences,
        workspace.parts,
        workspace.stats,
        output,
        scale * _LOG2_E,
        query.stride(0),
        block_table.stride(0),
        HEADS=query_heads,
        ROWS=_ROWS,
        RANK=rank,
        ROTATED=width - rank,
        PAGE=page_size,
        TOKENS=workspace.block_tokens,
        BATCH=batch,
        SHARES=workspace.shares,
        num_warps=4,
        num_stages=2,
    )
    workspace.join(output)
    return output


def _check_latent(
    query: torch.Tensor, latents: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, rank: int
) -> None:
    batch, _, width = query.shape
    rotated = width - rank
    if rotated < 16 or rotated & (rotated - 1):
        raise ValueError(f"a latent must be as wide as the sum of two different powers of two from 16 on, not {width}")
    if latents.shape[1:] != (1, width) or not latents.is_contiguous():
        raise ValueError(f"query {list(query.shape)} does not fit latents {list(latents.shape)}")
    if query.stride()[1:] != (width, 1):
        raise ValueError(f"the heads of a query must be contiguous, not of strides {query.stride()}")
    if block_table.dtype != torch.int32 or len(block_table) != batch or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table must be int32 [{batch}, pages], not {block_table.dtype} {list(block_table.shape)}"
        )
    if lengths.dtype != torch.int32 or lengths.shape != (batch,):
        raise ValueError(f"lengths must be int32 [{batch}], not {lengths.dtype} {list(lengths.shape)}")
