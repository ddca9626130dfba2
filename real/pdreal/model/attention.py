"""Attention of a forward's tokens: over themselves alone, or over a paged cache in prefill and in decode."""

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pdreal.batches import DecodeBatch, PrefillBatch
from pdreal.paged_kv import PagedKv

torch.backends.cuda.enable_cudnn_sdp(False)
"""cuDNN, which would be preferred, builds a plan for each new length of a prompt: 46 ms for 917 tokens on an H200."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of the last tokens of a sequence over all. [tokens, heads, head_dim]; query heads may share one of the keys."""
    num_new, num_all = len(query), len(key)
    whole, grouped = num_new == num_all, query.shape[1] != key.shape[1]
    mask: Tensor | CausalBias | None = None
    if whole or num_new == 1:
        pass
    elif query.is_cuda:
        mask = causal_lower_right(num_new, num_all)
    else:
        mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=whole and num_new > 1, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


class WholeSequence:
    """No cache: the tokens are one sequence from its beginning."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value)


class PagedPrefill:
    """Chunks of several sequences, each over its own context in the cache and itself."""

    def __init__(self, kv: PagedKv, batch: PrefillBatch, device: torch.device, on_kv: Callable[[int], None]) -> None:
        """on_kv is called with each layer when its keys and values have been written, or will be on the stream."""
        self._kv = kv
        self._on_kv = on_kv
        bounds = accumulate((len(chunk.tokens) for chunk in batch.chunks), initial=0)
        slots = [kv.slots(chunk.page_table, 0, chunk.num_kv_tokens) for chunk in batch.chunks]
        new = [s[chunk.num_context_tokens :] for s, chunk in zip(slots, batch.chunks, strict=True)]
        self._new_slots = torch.cat(new).to(device)
        self._chunks = [
            (slice(*rows), s.to(device) if chunk.num_context_tokens else None)
            for rows, s, chunk in zip(pairwise(bounds), slots, batch.chunks, strict=True)
        ]
        """Of each its tokens, and the slots of context and tokens if it has a context."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kv.append(layer, self._new_slots, key, value)
        self._on_kv(layer)
        attended = []
        for rows, slots in self._chunks:
            keys, values = (key[rows], value[rows]) if slots is None else self._kv.read(layer, slots)
            attended.append(causal_attention(query[rows], keys, values))
        return attended[0] if len(attended) == 1 else torch.cat(attended)


class GatheredDecode:
    """One token of each sequence, over pages that are gathered: for CPUs."""

    def __init__(self, kv: PagedKv, batch: DecodeBatch) -> None:
        self._kv = kv
        self._slots = [
            kv.slots(table, 0, num_kv_tokens + 1)
            for table, num_kv_tokens in zip(batch.page_tables, batch.num_kv_tokens, strict=True)
        ]
        self._new_slots = torch.stack([slots[-1] for slots in self._slots])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._kv.append(layer, self._new_slots, key, value)
        context = [self._kv.read(layer, slots) for slots in self._slots]
        return torch.cat([causal_attention(q[None], *c) for q, c in zip(query, context, strict=True)])


class KernelDecode:
    """One token of each sequence, by Triton kernels over the pages where they lie: for GPUs, and their graphs."""

    def __init__(self, kv: PagedKv, num_query_heads: int, positions: Tensor, page_tables: Tensor) -> None:
        """Tensors on the device, int32: positions [batch] of the tokens, page_tables [batch, pages]."""
        from pdkernels import DecodeWorkspace  # noqa: PLC0415  Triton is needed on GPUs only

        self._kv = kv
        self._page_tables = page_tables
        self._lengths = positions + 1
        pages = page_tables.gather(1, (positions // kv.page_size)[:, None].long())[:, 0]
        self._new_slots = pages * kv.page_size + positions % kv.page_size
        num_kv_heads, head_dim = kv.planes[0].shape[1:]
        self._workspace = DecodeWorkspace(len(positions), num_query_heads, num_kv_heads, head_dim, positions.device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from pdkernels import append, paged_decode  # noqa: PLC0415

        keys, values = self._kv.layer(layer)
        append(keys, values, self._new_slots, key, value)
        attended: Tensor = paged_decode(
            query,
            keys,
            values,
            self._page_tables,
            self._lengths,
            page_size=self._kv.page_size,
            workspace=self._workspace,
        )
        return attended
