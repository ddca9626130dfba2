"""Gated delta nets over states in slots: one token of each sequence (decode), or chunks of several (prefill).

Decode computes the same as `recur` in pdreal.model.delta, prefill the same as `scan`. Decode reads and writes each
state once; with 128 x 128 states in fp32 these are nearly all bytes that it moves. Prefill works as SGLang
(kernels/ops/attention/fla/chunk.py): it solves all chunks of up to 64 tokens at once (prepare), goes from chunk to
chunk with a part of the state in registers (scan), then computes the outputs of all chunks at once. No sequence uses
slot 0, to which padding writes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_TOKENS = 64
_CHANNELS = 256
_STEP_VALUES, _SCAN_VALUES, _OUTPUT_VALUES = 16, 32, 64
"""Number of value dimensions of a head that one program of step_kernel, scan_kernel and outputs_kernel computes."""


class Recurrence(Protocol):
    """The weights and sizes of one linear-attention layer that the kernels need, for the heads of one rank.
    pdreal.model.delta.DeltaWeights has these attributes.
    """

    @property
    def conv(self) -> Tensor:
        """Weights of the convolution, [channels, taps]. The channels are queries and keys of all key heads, then values
        of all value heads.
        """
        ...

    @property
    def rate(self) -> Tensor:
        """Factor for each head, [value heads] in fp32. The factor times the head's softplus is the logarithm of the
        head's decay (decay_and_beta).
        """
        ...

    @property
    def bias(self) -> Tensor:
        """Summand that is added to each head's decay projection before the softplus, [value heads] in fp32
        (decay_and_beta).
        """
        ...

    @property
    def num_key_heads(self) -> int: ...

    @property
    def num_value_heads(self) -> int: ...

    @property
    def key_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...


@triton.jit
def inverse_length(x, axis: tl.constexpr):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis) + 1e-6)


@triton.jit
def decay_and_beta(decays, betas, at, mask, rate, bias):
    """Returns two fp32 values per offset. The logarithm of the decay is rate * softplus(x + bias), and beta is
    sigmoid(y), where x and y are projections of the token. decays, betas: addresses of x and of y. at: offsets to read
    there. mask: False: nothing is read, and both results are 0.
    """
    x = tl.load(decays + at, mask=mask, other=0.0).to(tl.float32) + bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    beta = tl.sigmoid(tl.load(betas + at, mask=mask, other=0.0).to(tl.float32))
    return tl.where(mask, rate * softplus, 0.0), tl.where(mask, beta, 0.0)


@triton.jit
def conv_step_kernel(
    mixed, weight, states, slots, tracked, out, mixed_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves one token of one sequence, and shifts the token into the sequence's convolution state. Writes silu of
    the result to `out`. mixed, slots, tracked: as for delta_step. states: delta_step's argument `conv`. weight:
    convolution weights, [channels, taps]. mixed_stride: elements from one row of mixed to the next. TAPS: number of
    tokens that the convolution sees. BLOCK: number of channels per program.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    own, second = tl.load(slots + row).to(tl.int64), tl.load(tracked + row).to(tl.int64)
    at = channel * (TAPS - 1)
    x = tl.load(mixed + row * mixed_stride + channel, mask=live, other=0.0)
    total = x.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=live, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(states + own * CHANNELS * (TAPS - 1) + at + tap, mask=live, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask=live, other=0.0).to(tl.float32)
        if tap:
            tl.store(states + own * CHANNELS * (TAPS - 1) + at + tap - 1, before, mask=live)
            tl.store(states + second * CHANNELS * (TAPS - 1) + at + tap - 1, before, mask=live & (second > 0))
    tl.store(states + own * CHANNELS * (TAPS - 1) + at + TAPS - 2, x, mask=live)
    tl.store(states + second * CHANNELS * (TAPS - 1) + at + TAPS - 2, x, mask=live & (second > 0))
    tl.store(out + row * CHANNELS + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=live)


@triton.jit
def step_kernel(
    mixed, betas, decays, rates, biases, states, slots, tracked, out, gate_stride, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the recurrence for one token of one sequence, for BLOCK value dimensions of one head, and updates the
    state. mixed: outputs of the convolution. betas, decays, slots, tracked: as in delta_step. states: `ssm` of
    delta_step. rates, biases: of the layer (Recurrence). out: outputs, as delta_step returns them. gate_stride:
    elements from one row of betas and decays to the next. HEADS, KEY_HEADS: numbers of value heads and key heads. KEY,
    VALUE: dimensions of a key and of a value.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEY), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own, second = tl.load(slots + row).to(tl.int64), tl.load(tracked + row).to(tl.int64)
    inputs = mixed + row * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    key_head = head // (HEADS // KEY_HEADS)
    q = tl.load(inputs + key_head * KEY + key).to(tl.float32)
    k = tl.load(inputs + (KEY_HEADS + key_head) * KEY + key).to(tl.float32)
    q, k = q * inverse_length(q, 0) * (KEY**-0.5), k * inverse_length(k, 0)
    v = tl.load(inputs + 2 * KEY_HEADS * KEY + head * VALUE + value).to(tl.float32)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    decay, beta = decay_and_beta(decays, betas, row * gate_stride + head, row >= 0, rate, bias)
    at = (head * KEY + key[:, None]) * VALUE + value[None, :]
    state = tl.load(states + own * HEADS * KEY * VALUE + at).to(tl.float32) * tl.exp(decay)
    new = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * new[None, :]
    tl.store(out + (row * HEADS + head) * VALUE + value, tl.sum(state * q[:, None], 0).to(out.dtype.element_ty))
    kept = state.to(states.dtype.element_ty)
    tl.store(states + own * HEADS * KEY * VALUE + at, kept)
    if second > 0:
        tl.store(states + second * HEADS * KEY * VALUE + at, kept)


def delta_step(
    mixed: Tensor, beta: Tensor, decay: Tensor, layer: Recurrence, conv: Tensor, ssm: Tensor, slots: Tensor,
    tracked: Tensor,
) -> Tensor:  # fmt: skip
    """Computes one token of each sequence, and returns outputs [sequences, value heads, value_dim].

    layer: weights of the layer. mixed: inputs of the convolution, [sequences, channels]; beta, decay: projections,
    [sequences, value heads], with equal strides. conv: [slots, channels, taps - 1] and ssm: [slots, value heads,
    key_dim, value_dim] are changed at slots [sequences]. tracked: second slot for the new state, [sequences]; 0: none.
    """
    (rows, channels), taps, heads = mixed.shape, layer.conv.shape[1], layer.num_value_heads
    convolved = mixed.new_empty(rows, channels)
    grid = rows, triton.cdiv(channels, _CHANNELS)
    conv_step_kernel[grid](
        mixed, layer.conv, conv, slots, tracked, convolved, mixed.stride(0), CHANNELS=channels, TAPS=taps,
        BLOCK=_CHANNELS,
    )  # fmt: skip
    out = mixed.new_empty(rows, heads, layer.value_dim)
    block = min(_STEP_VALUES, layer.value_dim)
    step_kernel[rows, heads, layer.value_dim // block](
        convolved, beta, decay, layer.rate, layer.bias, ssm, slots, tracked, out, beta.stride(0), HEADS=heads,
        KEY_HEADS=layer.num_key_heads, KEY=layer.key_dim, VALUE=layer.value_dim, BLOCK=block,
    )  # fmt: skip
    return out


class Chunks(NamedTuple):
    """How a batch of packed sequences is divided into chunks of tokens, and which slots each sequence reads and writes.
    Tensors are int32, on the device.
    """

    sequences: Tensor
    """[tokens]: index of each token's sequence."""
    begins: Tensor
    """[sequences + 1]: index of the first token of each sequence, and at the end the number of all tokens."""
    sources: Tensor
    """[sequences]: slot of the state before the first token. 0: zeros."""
    firsts: Tensor
    """[sequences + 1]: index of the first chunk of each sequence, and at the end the number of all chunks."""
    ranges: Tensor
    """[chunks, 3]: index of the first token of each chunk, index behind its last token, and slot for the state after
    the chunk (0: none). A chunk may be empty."""
    writes: Tensor
    """[writes, 3]: for each state that is written to a slot: index of the sequence, number of the sequence's tokens
    before the state, slot."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        states: Sequence[Sequence[tuple[int, int]]],
        sources: Sequence[int],
        device: torch.device,
    ) -> "Chunks":
        """Returns the chunks of a batch of sequences.

        lengths: number of tokens of each sequence. states: for each sequence, pairs (number of tokens, slot): a state
        is written to the slot after so many of the sequence's tokens. Numbers do not descend, and the last is the
        sequence's length. sources: slot of each sequence's earlier state; 0: none.
        """
        begins, firsts, ranges, writes = [0], [0], [], []
        for sequence, (length, left) in enumerate(zip(lengths, states, strict=True)):
            begin = start = begins[-1]
            for tokens, slot in left:
                writes.append((sequence, tokens, slot))
                stop = begin + tokens
                for at in range(start, stop, CHUNK_TOKENS) or (stop,):  # an empty chunk leaves the state once more
                    end = min(at + CHUNK_TOKENS, stop)
                    ranges.append((at, end, slot if end == stop else 0))
                start = stop
            begins.append(begin + length)
            firsts.append(len(ranges))
        rows = (begins, sources, firsts, ranges, writes)
        numbers = torch.repeat_interleave(torch.tensor(lengths)).int()
        return cls(*(row.to(device) for row in (numbers, *(torch.tensor(row, dtype=torch.int32) for row in rows))))


@triton.jit
def conv_kernel(
    mixed, weight, states, sequences, begins, sources, out, mixed_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolves one token, and writes silu of the result to `out`. For the first tokens of a sequence, earlier inputs
    come from the sequence's convolution state; without a state they are zeros. states: `conv` of delta_step. sequences,
    begins, sources: fields of Chunks. The other arguments have the same meaning as for conv_step_kernel.
    """
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    sequence = tl.load(sequences + token)
    index, source = token - tl.load(begins + sequence), tl.load(sources + sequence).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        behind = TAPS - 1 - tap
        is_here = index >= behind
        x = tl.load(mixed + (token - behind) * mixed_stride + channel, mask=live & is_here, other=0.0)
        old = states + (source * CHANNELS + channel) * (TAPS - 1) + index + tap
        x += tl.load(old, mask=live & (index < behind) & (source > 0), other=0.0)
        total += x.to(tl.float32) * tl.load(weight + channel * TAPS + tap, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * CHANNELS + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=live)


@triton.jit
def conv_state_kernel(
    mixed, states, begins, sources, writes, mixed_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one convolution state: the last TAPS - 1 inputs up to the token at which the state is taken. The kernel
    may write to the slot from which it reads the sequence's earlier state. states: delta_step's argument `conv`.
    begins, sources, writes: fields of Chunks.
    """
    write = tl.program_id(0) * 3
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < CHANNELS
    sequence, tokens = tl.load(writes + write), tl.load(writes + write + 1)
    slot = tl.load(writes + write + 2).to(tl.int64)
    begin, source = tl.load(begins + sequence), tl.load(sources + sequence).to(tl.int64)
    for place in tl.static_range(TAPS - 1):
        index = tokens - (TAPS - 1) + place
        x = tl.load(mixed + (begin + index) * mixed_stride + channel, mask=live & (index >= 0), other=0.0)
        old = states + (source * CHANNELS + channel) * (TAPS - 1) + place + tokens
        x += tl.load(old, mask=live & (index < 0) & (source > 0), other=0.0)
        tl.store(states + (slot * CHANNELS + channel) * (TAPS - 1) + place, x, mask=live)


@triton.jit
def inverse_of(system, place, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of 1 + system, [SIZE, SIZE], where system is 0 on and above its diagonal. place: the indices
    of its rows. PRECISION: input_precision of products.

    The inverse of a block [[A, 0], [C, B]] is [[a, 0], [-b C a, b]], with the inverses a and b of A and B. So the
    inverses of all blocks on the diagonal are known from those of half their size, beginning with single numbers.
    """
    row, column = place[:, None], place[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    size = 1
    while size < SIZE:
        joined = tl.where((row // (2 * size) == column // (2 * size)) & (row // size != column // size), system, 0.0)
        left = tl.dot(inverse, joined, input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def prepare_kernel(
    mixed, betas, decays, rates, biases, ranges, totals, from_values, from_keys, gate_stride, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solves the recurrence within one chunk of one head, for a state of zeros (from_values) and as a factor on the
    state (from_keys). Writes also, for each token, the sum of the logarithms of decays from the chunk's first token up
    to this token (totals). ranges: as of Chunks. Other inputs: as of step_kernel. CHUNK: maximum number of tokens of a
    chunk.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ranges + 3 * chunk), tl.load(ranges + 3 * chunk + 1)
    if begin == end:
        return
    place, key, value = tl.arange(0, CHUNK), tl.arange(0, KEY), tl.arange(0, VALUE)
    live = begin + place < end
    token = (begin + place).to(tl.int64)
    row = mixed + token[:, None] * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    key_head = head // (HEADS // KEY_HEADS)
    k = tl.load(row + (KEY_HEADS + key_head) * KEY + key[None, :], mask=live[:, None], other=0.0)
    v = tl.load(row + 2 * KEY_HEADS * KEY + head * VALUE + value[None, :], mask=live[:, None], other=0.0)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    decay, beta = decay_and_beta(decays, betas, token * gate_stride + head, live, rate, bias)
    total, unit = tl.cumsum(decay, 0), inverse_length(k, 1)
    earlier = place[:, None] > place[None, :]
    faded = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0)) * (beta * unit)[:, None] * unit[None, :]
    system = tl.where(earlier, tl.dot(k, tl.trans(k), input_precision=PRECISION) * faded, 0.0)
    inverse = inverse_of(system, place, CHUNK, PRECISION)
    at = token * HEADS + head
    of_values, of_keys = inverse * beta[None, :], inverse * (beta * unit * tl.exp(total))[None, :]
    values = tl.dot(of_values.to(v.dtype), v, input_precision=PRECISION)
    keys = tl.dot(of_keys.to(k.dtype), k, input_precision=PRECISION)
    tl.store(from_values + at[:, None] * VALUE + value[None, :], values.to(v.dtype), mask=live[:, None])
    tl.store(from_keys + at[:, None] * KEY + key[None, :], keys.to(k.dtype), mask=live[:, None])
    tl.store(totals + at, total, mask=live)


@triton.jit
def scan_kernel(
    mixed, totals, from_values, from_keys, states, befores, sources, firsts, ranges, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Goes through the chunks of one sequence, for BLOCK value dimensions of one head. Writes the state before each
    chunk (befores), and the states that the sequence keeps to their slots in `states`. Overwrites from_values with what
    each token adds to the state. totals, from_keys: of prepare_kernel. states: `ssm` of delta_step. sources, firsts,
    ranges: as of Chunks.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    place, key = tl.arange(0, CHUNK), tl.arange(0, KEY)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    of_keys = (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + key[None, :]
    of_head = (head * KEY + key[:, None]) * VALUE + value[None, :]
    source = tl.load(sources + sequence).to(tl.int64)
    state = tl.load(states + source * HEADS * KEY * VALUE + of_head, mask=source > 0, other=0.0).to(tl.float32)
    first = tl.load(firsts + sequence)
    kept = befores + first.to(tl.int64) * HEADS * KEY * VALUE + of_head
    for chunk in range(first, tl.load(firsts + sequence + 1)):
        begin, end = tl.load(ranges + 3 * chunk), tl.load(ranges + 3 * chunk + 1)
        slot = tl.load(ranges + 3 * chunk + 2).to(tl.int64)
        token, live = (begin + place).to(tl.int64), begin + place < end
        row, at = token[:, None] * (2 * KEY_HEADS * KEY + HEADS * VALUE), token * HEADS + head
        k = tl.load(mixed + row + of_keys, mask=live[:, None], other=0.0)
        last = tl.load(totals + (end - 1).to(tl.int64) * HEADS + head, mask=begin < end, other=0.0)
        total = tl.load(totals + at, mask=live, other=0.0)
        made = from_values + at[:, None] * VALUE + value[None, :]
        new = tl.load(made, mask=live[:, None], other=0.0).to(tl.float32)
        read = tl.load(from_keys + at[:, None] * KEY + key[None, :], mask=live[:, None], other=0.0)
        before = state.to(read.dtype)
        tl.store(kept, before)
        kept += HEADS * KEY * VALUE
        new -= tl.dot(read, before, input_precision=PRECISION)
        tl.store(made, new.to(read.dtype), mask=live[:, None])
        new *= tl.where(live, tl.exp(last - total) * inverse_length(k, 1), 0.0)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(k), new.to(k.dtype), input_precision=PRECISION)
        if slot > 0:
            tl.store(states + slot * HEADS * KEY * VALUE + of_head, state.to(states.dtype.element_ty))


@triton.jit
def outputs_kernel(
    mixed, totals, added, befores, ranges, out, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of one chunk, for BLOCK value dimensions of one head. mixed: outputs of the convolution,
    [tokens, channels]. totals: from prepare_kernel. added: values that the chunk's tokens add to the state (from_values
    of scan_kernel). befores: states before each chunk. ranges: as in Chunks. out: the outputs, [tokens, HEADS, VALUE].
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ranges + 3 * chunk), tl.load(ranges + 3 * chunk + 1)
    if begin == end:
        return
    place, key = tl.arange(0, CHUNK), tl.arange(0, KEY)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    token, live = (begin + place).to(tl.int64), begin + place < end
    row = mixed + token[:, None] * (2 * KEY_HEADS * KEY + HEADS * VALUE) + key[None, :]
    key_head, at = head // (HEADS // KEY_HEADS), token * HEADS + head
    q = tl.load(row + key_head * KEY, mask=live[:, None], other=0.0)
    k = tl.load(row + (KEY_HEADS + key_head) * KEY, mask=live[:, None], other=0.0)
    total = tl.load(totals + at, mask=live, other=0.0)
    new = tl.load(added + at[:, None] * VALUE + value[None, :], mask=live[:, None], other=0.0)
    of_state = ((chunk.to(tl.int64) * HEADS + head) * KEY + key[:, None]) * VALUE + value[None, :]
    made = tl.dot(q, tl.load(befores + of_state), input_precision=PRECISION) * tl.exp(total)[:, None]
    seen = (place[:, None] >= place[None, :]) & live[:, None]
    faded = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * faded * inverse_length(k, 1)[None, :]
    made += tl.dot(scores.to(new.dtype), new, input_precision=PRECISION)
    made *= (inverse_length(q, 1) * (KEY**-0.5))[:, None]
    tl.store(out + at[:, None] * VALUE + value[None, :], made.to(out.dtype.element_ty), mask=live[:, None])


def delta_scan(
    mixed: Tensor, beta: Tensor, decay: Tensor, layer: Recurrence, conv: Tensor, ssm: Tensor, chunks: Chunks
) -> Tensor:
    """Computes all tokens of packed sequences, and returns outputs [tokens, value heads, value_dim]. layer, conv and
    ssm: as in delta_step. mixed, beta and decay: as in delta_step, but with a row for each token. chunks: the sequences
    and the slots of their states.
    """
    (rows, channels), taps = mixed.shape, layer.conv.shape[1]
    blocks = triton.cdiv(channels, _CHANNELS)
    of_conv = {"CHANNELS": channels, "TAPS": taps, "BLOCK": _CHANNELS}
    convolved = mixed.new_empty(rows, channels)
    places = chunks.begins, chunks.sources
    conv_kernel[rows, blocks](
        mixed, layer.conv, conv, chunks.sequences, *places, convolved, mixed.stride(0), **of_conv
    )  # fmt: skip
    conv_state_kernel[len(chunks.writes), blocks](mixed, conv, *places, chunks.writes, mixed.stride(0), **of_conv)
    return _scan(convolved, beta, decay, layer, ssm, chunks)


def _scan(convolved: Tensor, beta: Tensor, decay: Tensor, layer: Recurrence, ssm: Tensor, chunks: Chunks) -> Tensor:
    num_chunks, heads, key, value = len(chunks.ranges), layer.num_value_heads, layer.key_dim, layer.value_dim
    shape: dict[str, Any] = {"HEADS": heads, "KEY_HEADS": layer.num_key_heads, "KEY": key, "VALUE": value}
    shape |= {"CHUNK": CHUNK_TOKENS, "PRECISION": "tf32x3" if convolved.dtype == torch.float32 else "tf32"}
    totals = torch.empty(len(convolved), heads, dtype=torch.float32, device=convolved.device)
    added, from_keys = (convolved.new_empty(len(convolved), heads, dim) for dim in (value, key))
    befores = convolved.new_empty(num_chunks, heads, key, value)
    prepare_kernel[num_chunks, heads](
        convolved, beta, decay, layer.rate, layer.bias, chunks.ranges, totals, added, from_keys, beta.stride(0),
        **shape,
    )  # fmt: skip
    block = min(_SCAN_VALUES, value)
    scan_kernel[len(chunks.sources), heads, value // block](
        convolved, totals, added, from_keys, ssm, befores, chunks.sources, chunks.firsts, chunks.ranges, BLOCK=block,
        num_stages=2, **shape,
    )  # fmt: skip
    out, block = torch.empty_like(added), min(_OUTPUT_VALUES, value)
    outputs_kernel[num_chunks, heads, value // block](
        convolved, totals, added, befores, chunks.ranges, out, BLOCK=block, **shape
    )
    return out
