"""Measures attention and append: one layer with 32 query heads and 8 KV heads of dimension 128, in bf16."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from pdkernels.attention.append import append
from pdkernels.attention.decode import decode_workspace, paged_decode
from pdkernels.attention.prefill import packed_prefill
from pdkernels.bench.cases import Case, Model
from pdkernels.bench.rows import Row
from pdkernels.bench.staging import Bench
from pdkernels.bench.timing import event_us, graph_us, submit_us

_LAYER = Model("gqa-32-8-128-bf16", 1, 8, 128, torch.bfloat16)
_PROMPTS = 512, 1024, 2048, 4096, 8192, 16384
_SHAPES = ((1, 1024), (1, 16384), (8, 4096), (32, 4096), (64, 1024), (64, 4096), (64, 16384))  # batch, context
_SPREADS = ((10, 2240, 23), (4, 4096, 64), (16, 2048, 16), (64, 1024, 64), (64, 4096, 8))
"""Cases with contexts of different length: batch size, mean context in tokens, and ratio of the longest context to the
shortest.
"""


def attention(bench: Bench, *, quick: bool) -> Iterator[Row]:
    """Measures the attention of prompts, decode attention and append, by our kernels and by torch's, and yields a row
    for each measurement. In the row, `tokens` is the length of the prompt or the mean context. For decode and append,
    the model's name is followed by the number of sequences and, if contexts differ, their smallest and largest length.
    quick: True: decode attention is measured with one page size only.
    """
    for tokens in _PROMPTS:
        yield from _prefill(tokens)
    for page_size in (16,) if quick else (1, 16, 64):
        for batch, context in _SHAPES:
            yield from _decode(bench, [context] * batch, page_size)
        for batch, context, spread in _SPREADS:
            yield from _decode(bench, spread_lengths(batch, context, spread), page_size)


def spread_lengths(batch: int, mean: int, spread: int) -> list[int]:
    """Returns lengths with about this mean, in geometric steps. The last length is `spread` times the first."""
    weights = [spread ** (i / (batch - 1)) for i in range(batch)]
    return [max(1, round(mean * batch * weight / sum(weights))) for weight in weights]


def _prefill(tokens: int) -> Iterator[Row]:
    """Measures the attention of one prompt without context, by our kernel and by torch's flash attention, and yields a
    row for each. tokens: length of the prompt.
    """
    packed = torch.randn(tokens, 32 + 16, 128, dtype=torch.bfloat16, device="cuda")
    query, key, value = packed.split((32, 8, 8), dim=1)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    flash = torch.ops.aten._flash_attention_forward.default  # as real mode calls it for few tokens
    variants = {
        "fused": lambda: packed_prefill(query, key, value, bounds, bounds, tokens),
        "torch_flash": lambda: flash(query[None], key[None], value[None], None, None, tokens, tokens, 0.0, True, False),
    }
    for variant, call in variants.items():
        row = Row("prefill", variant, _LAYER.name, tokens, 1, 1, 1, key.nbytes + value.nbytes)
        yield replace(row, time_us=event_us([call], 20), submit_us=submit_us([call], 20))


def _decode(bench: Bench, lengths: list[int], page_size: int) -> Iterator[Row]:
    batch, is_even = len(lengths), len(set(lengths)) == 1
    spread = "" if is_even else f" of {min(lengths)} to {max(lengths)}"
    model = replace(_LAYER, name=f"{_LAYER.name} x{batch}{spread}")
    case = Case(model, round(sum(lengths) / batch), page_size, 1, 1)
    pages = [-(-length // page_size) for length in lengths]
    slots = sum(pages) * page_size
    kv_bytes = 2 * sum(lengths) * 8 * 128 * 2
    copied = bench.copy_us(kv_bytes // 2)  # a copy that reads and writes, together, what attention reads
    bench.arena.reset()
    count = 1 if kv_bytes > 1 << 30 else min(8, max(2, -(-(256 << 20) // kv_bytes)))
    planes = [
        [bench.arena.take(slots * 8 * 128 * 2).view(torch.bfloat16).view(slots, 8, 128) for _ in range(2)]
        for _ in range(count)
    ]
    for plane in planes[0]:
        plane.normal_()
    scattered = torch.randperm(sum(pages), device="cuda").to(torch.int32).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(scattered), batch_first=True)
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    query = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    workspace = decode_workspace(batch, 32, 8, 128, query.device)
    workspace.divide(on_device)

    def decode(index: int) -> None:
        k, v = planes[index]
        paged_decode(query, k, v, table, on_device, page_size=page_size, output=out, workspace=workspace)

    calls = [partial(decode, index) for index in range(count)]
    time = event_us(calls, 20)
    row = bench.row("decode", "fused", case, kv_bytes, copied, time_us=time, graph_us=graph_us(calls, 9))
    yield replace(row, gbytes_per_s=kv_bytes / time / 1e3, floor_us=kv_bytes / bench.peak_bytes_per_us)
    if page_size == 16 and is_even:
        yield _contiguous_sdpa(bench, case, planes[0], query, kv_bytes, copied)
        yield _append(bench, case, planes[0], batch)


def _contiguous_sdpa(
    bench: Bench, case: Case, planes: list[torch.Tensor], query: torch.Tensor, kv_bytes: int, copied: float
) -> Row:
    """Measures torch's decode attention over a contiguous cache without pages, for comparison. kv_bytes: bytes of KV
    that attention reads. copied: time in us of a copy whose reads and writes together have as many bytes.
    """
    batch = len(query)
    k, v = (plane.view(batch, case.tokens, 8, 128).transpose(1, 2) for plane in planes)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    time = event_us([lambda: sdpa(query[:, :, None], k, v, enable_gqa=True)], 10)
    row = bench.row("decode", "torch_sdpa", case, kv_bytes, copied, time_us=time)
    return replace(row, gbytes_per_s=kv_bytes / time / 1e3, floor_us=kv_bytes / bench.peak_bytes_per_us)


def _append(bench: Bench, case: Case, planes: list[torch.Tensor], batch: int) -> Row:
    slots = torch.randperm(len(planes[0]), device="cuda")[:batch].to(torch.int32)
    new = torch.randn(batch, 16, 128, dtype=torch.bfloat16, device="cuda")
    keys, values = planes
    call = [lambda: append(keys, values, slots, new[:, :8], new[:, 8:])]
    payload = 2 * batch * 8 * 128 * 2
    times = {"time_us": event_us(call, 20), "graph_us": graph_us(call * 8, 9), "submit_us": submit_us(call, 20)}
    return bench.row("append", "fused", case, payload, bench.copy_us(payload), **times)
