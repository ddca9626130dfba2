"""Attention of packed chunks over a paged cache: by whichever way a device takes, it is the softmax written out."""

import pytest

torch = pytest.importorskip("torch", reason="real mode needs torch")

from random import Random

from pdreal.control.tasks import PrefillBatch, PrefillInput
from pdreal.memory.paged_kv import PagedKv
from pdreal.model.attention import PackedAttention, PagedPrefill

from tests.real.models import CPU

QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 2, 64, 4
GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCHES = {
    "one": [(0, 70)],
    "one behind a context": [(300, 5)],
    "one token": [(0, 1)],
    "one token behind a context": [(64, 1)],
    "without contexts": [(0, 7), (0, 130), (0, 1)],
    "some behind contexts": [(3, 5), (0, 40), (200, 1), (64, 64)],
    "of one token each": [(9, 1), (0, 1), (300, 1)],
    "of equal lengths": [(128, 16)] * 5,
    "long ones": [(300, 700), (0, 600), (77, 129)],
}
"""Tokens of each chunk's context, and its own."""


def written_out(query, key, value, window=0):
    """On the CPU, in fp64."""
    query, key, value = (x.cpu().double() for x in (query, key, value))
    key, value = (x.repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
    if window:
        seen = seen.triu(len(key) - len(query) - window + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [0, 1, 30])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        (CPU, torch.float32, 1e-5),
        pytest.param(GPU, torch.float32, 1e-3, marks=needs_gpu),
        pytest.param(GPU, torch.float16, 4e-3, marks=needs_gpu),
        pytest.param(GPU, torch.bfloat16, 3e-2, marks=needs_gpu),
    ],
    ids=["cpu", "gpu fp32", "gpu fp16", "gpu bf16"],
)
def test_packed_prefill(device, dtype, tolerance, lengths, window):
    pages = [-(-(context + new) // PAGE_SIZE) for context, new in lengths]
    free = Random(0).sample(range(1, sum(pages) + 1), sum(pages))
    tables = [[free.pop() for _ in range(num_pages)] for num_pages in pages]
    kv = PagedKv(
        num_pages=sum(pages),
        page_size=PAGE_SIZE,
        num_layers=2,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
    )
    kv.memory.normal_()
    num_new = [new for _, new in lengths]
    given = zip(lengths, tables, strict=True)
    batch = PrefillBatch(tuple(PrefillInput(0, [0] * new, context, table) for (context, new), table in given))
    qkv = torch.randn(sum(num_new), QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype, device=device)
    query, key, value = qkv.split((QUERY_HEADS, KV_HEADS, KV_HEADS), dim=1)
    told = []
    attended = PagedPrefill(kv, batch, device, told.append)(1, query, key, value, window)
    assert told == [1]
    assert attended.shape == query.shape
    parts = [x.split(num_new) for x in (query, key, value, attended)]
    for chunk, new_query, new_key, new_value, found in zip(batch.chunks, *parts, strict=True):
        slots = kv.slots(chunk.page_table, 0, chunk.num_kv_tokens).to(device)
        keys, values = (plane[slots] for plane in kv.layer(1))
        assert torch.equal(keys[chunk.num_context_tokens :], new_key)
        assert torch.equal(values[chunk.num_context_tokens :], new_value)
        expected = written_out(new_query, keys, values, window)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@needs_gpu
@pytest.mark.parametrize("lengths", [[(300, 5)], [(3, 5), (0, 140), (200, 1)]])
def test_a_window_over_heads_that_no_kernel_of_ours_takes(lengths):
    num_new, num_all = [new for _, new in lengths], [sum(both) for both in lengths]
    query = torch.randn(sum(num_new), QUERY_HEADS, 256, dtype=torch.bfloat16, device=GPU)
    key, value = torch.randn(2, sum(num_all), KV_HEADS, 256, dtype=torch.bfloat16, device=GPU)
    found = PackedAttention(num_new, num_all, GPU)(query, key, value, 1 / 8, window=30)
    parts = zip(query.split(num_new), key.split(num_all), value.split(num_all), found.split(num_new), strict=True)
    for q, k, v, out in parts:
        torch.testing.assert_close(out.cpu().double(), written_out(q, k, v, 30), rtol=3e-2, atol=3e-2)
