"""Divides the cached tokens of a decode batch into equal shares, whatever the sequences' lengths, and keeps their
results.

The tokens of all sequences lie one behind another in blocks, and each program reads one share: an equal run of blocks.
The last shares may have fewer blocks, or none. A share may end inside a sequence, and may hold several sequences. The
blocks of one share that belong to one sequence are a part. Its result lies in slot `share + sequence`: no other part
has this slot, and the parts of a sequence have neighbouring slots. A sequence that lies in one share alone needs no
joining.

Grids depend on shapes only, and lengths are read on the device, so all kernels can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from pdkernels.launch import can_begin_early, wait_for_earlier

_PROGRAMS_PER_SM = 4
_SHARES_ON_CPU = 3
_PARTS_AT_ONCE = 32


@triton.jit
def divide_kernel(
    lengths, bounds, first_sequences,
    BATCH: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Divides sequences of these lengths, int32 [batch], into blocks and shares. Writes bounds, [batch + 1]: the number
    of blocks before each sequence, and at the end the number of all blocks. Writes first_sequences, [shares]: index of
    the sequence in which each share begins; BATCH if the share is empty.

    BATCH: number of sequences; PADDED: rounded up to a power of two. TOKENS: tokens per block. WINDOW: last tokens of
    each sequence that count; 0: all.
    """
    wait_for_earlier()
    share, shares = tl.program_id(0), tl.num_programs(0)
    sequence = tl.arange(0, PADDED)
    used = sequence < BATCH
    seen = tl.load(lengths + sequence, mask=used, other=0)
    if WINDOW:
        seen = tl.minimum(seen, WINDOW)
    ends = tl.cumsum(tl.cdiv(seen, TOKENS), 0)
    begin = share * tl.cdiv(tl.max(ends, 0), shares)
    tl.store(first_sequences + share, tl.sum(tl.where(used & (ends <= begin), 1, 0), 0))
    if share == 0:
        tl.store(bounds, 0)
        tl.store(bounds + 1 + sequence, ends, mask=used)


@triton.jit
def share_of(bounds, BATCH: tl.constexpr, SHARES: tl.constexpr):
    """Returns the number of KV blocks of a share, at least 1. The last shares may have fewer, or none. bounds: int32
    [BATCH + 1], for each sequence the number of blocks of all sequences before it, then the number of all blocks.
    BATCH: number of sequences. SHARES: number of shares.
    """
    return tl.maximum(tl.cdiv(tl.load(bounds + BATCH), SHARES), 1)


@triton.jit
def store_part(
    parts, part_stats, output, part, sequence, is_whole, head, used, largest, total, out,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Stores the result of some heads for a part: the blocks of one sequence in one share. If the part is the whole
    sequence (is_whole), writes the normalised result to `output`. Otherwise, writes the unnormalised result to
    parts[part], and the largest score and the sum of weights to part_stats[part].

    HEADS: number of all heads. head: indices of these heads. used: mask of the heads that exist. largest, total, out:
    running softmax of pdkernels.attention.prefill.attend.
    """
    dim = tl.arange(0, DIM)
    if is_whole:
        place = (sequence * HEADS + head)[:, None] * DIM + dim[None, :]
        normalised = out / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + place, normalised.to(output.dtype.element_ty), mask=used[:, None])
    else:
        row = part * HEADS + head
        tl.store(parts + row[:, None] * DIM + dim[None, :], out, mask=used[:, None])
        tl.store(part_stats + row * 2, largest, mask=used)
        tl.store(part_stats + row * 2 + 1, total, mask=used)


@triton.jit
def join_kernel(
    parts, part_stats, bounds, output,
    HEADS: tl.constexpr, DIM: tl.constexpr, BATCH: tl.constexpr, SHARES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one sequence for one query head, weighted by their softmax sums, and writes the result to
    `output`. Writes zeros if the sequence has no part. Does nothing if the sequence has only one part, because
    store_part has written the result.

    parts, part_stats: results of parts, as store_part writes them. bounds: block bounds of the sequences, from
    divide_kernel. HEADS: query heads. BATCH, SHARES: numbers of sequences and shares. AT_ONCE: number of parts that are
    read at once.
    """
    wait_for_earlier()
    head, sequence = tl.program_id(0), tl.program_id(1)
    per_share = share_of(bounds, BATCH, SHARES)
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    first = begin // per_share
    num_parts = tl.where(begin < end, (end - 1) // per_share - first + 1, 0)
    if num_parts != 1:
        dim = tl.arange(0, DIM)
        largest, total, out = -1e30, 0.0, tl.zeros([DIM], tl.float32)
        for i in range(0, num_parts, AT_ONCE):
            at = i + tl.arange(0, AT_ONCE)
            live = at < num_parts
            row = (first + sequence + at) * HEADS + head
            highs = tl.load(part_stats + row * 2, mask=live, other=-float("inf"))
            sums = tl.load(part_stats + row * 2 + 1, mask=live, other=0.0)
            rows = tl.load(parts + row[:, None] * DIM + dim[None, :], mask=live[:, None], other=0.0)
            new_largest = tl.maximum(largest, tl.max(highs, 0))
            weights, shrink = tl.exp2(highs - new_largest), tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(sums * weights, 0)
            out = out * shrink + tl.sum(rows * weights[:, None], 0)
            largest = new_largest
        joined = out / tl.where(total == 0.0, 1.0, total)
        tl.store(output + (sequence * HEADS + head) * DIM + dim, joined.to(output.dtype.element_ty))


class DecodeWorkspace:
    """Divides the KV of a decode batch into equal shares, and has memory for their results. For each block of heads,
    one program reads each share. A captured graph keeps the addresses of the workspace, so the workspace must live as
    long as the graph.

    Args:
        batch: number of sequences, with padded ones, whose length is 0.
        query_heads: query heads of each sequence (of all its new tokens), with a result of head_dim elements each.
        head_blocks: number of programs that read each token, each for some of the query heads.
        head_dim: a power of two.
        block_tokens: tokens of a block, which one program reads at once.
        device: where tokens lie.
        shares: number of programs per head block; None: as many as fill the device.

    """

    def __init__(
        self,
        batch: int,
        query_heads: int,
        head_blocks: int,
        head_dim: int,
        block_tokens: int,
        device: torch.device,
        shares: int | None = None,
    ) -> None:
        self.batch, self.query_heads, self.head_dim = batch, query_heads, head_dim
        self.block_tokens = block_tokens
        self.shares = shares or default_shares(head_blocks, device)
        rows = (self.shares + batch) * query_heads
        self.parts = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows, 2, dtype=torch.float32, device=device)
        self.bounds = torch.empty(batch + 1, dtype=torch.int32, device=device)
        """Number of blocks before each sequence, and number of all blocks."""
        self.first_sequences = torch.empty(self.shares, dtype=torch.int32, device=device)
        """Index of the sequence in which each share begins; the number of sequences if the share is empty."""
        self.divided: torch.Tensor | None = None
        """Lengths for which `divide` was called last. None: not called yet."""
        self.window = 0
        """Number of last tokens of each sequence that were divided; 0: all of them."""

    def divide(self, lengths: torch.Tensor, window: int = 0) -> None:
        """Divides the tokens of a batch equally into shares. lengths: numbers of tokens of the sequences, int32
        [batch]. window: last tokens of each sequence that a layer attends to; 0: all. Called once a step for all layers
        with the same window. Raises ValueError if lengths has another shape or data type.
        """
        if lengths.dtype != torch.int32 or lengths.shape != (self.batch,):
            raise ValueError(f"lengths must be int32 [{self.batch}], not {lengths.dtype} {list(lengths.shape)}")
        self.divided, self.window = lengths, window
        divide_kernel[(self.shares,)](
            lengths,
            self.bounds,
            self.first_sequences,
            BATCH=self.batch,
            PADDED=triton.next_power_of_2(self.batch),
            TOKENS=self.block_tokens,
            WINDOW=window,
            num_warps=4,
            launch_pdl=can_begin_early(lengths.device),
        )

    def check(self, lengths: torch.Tensor) -> None:
        """Raises ValueError if the last call of `divide` was not for the tensor `lengths`. The check compares
        addresses: new values in the same tensor are not noticed.
        """
        if self.divided is None or self.divided.data_ptr() != lengths.data_ptr():
            raise ValueError("the workspace is divided over other lengths: call divide(lengths) once a step")

    def join(self, output: torch.Tensor) -> None:
        """Writes the results that the attention kernel has not written yet. For a sequence that lies in several shares,
        combines the results of its parts. For a sequence without tokens, writes zeros. output: [batch, query_heads,
        head_dim], with the query_heads of the workspace.
        """
        join_kernel[(self.query_heads, self.batch)](
            self.parts,
            self.stats,
            self.bounds,
            output,
            HEADS=self.query_heads,
            DIM=self.head_dim,
            BATCH=self.batch,
            SHARES=self.shares,
            AT_ONCE=_PARTS_AT_ONCE,
            num_warps=4,
            launch_pdl=can_begin_early(output.device),
        )


def default_shares(head_blocks: int, device: torch.device) -> int:
    """Returns the number of equal shares into which a batch's cached tokens are divided. On a GPU, there are about 4
    programs per SM; on a CPU, 3 shares. head_blocks: number of programs that read each token, each for some of the
    query heads.
    """
    if device.type != "cuda":
        return _SHARES_ON_CPU
    programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, programs // head_blocks)
