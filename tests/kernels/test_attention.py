"""Append, paged decode and packed prefill against torch."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pdkernels import append, decode_workspace, latent_decode, latent_workspace, packed_prefill, paged_decode
from pdkernels.attention.paged_prefill import paged_prefill, prefill_tiles
from pdkernels.reference import (
    append_reference,
    latent_decode_reference,
    packed_prefill_reference,
    paged_decode_reference,
)

from tests.kernels.pools import DEVICE, copy_of, normal_pool, random_pages, random_pool, same_bytes
from tests.support import examples

TOLERANCE = 2e-2  # of bf16 inputs against float32 arithmetic
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, TOLERANCE)])
"""Products of float32 are in float32: GPUs would round their operands to 11 bits."""


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_append(order, page_size):
    pool = random_pool(heads=3, page_size=page_size, order=order)
    slots = random_pages(5, 12)
    slots[2] = -1
    packed = torch.randn(5, 3 * 3, 16, dtype=torch.bfloat16, device=DEVICE)  # as a projection leaves Q, K and V
    keys, values = packed[:, 3:6], packed[:, 6:]
    expected = copy_of(pool)
    append_reference(expected.keys[1], expected.values[1], slots, keys, values)
    append(pool.keys[1], pool.values[1], slots, keys, values)
    assert same_bytes(pool, expected)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("group", "shares", "window"), [(1, 1, 0), (4, 3, 0), (2, 5, 0), (4, 1, 1), (2, 3, 20)])
@DTYPES
def test_paged_decode(order, page_size, group, shares, window, dtype, tolerance):
    heads, head_dim, lengths = 2, 32, [1, 0, 45]
    pool = normal_pool(
        dtype, layers=1, heads=heads, head_dim=head_dim, page_size=page_size, order=order, pages=96 // page_size
    )
    table = torch.stack([random_pages(-(-48 // page_size), 96 // page_size) for _ in lengths])
    query = torch.randn(3, heads * group + 2, head_dim, dtype=dtype, device=DEVICE)[:, : heads * group]
    expected = paged_decode_reference(query, pool, 0, table, lengths, head_dim**-0.5, window)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace = decode_workspace(3, heads * group, heads, head_dim, DEVICE, shares=shares, block_tokens=16)
    workspace.divide(on_device, window)
    out = paged_decode(
        query,
        pool.keys[0],
        pool.values[0],
        table,
        on_device,
        page_size=page_size,
        output=torch.full_like(expected, float("nan")),
        workspace=workspace,
    )
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("group", "num_new", "shares"), [(1, 2, 1), (4, 4, 3), (3, 5, 40)])
@DTYPES
def test_several_new_tokens_see_what_each_would_see_alone(page_size, group, num_new, shares, dtype, tolerance):
    """Each share is a block of 16 tokens at most, so some have only tokens that the first new ones do not see."""
    heads, head_dim, lengths = 2, 32, [num_new, 18, 45]
    pool = normal_pool(dtype, layers=1, heads=heads, head_dim=head_dim, page_size=page_size, pages=96 // page_size)
    table = torch.stack([random_pages(-(-48 // page_size), 96 // page_size) for _ in lengths])
    query = torch.randn(3 * num_new, heads * group + 2, head_dim, dtype=dtype, device=DEVICE)[:, : heads * group]
    each = [length - num_new + 1 + i for length in lengths for i in range(num_new)]
    rows = table.repeat_interleave(num_new, dim=0)
    expected = paged_decode_reference(query, pool, 0, rows, each, head_dim**-0.5)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace = decode_workspace(
        3, heads * group, heads, head_dim, DEVICE, shares=shares, block_tokens=16, num_new=num_new
    )
    workspace.divide(on_device)
    planes = pool.keys[0], pool.values[0]
    where = {"page_size": page_size, "workspace": workspace, "num_new": num_new}
    out = paged_decode(query, *planes, table, on_device, output=torch.full_like(expected, float("nan")), **where)
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("heads", "rank", "shares"), [(2, 64, 1), (24, 64, 3), (16, 512, 2)])
@DTYPES
def test_latent_decode(page_size, heads, rank, shares, dtype, tolerance):
    rotated, lengths, pages = max(16, rank // 8), [1, 0, 45], 96 // page_size
    latents = torch.randn((pages + 1) * page_size, 1, rank + rotated, device=DEVICE).to(dtype)
    table = torch.stack([random_pages(-(-48 // page_size), pages) for _ in lengths])
    query = torch.randn(3, heads + 2, rank + rotated, device=DEVICE).to(dtype)[:, :heads]
    slots = (table[:, :, None] * page_size + torch.arange(page_size, device=DEVICE)).flatten(1)
    own = [row[:length] for row, length in zip(slots, lengths, strict=True)]
    expected = latent_decode_reference(query, latents, own, rank, 0.1)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace = latent_workspace(3, heads, rank, DEVICE, shares=shares)
    workspace.divide(on_device)
    out = latent_decode(query, latents, table, on_device, page_size=page_size, scale=0.1, workspace=workspace)
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=9),
    shares=st.integers(1, 12),
    window=st.just(0) | st.integers(1, 100),
)
@examples(40)
def test_programs_share_any_batch_equally(lengths, shares, window):
    block_tokens, pages = 16, 8
    pool = normal_pool(torch.float32, layers=1, heads=1, head_dim=16, page_size=16, pages=pages)
    table = torch.stack([random_pages(6, pages) for _ in lengths])
    query = torch.randn(len(lengths), 2, 16, dtype=torch.float32, device=DEVICE)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace = decode_workspace(len(lengths), 2, 1, 16, DEVICE, shares=shares, block_tokens=block_tokens)
    workspace.divide(on_device, window)
    blocks = [-(-min(length, window or length) // block_tokens) for length in lengths]
    assert workspace.bounds.tolist() == list(accumulate(blocks, initial=0))
    per_share = -(-sum(blocks) // shares)
    owners = [sequence for sequence, count in enumerate(blocks) for _ in range(count)]
    begun = [share * per_share for share in range(shares) if share * per_share < len(owners)]
    assert workspace.first_sequences.tolist()[: len(begun)] == [owners[block] for block in begun]

    expected = paged_decode_reference(query, pool, 0, table, lengths, 0.25, window)
    output = torch.full_like(expected, float("nan"))
    paged_decode(
        query, pool.keys[0], pool.values[0], table, on_device, page_size=16, output=output, workspace=workspace
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_workspace_divided_over_other_lengths_is_refused():
    pool = normal_pool(layers=1, heads=1, head_dim=16, page_size=16, pages=4)
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    workspace = decode_workspace(1, 1, 1, 16, DEVICE)
    workspace.divide(lengths.clone())
    query = torch.randn(1, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    table = random_pages(4, 4)[None]
    with pytest.raises(ValueError, match="divided over other lengths"):
        paged_decode(query, pool.keys[0], pool.values[0], table, lengths, page_size=16, workspace=workspace)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_decode_in_a_cuda_graph_follows_lengths():
    pool = normal_pool(layers=1, heads=8, head_dim=128, page_size=16, pages=64)
    table = torch.stack([random_pages(30, 64) for _ in range(2)])
    lengths = torch.tensor([1, 1], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    workspace = decode_workspace(2, 32, 8, 128, DEVICE)
    output = torch.empty_like(query)
    arguments = (query, pool.keys[0], pool.values[0], table, lengths)
    workspace.divide(lengths)
    paged_decode(*arguments, page_size=16, output=output, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        workspace.divide(lengths)
        paged_decode(*arguments, page_size=16, output=output, workspace=workspace)
    for now in ([470, 3], [0, 256]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        query.normal_()
        graph.replay()
        expected = paged_decode_reference(query, pool, 0, table, now, 128**-0.5)
        torch.testing.assert_close(output.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("group", "window", "dtype", "tolerance"),
    [
        (1, 0, torch.float32, 1e-5),
        (2, 1, torch.float32, 1e-5),
        (4, 0, torch.bfloat16, TOLERANCE),
        (4, 50, torch.float32, 1e-5),
        (4, 50, torch.bfloat16, TOLERANCE),
    ],
)
@pytest.mark.parametrize(
    "lengths",
    [[(0, 1)], [(0, 300)], [(200, 130)], [(0, 128), (128, 128)], [(7, 1), (0, 40), (260, 129)]],
    ids=lambda lengths: " ".join(f"{context}+{new}" for context, new in lengths),
)
def test_packed_prefill(lengths, group, window, dtype, tolerance):
    num_new, num_all = [new for _, new in lengths], [sum(both) for both in lengths]
    bounds = [
        torch.tensor([sum(n[:i]) for i in range(len(n) + 1)], dtype=torch.int32, device=DEVICE)
        for n in (num_new, num_all)
    ]
    packed = torch.randn(sum(num_new), 2 * group + 2, 32, dtype=dtype, device=DEVICE)
    query = packed[:, : 2 * group]  # as a projection leaves Q, K and V
    key, value = torch.randn(2, sum(num_all), 2, 32, dtype=dtype, device=DEVICE)
    out = packed_prefill(query, key, value, *bounds, longest=max(num_new), window=window)
    expected = packed_prefill_reference(query, key, value, num_new, num_all, window)
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(200, 130)], [(7, 1), (0, 40), (140, 65)]])
def test_paged_prefill(lengths, window, page_size):
    """Padding comes out as zeros."""
    num_new, num_context = [new for _, new in lengths], [context for context, _ in lengths]
    num_pages = [-(-sum(both) // page_size) for both in lengths]
    pages = random_pages(sum(num_pages), sum(num_pages))
    keys, values = torch.randn(2, (sum(num_pages) + 1) * page_size, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    size = sum(num_new) + 70
    query = torch.randn(size, 6, 32, dtype=torch.bfloat16, device=DEVICE)[:, :4]
    cut = prefill_tiles(num_new, num_context, num_pages, size)
    tiles = torch.tensor([*cut, (1, 1, 1, 1)], dtype=torch.int32, device=DEVICE)  # the last is not counted
    num_tiles = torch.tensor([len(cut)], dtype=torch.int32, device=DEVICE)
    out = paged_prefill(query, keys, values, tiles, num_tiles, pages, page_size=page_size, window=window)
    slots = [(p.long()[:, None] * page_size + torch.arange(page_size, device=DEVICE)) for p in pages.split(num_pages)]
    seen = torch.cat([s.flatten()[: sum(both)] for s, both in zip(slots, lengths, strict=True)])
    num_all = [sum(both) for both in lengths]
    expected = packed_prefill_reference(query[: sum(num_new)], keys[seen], values[seen], num_new, num_all, window)
    torch.testing.assert_close(out[: sum(num_new)].float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)
    assert not out[sum(num_new) :].any()


def test_packed_prefill_refuses_what_does_not_fit():
    query, bounds = torch.randn(4, 4, 32, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit"):
        packed_prefill(query, query[:, :3], query[:, :3], bounds, bounds, 4)
    with pytest.raises(ValueError, match="contiguous"):
        packed_prefill(query, query[:, ::2], query[:, ::2], bounds, bounds, 4)
    with pytest.raises(ValueError, match="head_dim"):
        packed_prefill(query[..., :24], query[..., :24], query[..., :24], bounds, bounds, 4)
