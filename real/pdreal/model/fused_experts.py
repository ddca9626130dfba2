"""A layer's experts on a GPU: three Triton kernels for what experts.py does with sorted rows and grouped products.

choose: each program picks the experts of one token, and enters the token into the lists of the rank's own experts
enter: does the same for a token that a rank has sent with the experts that the rank chose for the token
gate and up, down: a program computes a tile of outputs for all rows of an expert (large batches: every eighth block)

Each token has a row for each of its experts: row number token * active + (index of the expert among the token's). Rows
of other ranks' experts stay zero. Lists are in no certain order, but a row's values depend on no other row. No shape
depends on the router's choices, so that a CUDA graph can hold the kernels.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pdkernels.addressing import aligned
from pdkernels.launch import TYPES, Launcher, wait_for_earlier
from torch import Tensor
from torch.nn.functional import linear

from pdreal.model.block_scaled import BlockScaled, Matrix
from pdreal.model.operations import logits
from pdreal.model.weights import ExpertWeights
from pdsim.system.llama import GroupedRouting

_FEWEST_ROWS, _MOST_ROWS = 16, 128
"""Minimum and maximum rows of a block: what a tensor core needs, and what registers hold."""
_BLOCKS = 8
"""Number of blocks of one expert's rows that neighbouring programs compute at the same time in prefill, because some
experts have far more rows than others. These blocks together read the expert's weights from memory once."""
_STEP = 64
"""Number of inputs per step of a matrix product. This step and the tilings in _products were the fastest of 60 on an
H200, for 128 experts of inner size 768 and hidden size 2,048; the kernels read 4.2 TB/s of memory with 32 tokens."""


@triton.jit(do_not_specialize=("scores", "shares", "choices", "lists", "lengths", "tokens"))
def choose_kernel(
    scores: tl.int64,
    shares: tl.int64,
    choices: tl.int64,
    lists: tl.int64,
    lengths: tl.int64,
    tokens: tl.int64,
    TYPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Finds one token's ACTIVE experts with the highest scores, and their weights, which sum to 1; `enter` stores both.
    scores: [tokens, EXPERTS] in TYPE. PADDED, PLACES: EXPERTS and ACTIVE, rounded up to powers of two.
    """
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    live = expert < EXPERTS
    score = tl.load(scores.to(tl.pointer_type(TYPE)) + token * EXPERTS + expert, mask=live, other=0.0).to(tl.float32)
    left = tl.where(live, tl.exp(score - tl.max(tl.where(live, score, float("-inf")), 0)), -1.0)
    place = tl.arange(0, PLACES)
    share = tl.zeros((PLACES,), tl.float32)
    chosen = tl.zeros((PLACES,), tl.int32)
    for i in tl.static_range(ACTIVE):
        best = tl.argmax(left, 0)
        share = tl.where(place == i, tl.max(left, 0), share)
        chosen = tl.where(place == i, best, chosen)
        left = tl.where(expert == best, -1.0, left)
    share = share / tl.sum(share, 0)
    enter(token, place, share, chosen, shares, choices, lists, lengths, tokens, ACTIVE, FIRST, LISTS)


@triton.jit(do_not_specialize=("scores", "bias", "shares", "choices", "lists", "lengths", "tokens"))
def choose_in_groups_kernel(
    scores: tl.int64,
    bias: tl.int64,
    shares: tl.int64,
    choices: tl.int64,
    lists: tl.int64,
    lengths: tl.int64,
    tokens: tl.int64,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    ACTIVE: tl.constexpr,
    PLACES: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Chooses one token's experts as DeepSeek-V3: ACTIVE_GROUPS groups of GROUP experts by the sum of their two highest
    scores + bias, then ACTIVE experts in them, which `enter` stores. scores: [tokens, experts] in fp32, before sigmoid.
    """
    wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    group, within = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_GROUP)
    expert = group[:, None] * GROUP + within[None, :]
    live = (group < GROUPS)[:, None] & (within < GROUP)[None, :]
    score = tl.load(aligned(scores, tl.float32) + token * (GROUPS * GROUP) + expert, mask=live, other=0.0)
    score = tl.sigmoid(score)
    left = score + tl.load(aligned(bias, tl.float32) + expert, mask=live, other=0.0)
    left = tl.where(live, left, float("-inf"))
    best = tl.max(left, 1)
    is_best = within[None, :] == tl.argmax(left, 1)[:, None]
    best += tl.max(tl.where(is_best, float("-inf"), left), 1)
    best = tl.where(group < GROUPS, best, float("-inf"))
    shut = group >= 0
    for _ in tl.static_range(ACTIVE_GROUPS):
        opened = group == tl.argmax(best, 0)
        shut = shut & (opened == 0)
        best = tl.where(opened, float("-inf"), best)
    left = tl.where(shut[:, None], float("-inf"), left)
    place = tl.arange(0, PLACES)
    share = tl.zeros((PLACES,), tl.float32)
    chosen = tl.zeros((PLACES,), tl.int32)
    for i in tl.static_range(ACTIVE):
        of_groups = tl.max(left, 1)
        from_group = tl.argmax(of_groups, 0)
        number = tl.max(tl.where(group == from_group, tl.argmax(left, 1), 0), 0)
        is_chosen = expert == from_group * GROUP + number
        share = tl.where(place == i, tl.sum(tl.sum(tl.where(is_chosen & live, score, 0.0), 1), 0), share)
        chosen = tl.where(place == i, from_group * GROUP + number, chosen)
        left = tl.where(is_chosen, float("-inf"), left)
    share = SCALE * share / tl.sum(share, 0)
    enter(token, place, share, chosen, shares, choices, lists, lengths, tokens, ACTIVE, FIRST, LISTS)


@triton.jit
def enter(
    token,
    place,
    share,
    chosen,
    shares,
    choices,
    lists,
    lengths,
    tokens,
    ACTIVE: tl.constexpr,
    FIRST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Stores which experts one token has, and appends the token's rows to the lists of own experts (FIRST to FIRST +
    LISTS - 1). place: 0, 1, 2, ..., an index for each of the token's experts; those from ACTIVE on are padding. chosen,
    share: index and weight of each expert. shares, choices, lists, lengths: addresses of the tensors of _Lists.
    tokens: number of tokens of the batch, for which each list has room.
    """
    row, active = token * ACTIVE + place, place < ACTIVE
    tl.store(aligned(shares, tl.float32) + row, share, mask=active)
    tl.store(aligned(choices, tl.int32) + row, chosen, mask=active)
    if LISTS:
        of_list = chosen - FIRST
        own = active & (of_list >= 0) & (of_list < LISTS)
        entry = tl.atomic_add(aligned(lengths, tl.int32) + of_list, 1, mask=own, sem="relaxed")
        tl.store(aligned(lists, tl.int32) + of_list * tokens + entry, row.to(tl.int32), mask=own)


@triton.jit(do_not_specialize=("given", "chosen", "shares", "choices", "lists", "lengths", "tokens"))
def enter_kernel(
    given: tl.int64,
    chosen: tl.int64,
    shares: tl.int64,
    choices: tl.int64,
    lists: tl.int64,
    lengths: tl.int64,
    tokens: tl.int64,
    SHARES_ROW: tl.constexpr,
    CHOICES_ROW: tl.constexpr,
    ACTIVE: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Appends a token that was routed before to the lists of the rank's own experts. given, chosen: weights and indices
    of each token's experts, whose rows begin SHARES_ROW and CHOICES_ROW elements after each other.
    """
    wait_for_earlier()
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    share = tl.load(given.to(tl.pointer_type(tl.float32)) + token * SHARES_ROW + place, mask=place < ACTIVE)
    expert = tl.load(chosen.to(tl.pointer_type(tl.int32)) + token * CHOICES_ROW + place, mask=place < ACTIVE)
    enter(token, place, share, expert, shares, choices, lists, lengths, tokens, ACTIVE, FIRST, LISTS)


@triton.jit(do_not_specialize=("x", "weights", "scales", "lists", "lengths", "out", "tokens"))
def gate_up_kernel(
    x: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    lists: tl.int64,
    lengths: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVE: tl.constexpr,
    ROW: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Computes COLUMNS columns of silu(gate) * up, STEP inputs at a time, for ROWS rows of an expert's list at a time.
    x: in TYPE, HIDDEN elements of each token, ROW elements apart. out: [rows, INNER]. weights, scales: of all own
    experts, in NARROW and, if SCALED, in fp32. lists, lengths, tokens: of _Lists. ACTIVE: experts of a token.
    """
    wait_for_earlier()
    expert = tl.program_id(2).to(tl.int64)
    column, step = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    gates = aligned(weights, NARROW) + (expert * (2 * INNER) + column)[None, :] * HIDDEN + step[:, None]
    block = aligned(scales, tl.float32)
    block += (expert * (2 * INNER // 128) + tl.program_id(1) * COLUMNS // 128) * (HIDDEN // 128)
    length = tl.load(aligned(lengths, tl.int32) + expert)
    for begin in range(tl.program_id(0) * ROWS, length, tl.num_programs(0) * ROWS):
        entry = begin + tl.arange(0, ROWS)
        live = (entry < length)[:, None]
        row = tl.load(aligned(lists, tl.int32) + expert * tokens + entry, mask=entry < length, other=0).to(tl.int64)
        inputs = aligned(x, TYPE) + (row // ACTIVE)[:, None] * ROW + step[None, :]
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, HIDDEN, STEP):
            part = tl.load(inputs + at, mask=live, other=0.0)
            of_gate, of_up = tl.load(gates + at).to(TYPE), tl.load(gates + INNER * HIDDEN + at).to(TYPE)
            if SCALED:
                scale = block + at // 128
                gate += tl.dot(part, of_gate, input_precision="ieee") * tl.load(scale)
                scale += (INNER // 128) * (HIDDEN // 128)
                up += tl.dot(part, of_up, input_precision="ieee") * tl.load(scale)
            else:
                gate = tl.dot(part, of_gate, gate, input_precision="ieee")
                up = tl.dot(part, of_up, up, input_precision="ieee")
        value = gate * tl.sigmoid(gate) * up
        tl.store(aligned(out, TYPE) + row[:, None] * INNER + column[None, :], value.to(TYPE), mask=live)


@triton.jit(do_not_specialize=("x", "weights", "scales", "shares", "lists", "lengths", "out", "tokens"))
def down_kernel(
    x: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    shares: tl.int64,
    lists: tl.int64,
    lengths: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    TYPE: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Computes COLUMNS columns of out, [rows, HIDDEN]: down projections of x, [rows, INNER], times the rows' shares."""
    wait_for_earlier()
    expert = tl.program_id(2).to(tl.int64)
    column, step = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    downs = aligned(weights, NARROW) + (expert * HIDDEN + column)[None, :] * INNER + step[:, None]
    block = aligned(scales, tl.float32)
    block += (expert * (HIDDEN // 128) + tl.program_id(1) * COLUMNS // 128) * (INNER // 128)
    length = tl.load(aligned(lengths, tl.int32) + expert)
    for begin in range(tl.program_id(0) * ROWS, length, tl.num_programs(0) * ROWS):
        entry = begin + tl.arange(0, ROWS)
        live = (entry < length)[:, None]
        row = tl.load(aligned(lists, tl.int32) + expert * tokens + entry, mask=entry < length, other=0).to(tl.int64)
        inputs = aligned(x, TYPE) + row[:, None] * INNER + step[None, :]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, INNER, STEP):
            part = tl.load(inputs + at, mask=live, other=0.0)
            of_down = tl.load(downs + at).to(TYPE)
            if SCALED:
                total += tl.dot(part, of_down, input_precision="ieee") * tl.load(block + at // 128)
            else:
                total = tl.dot(part, of_down, total, input_precision="ieee")
        total *= tl.load(aligned(shares, tl.float32) + row, mask=entry < length, other=0.0)[:, None]
        tl.store(aligned(out, TYPE) + row[:, None] * HIDDEN + column[None, :], total.to(TYPE), mask=live)


@cache
def _choose(dtype: torch.dtype, num_experts: int, num_active: int, own: range) -> Launcher:
    constants = {
        "TYPE": TYPES[dtype],
        "EXPERTS": num_experts,
        "PADDED": triton.next_power_of_2(num_experts),
        "ACTIVE": num_active,
        "PLACES": triton.next_power_of_2(num_active),
        "FIRST": own.start,
        "LISTS": len(own),
    }
    return Launcher(choose_kernel, constants, warps=1, early=True)


@cache
def _choose_in_groups(routing: GroupedRouting, num_experts: int, num_active: int, own: range) -> Launcher:
    group = num_experts // routing.num_groups
    constants = {
        "GROUPS": routing.num_groups,
        "GROUP": group,
        "PADDED_GROUPS": triton.next_power_of_2(routing.num_groups),
        "PADDED_GROUP": triton.next_power_of_2(group),
        "ACTIVE_GROUPS": routing.num_active_groups,
        "ACTIVE": num_active,
        "PLACES": triton.next_power_of_2(num_active),
        "SCALE": routing.scale,
        "FIRST": own.start,
        "LISTS": len(own),
    }
    return Launcher(choose_in_groups_kernel, constants, warps=1, early=True)


@cache
def _enter(shares_row: int, choices_row: int, num_active: int, own: range) -> Launcher:
    constants = {
        "SHARES_ROW": shares_row,
        "CHOICES_ROW": choices_row,
        "ACTIVE": num_active,
        "PLACES": triton.next_power_of_2(num_active),
        "FIRST": own.start,
        "LISTS": len(own),
    }
    return Launcher(enter_kernel, constants, warps=1, early=True)


@cache
def _products(
    dtype: torch.dtype, narrow: torch.dtype, num_active: int, row: int, hidden: int, inner: int, rows: int
) -> tuple[Launcher, Launcher, int, int]:
    """Returns the launchers of gate_up_kernel and down_kernel, and the columns that one program of each computes.
    dtype, narrow: types of activations and of stored weights. row: stride of inputs, in elements. rows: of a block.
    """
    sizes = {"HIDDEN": hidden, "INNER": inner, "ROWS": rows}
    columns, warps, stages = (128, 8, 4) if rows == _MOST_ROWS else (64, 4, 3)
    of_inner, of_hidden = _tile(inner, columns), _tile(hidden, columns)
    types = {"TYPE": TYPES[dtype], "NARROW": TYPES[narrow], "SCALED": narrow == torch.float8_e4m3fn}
    gate_up = {**types, "ACTIVE": num_active, "ROW": row, **sizes, "COLUMNS": of_inner, "STEP": _tile(hidden, _STEP)}
    down = {**types, **sizes, "COLUMNS": of_hidden, "STEP": _tile(inner, _STEP)}
    kernels = (gate_up_kernel, gate_up), (down_kernel, down)
    of_gate_up, of_down = (Launcher(*kernel, warps, stages, early=True) for kernel in kernels)
    return of_gate_up, of_down, of_inner, of_hidden


def _launch_choice(x: Tensor, weights: ExpertWeights, own: range, *of_choice: int) -> None:
    """Launches the kernel that chooses experts for each token. own: indices of this rank's experts, whose tokens the
    kernel lists. of_choice: addresses of the tensors in _Lists, which the kernel fills.
    """
    (num_tokens, _), num_experts = x.shape, len(weights.router)
    if weights.routing is not None and weights.bias is not None:
        scores = logits(x, weights.router)
        choose = _choose_in_groups(weights.routing, num_experts, weights.num_active, own)
        given: tuple[int, ...] = scores.data_ptr(), weights.bias.data_ptr()
    else:
        scores = linear(x, weights.router)
        choose = _choose(x.dtype, num_experts, weights.num_active, own)
        given = (scores.data_ptr(),)
    choose(x.device, (num_tokens, 1, 1), *given, *of_choice, num_tokens)


def of_values(matrix: Matrix) -> Tensor:
    return matrix.values if isinstance(matrix, BlockScaled) else matrix


def _pointers(matrix: Matrix) -> tuple[int, int]:
    """Returns the addresses of a matrix's values and of its scales; without scales, of the values twice."""
    values = of_values(matrix).data_ptr()
    return values, matrix.scales.data_ptr() if isinstance(matrix, BlockScaled) else values


def _tile(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides the size."""
    return min(most, size & -size)


class _Lists(NamedTuple):
    """The experts that each token chose, and for each of a rank's experts the list of its tokens."""

    shares: Tensor
    """Factors of each token's experts in the sum of outputs, [tokens, active] in fp32."""
    chosen: Tensor
    """Indices of each token's experts, [tokens, active] in int32."""
    lists: Tensor
    """For each own expert: its rows (token * active + index among the token's experts), [own experts, tokens]."""
    lengths: Tensor
    """Number of rows in each list, [own experts]."""

    @classmethod
    def empty(cls, x: Tensor, num_active: int, num_lists: int) -> "_Lists":
        num_tokens = len(x)
        return cls(
            x.new_empty(num_tokens, num_active, dtype=torch.float32),
            x.new_empty(num_tokens, num_active, dtype=torch.int32),
            x.new_empty(num_lists, num_tokens, dtype=torch.int32),
            x.new_zeros(num_lists, dtype=torch.int32),
        )

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(part.data_ptr() for part in self)


def run_experts(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Returns what experts.run_experts returns: for each token the sum of expert outputs, and the chosen experts. A
    CUDA graph can hold the kernels. Hidden and inner size must be multiples of 16.
    """
    lists = _Lists.empty(x, weights.num_active, len(weights.own))
    _launch_choice(x, weights, weights.own, *lists.pointers)
    return _mix_lists(x, lists, weights), lists.chosen


def route(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Returns weights (fp32) and indices (int32) of each token's experts, [tokens, experts per token] each."""
    nobody = _Lists.empty(x, weights.num_active, 0)
    _launch_choice(x, weights, range(0), *nobody.pointers)
    return nobody.shares, nobody.chosen


def mix(x: Tensor, shares: Tensor, experts: Tensor, weights: ExpertWeights) -> Tensor:
    """Returns the weighted sum of the outputs of this rank's experts, [tokens, hidden]. shares, experts: as `route`
    returns them. There may be gaps between rows of the arguments; x begins at a multiple of 16 bytes.
    """
    lists = _Lists.empty(x, weights.num_active, len(weights.own))
    launch = _enter(shares.stride(0), experts.stride(0), weights.num_active, weights.own)
    launch(x.device, (len(x), 1, 1), shares.data_ptr(), experts.data_ptr(), *lists.pointers, len(x))
    return _mix_lists(x, lists, weights)


def _mix_lists(x: Tensor, lists: _Lists, weights: ExpertWeights) -> Tensor:
    (num_tokens, hidden), (num_lists, _, inner) = x.shape, of_values(weights.down).shape
    num_experts = len(weights.router)
    num_rows = num_tokens * weights.num_active
    gated, mixed = x.new_empty(num_rows, inner), x.new_empty(num_rows, hidden)
    if num_lists < num_experts:
        mixed.zero_()
    shares, _, *of_lists = lists.pointers

    of_most_lists = triton.next_power_of_2(triton.cdiv(2 * num_rows, num_experts))
    block = max(_FEWEST_ROWS, min(_MOST_ROWS, of_most_lists))
    types = x.dtype, of_values(weights.down).dtype
    gate_up, down, inner_tile, hidden_tile = _products(*types, weights.num_active, x.stride(0), hidden, inner, block)
    of_layer = x.data_ptr(), *_pointers(weights.gate_up)
    blocks = _BLOCKS if block == _MOST_ROWS else 1
    gate_up(x.device, (blocks, inner // inner_tile, num_lists), *of_layer, *of_lists, gated.data_ptr(), num_tokens)
    of_down = gated.data_ptr(), *_pointers(weights.down), shares
    down(x.device, (blocks, hidden // hidden_tile, num_lists), *of_down, *of_lists, mixed.data_ptr(), num_tokens)
    return mixed.view(num_tokens, weights.num_active, hidden).sum(1)
