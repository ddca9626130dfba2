"""Attention of a forward's tokens: over packed sequences, or over a paged cache in prefill and in decode."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from pdreal.control.tasks import PrefillBatch
from pdreal.memory.paged_kv import PagedKv
from pdreal.memory.states import StatePool
from pdreal.model.delta import DeltaDecode, no_states, prefill_recurrence
from pdreal.model.weights import LatentHeads

if TYPE_CHECKING:
    from pdkernels import DecodeWorkspace
    from torch.nn.attention.bias import CausalBias

    from pdreal.model.transformer import Transformer

torch.backends.cuda.enable_cudnn_sdp(False)
"""cuDNN, which would be preferred, builds a plan for each new length of a prompt: 46 ms for 917 tokens on an H200."""

_FLASH_DTYPES = torch.bfloat16, torch.float16


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int = 0) -> Tensor:
    """Returns the attention of a sequence's last tokens to all its tokens, [tokens, heads, head_dim]. Several query
    heads may share a key head. scale: factor on scores; None: 1 / sqrt(head_dim). window: number of last tokens that a
    token sees, including itself; 0: all.
    """
    if window:  # nobody sees what lies before the first one's window
        first = max(0, len(key) - len(query) - window + 1)
        key, value = key[first:], value[first:]
    num_new, num_all = len(query), len(key)
    whole, grouped = num_new == num_all, query.shape[1] != key.shape[1]
    mask: Tensor | CausalBias | None = None
    if window and num_new > 1:
        sees = torch.ones(num_new, num_all, dtype=torch.bool, device=query.device).tril(num_all - num_new)
        mask, whole = sees.triu(num_all - num_new - window + 1), False
    elif whole or num_new == 1:
        pass
    elif query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415  it brings torch's compiler: 1.4 s

        mask = causal_lower_right(num_new, num_all)
    else:
        mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=whole and num_new > 1, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


class PackedAttention:
    """Causal attention in packed sequences: the last tokens of each sequence attend to its earlier tokens and to
    themselves.
    """

    def __init__(self, num_new: Sequence[int], num_all: Sequence[int], device: torch.device) -> None:
        """num_all: number of tokens of each sequence. num_new: number of last tokens of each sequence that attend."""
        self._num_new = num_new
        self._longest = max(num_new), max(num_all)
        bounds = [list(accumulate(lengths, initial=0)) for lengths in (num_new, num_all)]
        self._slices = [[slice(*ends) for ends in pairwise(b)] for b in bounds]
        self._bounds = torch.tensor(bounds, dtype=torch.int32).to(device).unbind()

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int = 0
    ) -> Tensor:
        """Returns the attention of new tokens, [all new tokens, heads, value_dim]. query: [all new tokens, heads,
        head_dim]. key and value: [all tokens, KV heads, head_dim]; values may be narrower than keys.

        scale: factor on scores; None: 1 / sqrt(head_dim). window: number of last tokens that a token sees, including
        itself; 0: all.
        """
        if query.is_cuda and query.dtype in _FLASH_DTYPES:
            return self._on_gpu(query, key, value, scale, window)
        return torch.cat(
            [
                causal_attention(query[new], key[whole], value[whole], scale, window)
                for new, whole in zip(*self._slices, strict=True)
            ]
        )

    def _on_gpu(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
        """Computes the attention by the kernel that is fastest on GPUs. Arguments are those of `__call__`."""
        from pdkernels.attention.prefill import HEAD_DIMS, is_fastest, packed_prefill  # noqa: PLC0415

        if missing := key.shape[2] - value.shape[2]:
            padded = self._flash(query, key, pad(value, (0, missing)), scale, window)
            return padded[..., : value.shape[2]]
        is_short = window and query.shape[2] in HEAD_DIMS  # no context that would have to be split
        if scale is None and (is_short or is_fastest(query, self._num_new)):
            new_bounds, all_bounds = self._bounds
            return packed_prefill(query, key, value, new_bounds, all_bounds, self._longest[0], window)
        return self._flash(query, key, value, scale, window)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
        """Runs flash attention. A single sequence is passed without packing, because the kernel then splits its context
        over idle multiprocessors.
        """
        alone = len(self._slices[0]) == 1
        bounds = (None, None) if alone else self._bounds
        if alone:
            query, key, value = query[None], key[None], value[None]
        dropout, is_causal, with_mask = 0.0, True, False
        # not torch.nn.attention.varlen: its signature changes from version to version, and it costs more host time
        flash = torch.ops.aten._flash_attention_forward.default  # noqa: SLF001
        given = *bounds, *self._longest, dropout, is_causal, with_mask
        sight = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        out: Tensor = flash(query, key, value, *given, scale=scale, **sight)[0]
        return out[0] if alone else out


class PagedPrefill:
    """Attention of chunks of several sequences. Each chunk attends to its sequence's context in the cache, and to
    itself.
    """

    def __init__(
        self,
        kv: PagedKv,
        batch: PrefillBatch,
        device: torch.device,
        on_kv: Callable[[int], None],
        states: StatePool | None = None,
    ) -> None:
        """on_kv: called with the index of each layer when the layer's keys and values are written or, on a GPU, when
        their writing is queued in the stream. states: states of linear attention; None: the model has none.
        """
        self.delta = no_states if states is None else prefill_recurrence(states, batch)
        self._kv = kv
        self._on_kv = on_kv
        chunks = batch.chunks
        slots = [kv.slots(chunk.page_table, 0, chunk.num_kv_tokens) for chunk in chunks]
        new = [s[chunk.num_context_tokens :] for s, chunk in zip(slots, chunks, strict=True)]
        self._new_slots = torch.cat(new).to(device)
        has_context = any(chunk.num_context_tokens for chunk in chunks)
        self._rows = kv.rows(torch.cat(slots).to(device)) if has_context else None
        """Rows of contexts and chunks. None: no chunk has a context, so the cache is not read."""
        self._attention = PackedAttention([len(c.tokens) for c in chunks], [c.num_kv_tokens for c in chunks], device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
        key, value = self._with_context(layer, key, value)
        return self._attention(query, key, value, window=window)

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        (latent,) = self._with_context(layer, latent)
        return self._attention(query, *heads.expand(latent), heads.scale)

    def _with_context(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Appends new keys and values to the cache. Returns keys and values of each sequence's context, followed by the
        new ones.
        """
        new = self._kv.append(layer, self._new_slots, *new)
        self._on_kv(layer)
        return new if self._rows is None else self._kv.read(layer, self._rows)


class GatheredDecode:
    """Attention of one token per sequence, for CPUs. The sequences' pages are gathered first."""

    def __init__(
        self,
        kv: PagedKv,
        num_kv_tokens: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        delta: DeltaDecode | None = None,
    ) -> None:
        """num_kv_tokens: for each sequence, number of tokens before the new token. delta: the recurrence of linear
        attention; None: the model has none.
        """
        self.delta = delta or no_states
        self._kv = kv
        lengths = [num_tokens + 1 for num_tokens in num_kv_tokens]
        slots = [kv.slots(table, 0, length) for table, length in zip(page_tables, lengths, strict=True)]
        self._new_slots = torch.stack([s[-1] for s in slots])
        self._rows = kv.rows(torch.cat(slots))
        self._attention = PackedAttention([1] * len(lengths), lengths, self._rows.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
        self._kv.append(layer, self._new_slots, key, value)
        key, value = self._kv.read(layer, self._rows)
        return self._attention(query, key, value, window=window)

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        self._kv.append(layer, self._new_slots, latent)
        (latents,) = self._kv.read(layer, self._rows)
        attended = self._attention(heads.absorb(query), latents, latents[..., : heads.rank], heads.scale)
        return heads.read_out(attended)


class KernelDecode:
    """Attention of the last tokens of each sequence, for GPUs and their CUDA graphs. Triton kernels read the pages
    directly.
    """

    def __init__(
        self,
        kv: PagedKv,
        model: "Transformer",
        positions: Tensor,
        page_tables: Tensor,
        num_new: int = 1,
        delta: DeltaDecode | None = None,
    ) -> None:
        """positions: number of tokens before the first new token of each sequence, [batch]. page_tables: [batch,
        pages]. Both are int32 tensors on the device. num_new: number of new tokens of each sequence. delta: the
        recurrence of linear attention; None: the model has none.
        """
        self.delta = delta or no_states
        from pdkernels import decode_workspace, latent_workspace  # noqa: PLC0415  Triton is needed on GPUs only

        self._kv = kv
        self._num_new = num_new
        self._lengths = positions + num_new
        new = positions[:, None] + torch.arange(num_new, dtype=positions.dtype, device=positions.device)
        pages = page_tables.gather(1, (new // kv.page_size).long())
        self._new_slots = (pages * kv.page_size + new % kv.page_size).flatten()
        batch, heads, device = len(positions), model.num_query_heads, positions.device
        self._workspaces: dict[int, DecodeWorkspace] = {}
        """Workspaces by window. 0: of layers without a window."""
        for window in model.config.windows:
            if (latent := model.config.latent) is None:
                shape = batch, heads, model.num_kv_heads, model.config.head_dim
                workspace = decode_workspace(*shape, device, num_new=num_new)
            else:
                workspace = latent_workspace(batch, heads, latent.kv_lora_rank, device)
            workspace.divide(self._lengths, window)
            self._workspaces[window] = workspace
        self._sequences = page_tables, self._lengths

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
        from pdkernels import paged_decode  # noqa: PLC0415

        self._kv.append(layer, self._new_slots, key, value)
        keys, values = self._kv.layer(layer)
        where: dict[str, Any] = {"page_size": self._kv.page_size, "workspace": self._workspaces[window]}
        attended: Tensor = paged_decode(query, keys, values, *self._sequences, num_new=self._num_new, **where)
        return attended

    def latent(self, layer: int, query: Tensor, latent: Tensor, heads: LatentHeads) -> Tensor:
        from pdkernels import latent_decode  # noqa: PLC0415

        self._kv.append(layer, self._new_slots, latent)
        (latents,) = self._kv.layer(layer)
        query = heads.absorb(query)
        where: dict[str, Any] = {"page_size": self._kv.page_size, "workspace": self._workspaces[0]}
        return heads.read_out(latent_decode(query, latents, *self._sequences, scale=heads.scale, **where))
