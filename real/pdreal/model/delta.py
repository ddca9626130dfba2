"""Gated delta nets: a convolution over the last tokens, then a recurrence whose state is one matrix for each head.

    state = exp(decay) * state + key x (beta * (value - key . state)),  output = query . state

where the state that key reads has decayed already. The torch functions are the oracle of pdkernels.delta, which
computes them on GPUs. Chunks are computed as in transformers 5.19 (models/qwen3_5/modeling_qwen3_5.py:291,
torch_chunk_gated_delta_rule): within a chunk all tokens at once, from chunk to chunk with the state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pdreal.control.tasks import PrefillBatch, PrefillInput, StateUse
from pdreal.memory.states import StatePool

if TYPE_CHECKING:
    from pdkernels.delta import Chunks

CHUNK_TOKENS = 64
_L2_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaWeights:
    """Weights of one linear-attention layer (gated delta net), for the heads of a rank."""

    into: Tensor
    """Weight matrix [outputs, hidden] that makes queries, keys, values, gates, betas and decays from the hidden state.
    """
    conv: Tensor
    """[channels, conv_tokens]. Channels: queries, keys and values of all heads."""
    rate: Tensor
    """-exp(A_log), the factor on decays, [value heads] in fp32."""
    bias: Tensor
    """Added to decays before softplus, [value heads] in fp32."""
    norm: Tensor
    """Weight of the norm on a head's outputs, [value_dim]."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> list[int]:
        """Widths of the projections: the convolution's input, gates, betas, decays."""
        return [len(self.conv), self.num_value_heads * self.value_dim, self.num_value_heads, self.num_value_heads]


class Inputs(NamedTuple):
    """Inputs of the recurrence in fp32, for each token and value head."""

    query: Tensor
    """Queries, [tokens, heads, key_dim], each of length 1 / sqrt(key_dim)."""
    key: Tensor
    """Keys, [tokens, heads, key_dim]. Each key is scaled to Euclidean norm 1."""
    value: Tensor
    """Values, [tokens, heads, value_dim]."""
    decay: Tensor
    """Logarithm of the factor on the state, [tokens, heads]."""
    beta: Tensor
    """Factor on the change that a token makes to the state, [tokens, heads]."""

    def part(self, tokens: slice) -> "Inputs":
        return Inputs(*(part[tokens] for part in self))


def inputs_of(mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Inputs:
    """Returns the inputs of the gated delta rule's recurrence. mixed: outputs of the convolution, [tokens, channels].
    beta, decay: outputs of the projections of the same names, [tokens, value heads].
    """
    keys = weights.num_key_heads * weights.key_dim
    query, key, value = mixed.float().split((keys, keys, weights.num_value_heads * weights.value_dim), dim=1)
    group = weights.num_value_heads // weights.num_key_heads
    query, key = (
        _normalised(part.unflatten(1, (-1, weights.key_dim))).repeat_interleave(group, dim=1) for part in (query, key)
    )
    return Inputs(
        query * weights.key_dim**-0.5,
        key,
        value.unflatten(1, (-1, weights.value_dim)),
        weights.rate * functional.softplus(decay.float() + weights.bias),
        beta.sigmoid().float(),
    )


def _normalised(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)


def convolve(mixed: Tensor, before: Tensor, conv: Tensor) -> Tensor:
    """Returns silu of the convolution of [sequences, tokens, channels]. before: the inputs of the tokens before,
    [sequences, channels, conv_tokens - 1].
    """
    inputs = torch.cat((before, mixed.transpose(1, 2)), dim=2)
    out = functional.conv1d(inputs, conv[:, None], groups=len(conv))
    return functional.silu(out).transpose(1, 2)


def recur(given: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each of many sequences. state: [sequences, heads, key_dim, value_dim] in fp32. Returns
    outputs [sequences, heads, value_dim] and the new states.
    """
    state = state * given.decay.exp()[..., None, None]
    read = torch.einsum("shkv,shk->shv", state, given.key)
    state = state + given.key[..., None] * ((given.value - read) * given.beta[..., None])[..., None, :]
    return torch.einsum("shkv,shk->shv", state, given.query), state


def scan(given: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes gated linear attention (the delta rule) for all tokens of one sequence, chunk by chunk. given: queries,
    keys, values, decays and betas of the tokens. state: [heads, key_dim, value_dim] in fp32, before the first token.
    Returns outputs [tokens, heads, value_dim] and the state after the last token.
    """
    num_tokens, chunk = len(given.key), CHUNK_TOKENS
    padding = -num_tokens % chunk  # tokens without effect: their key is zero and nothing decays
    parts = (functional.pad(part.transpose(0, -1), (0, padding)).transpose(0, -1) for part in given)
    query, key, value, decay, beta = (part.unflatten(0, (-1, chunk)).transpose(1, 2) for part in parts)
    total = decay.cumsum(dim=2)  # [chunks, heads, tokens]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(1)
    faded = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = (key * beta[..., None]) @ key.transpose(2, 3) * faded
    from_values, from_state = (
        torch.linalg.solve_triangular(system, part * beta[..., None], upper=False, unitriangular=True)
        for part in (value, key * total.exp()[..., None])
    )
    attended = query @ key.transpose(2, 3) * faded
    query, key = query * total.exp()[..., None], key * (total[..., -1:] - total).exp()[..., None]
    out = torch.empty_like(from_values)
    for i in range(len(key)):
        new = from_values[i] - from_state[i] @ state
        out[i] = query[i] @ state + attended[i] @ new
        state = state * total[i, :, -1].exp()[:, None, None] + key[i].transpose(1, 2) @ new
    return out.transpose(1, 2).flatten(0, 1)[:num_tokens], state


Recurrence = Callable[[int, Tensor, Tensor, Tensor, DeltaWeights], Tensor]
"""Returns outputs of heads, [tokens, value heads, value_dim], and changes states. Arguments: the layer's number among
layers with states; inputs of the convolution, [tokens, channels]; betas and decays, projections [tokens, value heads];
weights.
"""


def prefill_recurrence(states: StatePool, batch: PrefillBatch) -> Recurrence:
    """Returns the recurrence over chunks of sequences. Each chunk continues from a state, and writes the state after
    its last token and, if StateUse.tracked is not 0, a state within the chunk.
    """
    if states.is_cuda:
        return KernelPrefill(states, chunks_of(batch, states.planes[0].device))
    return DeltaPrefill(states, batch)


class KernelPrefill:
    """Computes the convolution and the recurrence of a gated delta net over the chunks of a prefill forward, with GPU
    kernels.
    """

    def __init__(self, states: StatePool, chunks: "Chunks") -> None:
        self._states = states
        self._chunks = chunks

    def __call__(self, layer: int, mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
        from pdkernels.delta import delta_scan  # noqa: PLC0415  Triton is needed on GPUs only

        scanned: Tensor = delta_scan(mixed, beta, decay, weights, *self._states.layer(layer), self._chunks)
        return scanned


class DeltaPrefill:
    """Computes the convolution and the recurrence over the chunks of a prefill forward, with torch."""

    def __init__(self, states: StatePool, batch: PrefillBatch) -> None:
        self._states = states
        self._batch = batch

    def __call__(self, layer: int, mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
        chunks = self._batch.chunks
        lengths = [len(chunk.tokens) for chunk in chunks]
        parts = zip(chunks, mixed.split(lengths), beta.split(lengths), decay.split(lengths), strict=True)
        return torch.cat([self._chunk(layer, *part, weights) for part in parts])

    def _chunk(
        self, layer: int, chunk: PrefillInput, mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights
    ) -> Tensor:
        conv, ssm = self._states.layer(layer)
        use = chunk.state
        assert use is not None
        before = conv[use.source] if use.source else torch.zeros_like(conv[0])
        state = ssm[use.source].float() if use.source else torch.zeros_like(ssm[0], dtype=torch.float32)
        given = inputs_of(convolve(mixed[None], before[None], weights.conv)[0], beta, decay, weights)
        seen = torch.cat((before, mixed.t()), dim=1)
        num_before, outputs, begin = before.shape[1], [], 0
        for end, slot in _written_states(use, len(mixed)):
            if end > begin:
                out, state = scan(given.part(slice(begin, end)), state)
                outputs.append(out)
            conv[slot], ssm[slot] = seen[:, end : end + num_before], state.to(ssm.dtype)
            begin = end
        return torch.cat(outputs).to(mixed.dtype)


def chunks_of(batch: PrefillBatch, device: torch.device, *, num_padding: int = 0) -> "Chunks":
    """Returns the prompt chunks of a batch in the form that the linear-attention kernels take. If num_padding is above
    0, a last chunk has this number of tokens that belong to no request.
    """
    from pdkernels.delta import Chunks  # noqa: PLC0415  Triton is needed on GPUs only

    uses = [chunk.state for chunk in batch.chunks if chunk.state is not None]
    lengths = [len(chunk.tokens) for chunk in batch.chunks]
    if num_padding:
        uses.append(StateUse(0, 0))
        lengths.append(num_padding)
    left = [_written_states(use, length) for use, length in zip(uses, lengths, strict=True)]
    return Chunks.of(lengths, left, [use.source for use in uses], device)


def _written_states(use: StateUse, num_tokens: int) -> list[tuple[int, int]]:
    """Returns each state that a chunk writes, as a pair: the number of the chunk's first tokens that the state
    includes, and the state's slot.
    """
    tracked = [(use.tracked_tokens, use.tracked)] if use.tracked else []
    return [*tracked, (num_tokens, use.own)]


class DeltaDecode:
    """The recurrence over one token of each sequence. States change in place. slots, tracked: slots of each sequence
    for its state, and for a copy of its new state (0: no copy), [sequences] in int32.
    """

    def __init__(self, states: StatePool, slots: Tensor, tracked: Tensor) -> None:
        self._states = states
        self._slots = slots
        self._tracked = tracked

    def __call__(self, layer: int, mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
        conv, ssm = self._states.layer(layer)
        if self._states.is_cuda:
            from pdkernels.delta import delta_step  # noqa: PLC0415

            made: Tensor = delta_step(mixed, beta, decay, weights, conv, ssm, self._slots, self._tracked)
            return made
        before = conv[self._slots]
        given = inputs_of(convolve(mixed[:, None], before, weights.conv)[:, 0], beta, decay, weights)
        out, state = recur(given, ssm[self._slots].float())
        seen = torch.cat((before, mixed[..., None]), dim=2)[..., 1:]
        for slots in (self._tracked, self._slots):  # place 0 belongs to nobody
            conv[slots], ssm[slots] = seen, state.to(ssm.dtype)
        return out.to(mixed.dtype)


def no_states(layer: int, mixed: Tensor, beta: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
    """Takes the place of the recurrence in models without linear attention. Raises NotImplementedError if called."""
    raise NotImplementedError("the model has no layers of linear attention")


def gated_norm(heads: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the normalised outputs of heads times silu of their gates. heads, gates: [tokens, heads, value_dim].
    weight: weights of the norm, [value_dim]. eps: added to the mean square of a head.
    """
    normed = functional.rms_norm(heads.float(), weight.shape, eps=eps).to(heads.dtype)
    return ((weight * normed) * functional.silu(gates.float())).to(heads.dtype)
