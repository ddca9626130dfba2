"""The kernels in plain torch, except those of pdkernels.delta. The tests compare the kernels with these functions,
which are short and define what each kernel computes.
"""

from collections.abc import Sequence

import torch

from pdkernels.layout import KvLayout, Pool


def read_tokens(plane: torch.Tensor, layout: KvLayout, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the first `tokens` tokens of a page list, from one plane (K or V of one layer): [tokens, heads,
    head_dim].
    """
    page, within = _positions(layout, pages, tokens)
    return plane[page, :, within] if layout.order == "HND" else plane[page * layout.page_size + within]


def write_tokens(plane: torch.Tensor, layout: KvLayout, pages: torch.Tensor, heads: range, kv: torch.Tensor) -> None:
    """Writes kv, [tokens, len(heads), head_dim], into the given heads of the given pages, in order."""
    page, within = _positions(layout, pages, len(kv))
    part = slice(heads.start, heads.stop)
    if layout.order == "HND":
        plane[page, part, within] = kv
    else:
        plane[page * layout.page_size + within, part] = kv


def gather_reference(
    pool: Pool, pages: torch.Tensor, tokens: int, *, heads: range | None = None, slices: int = 1
) -> torch.Tensor:
    """Returns the staging span as flat bytes: [slice, plane, token, head, head_dim]. Arguments as of gather."""
    heads = pool.layout.check_heads(heads, slices)
    bits = _as_bits(pool.planes)
    kv = torch.stack([read_tokens(plane, pool.layout, pages, tokens) for plane in bits])[:, :, heads.start : heads.stop]
    by_slice = kv.unflatten(2, (slices, -1)).permute(2, 0, 1, 3, 4)
    return by_slice.contiguous().view(torch.uint8).flatten()


def scatter_reference(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    *,
    heads: range | None = None,
    writers: int = 1,
) -> None:
    """Writes a staging span [writer, plane, token, head, head_dim], as gather_reference makes, into the pages of a
    pool. writers: number of source ranks that share the heads evenly.
    """
    heads = pool.layout.check_heads(heads, writers)
    planes = _as_bits(pool.planes)
    shape = (writers, len(planes), tokens, len(heads) // writers, pool.layout.head_dim)
    kv = staging.view(planes[0].dtype).view(shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
    for plane, part in zip(planes, kv, strict=True):
        write_tokens(plane, pool.layout, pages, heads, part)


def push_reference(
    source: Pool,
    source_pages: torch.Tensor,
    target: Pool,
    target_pages: torch.Tensor,
    tokens: int,
    *,
    source_heads: range | None = None,
    target_heads: range | None = None,
) -> None:
    """Copies the first `tokens` tokens of a page list from one pool to another. The function does this by a gather and
    a scatter; the kernel needs no staging between them. source_heads, target_heads: heads to read and to write; None:
    all heads.
    """
    staging = gather_reference(source, source_pages, tokens, heads=source_heads).to(target.device)
    scatter_reference(target, target_pages, tokens, staging, heads=target_heads)


def gather_fp8_reference(
    pool: Pool, pages: torch.Tensor, tokens: int, scales: torch.Tensor, *, heads: range | None = None, slices: int = 1
) -> torch.Tensor:
    """Returns the staging span in float8_e4m3, as flat bytes. scales: one for each plane (K or V of one layer). Each
    plane is divided by its scale, and clamped to the range of e4m3.
    """
    heads = pool.layout.check_heads(heads, slices)
    kv = torch.stack([read_tokens(plane, pool.layout, pages, tokens) for plane in pool.planes])
    scaled = kv[:, :, heads.start : heads.stop].float() / scales[:, None, None, None]
    eight_bit = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return eight_bit.unflatten(2, (slices, -1)).permute(2, 0, 1, 3, 4).flatten()


def scatter_fp8_reference(
    pool: Pool,
    pages: torch.Tensor,
    tokens: int,
    staging: torch.Tensor,
    scales: torch.Tensor,
    *,
    heads: range | None = None,
    writers: int = 1,
) -> None:
    """Writes a staging span in fp8, as gather_fp8_reference makes, into the pages of a pool in a wider type, such as
    bf16. scales: one factor for each plane (K or V of one layer), which multiplies the plane's values. writers: number
    of source ranks that share the heads evenly.
    """
    heads = pool.layout.check_heads(heads, writers)
    shape = (writers, len(pool.planes), tokens, len(heads) // writers, pool.layout.head_dim)
    scaled = staging.view(torch.float8_e4m3fn).float().view(shape) * scales[None, :, None, None, None]
    kv = scaled.permute(1, 2, 0, 3, 4).flatten(2, 3).to(pool.layout.dtype)
    for plane, part in zip(pool.planes, kv, strict=True):
        write_tokens(plane, pool.layout, pages, heads, part)


def append_reference(
    key_pages: torch.Tensor, value_pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes the K and V of new tokens, [tokens, heads, head_dim], to their slots. A token with a negative slot is
    padding, and is skipped. Arguments as of append.
    """
    used = slots >= 0
    for plane, new in ((key_pages, keys), (value_pages, values)):
        if plane.dim() == 4:
            page_size = plane.shape[2]
            plane[slots[used] // page_size, :, slots[used] % page_size] = new[used]
        else:
            plane[slots[used]] = new[used]


def paged_decode_reference(
    query: torch.Tensor,
    pool: Pool,
    layer: int,
    block_table: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Returns the attention of one new token per sequence, [batch, query_heads, head_dim], in the query's data type.
    The function computes in float32 through torch's SDPA. A sequence without tokens gets zeros. layer: index of the
    layer in the pool. block_table, scale: as of paged_decode. lengths: cached tokens of each sequence, including the
    new one. window: number of last tokens that the new token sees, including itself; 0: all.
    """
    out = torch.zeros_like(query)
    group = query.shape[1] // pool.layout.heads
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        k, v = (
            read_tokens(plane, pool.layout, block_table[row], length)[-window:]
            .float()
            .repeat_interleave(group, dim=1)
            .transpose(0, 1)
            for plane in (pool.keys[layer], pool.values[layer])
        )
        q = query[row, :, None].float()
        out[row] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[:, 0].to(query.dtype)
    return out


def latent_decode_reference(
    query: torch.Tensor, latents: torch.Tensor, slots: Sequence[torch.Tensor], rank: int, scale: float
) -> torch.Tensor:
    """Returns the attention of one new token per sequence to the latents in the sequence's slots, [batch, query_heads,
    rank], computed in float64, in the query's data type. A sequence without slots gets zeros. slots: for each sequence,
    the slots of its tokens. rank: width of the part of a latent that serves as value. scale: factor on the scores.
    """
    out = query.new_zeros(*query.shape[:2], rank)
    for row, own in enumerate(slots):
        if len(own):
            seen = latents[own, 0].double()
            weights = (query[row].double() @ seen.T * scale).softmax(-1)
            out[row] = (weights @ seen[:, :rank]).to(out.dtype)
    return out


def packed_prefill_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_new: Sequence[int],
    num_all: Sequence[int],
    window: int = 0,
) -> torch.Tensor:
    """Returns the causal attention of packed sequences, computed in float64, in the query's data type. num_new: number
    of last tokens of each sequence, which have queries. num_all: number of all tokens of each sequence, which have keys
    and values. window: number of last tokens that each token sees, including itself; 0: all.
    """
    group = query.shape[1] // key.shape[1]
    parts = zip(query.split(num_new), key.split(num_all), value.split(num_all), strict=True)
    out = []
    for q, *kv in parts:
        k, v = (x.double().repeat_interleave(group, dim=1) for x in kv)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
        is_seen = torch.ones_like(scores[0], dtype=torch.bool).tril(len(k) - len(q))
        if window:
            is_seen = is_seen.triu(len(k) - len(q) - window + 1)
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out).to(query.dtype)


def _positions(layout: KvLayout, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    token = torch.arange(tokens, device=pages.device)
    return pages.long()[token // layout.page_size], token % layout.page_size


def _as_bits(planes: list[torch.Tensor]) -> list[torch.Tensor]:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[planes[0].element_size()]
    return [plane.view(bits) for plane in planes]
