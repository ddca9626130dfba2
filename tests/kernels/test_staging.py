"""Gather and scatter against their oracles: every byte inside the span, and every byte around it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdkernels import (
    Pool,
    Tiling,
    gather,
    gather_batch,
    head_moves,
    scatter,
    scatter_batch,
    staging_bytes,
)
from pdkernels.reference import gather_reference, scatter_reference
from pdkernels.unused import CapturedCopy

from tests.kernels.pools import DEVICE, DTYPES, copy_of, random_bytes, random_pages, random_pool, same_bytes

GUARD_BYTES = 48  # around a span; must stay as it was


def check_gather(pool: Pool, tokens: int, heads: range | None, slices: int, **how) -> None:
    pages = random_pages(-(-tokens // pool.layout.page_size), len(pool.keys[0]) // pages_per_row(pool))
    size = staging_bytes(pool, tokens, heads)
    staging = random_bytes(size + 2 * GUARD_BYTES)
    expected = staging.clone()
    expected[GUARD_BYTES : GUARD_BYTES + size] = gather_reference(pool, pages, tokens, heads=heads, slices=slices)
    gather(pool, pages, tokens, staging, heads=heads, slices=slices, offset_bytes=GUARD_BYTES, **how)
    assert torch.equal(staging, expected)


def check_scatter(pool: Pool, tokens: int, heads: range | None, writers: int, **how) -> None:
    pages = random_pages(-(-tokens // pool.layout.page_size), len(pool.keys[0]) // pages_per_row(pool))
    size = staging_bytes(pool, tokens, heads)
    staging = random_bytes(size + 2 * GUARD_BYTES)
    expected = copy_of(pool)
    span = staging[GUARD_BYTES : GUARD_BYTES + size].clone()
    scatter_reference(expected, pages, tokens, span, heads=heads, writers=writers)
    scatter(pool, pages, tokens, staging, heads=heads, writers=writers, offset_bytes=GUARD_BYTES, **how)
    assert same_bytes(pool, expected)


def pages_per_row(pool: Pool) -> int:
    return pool.layout.page_size if pool.layout.order == "NHD" else 1


@pytest.mark.parametrize("check", [check_gather, check_scatter])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 128])
def test_pages_and_orders(check, order, page_size):
    pool = random_pool(layers=1, page_size=page_size, order=order, pages=max(3, 40 // page_size))
    check(pool, page_size + max(1, page_size // 3), None, 1)
    check(pool, 2 * page_size, range(1, 3), 2)


@settings(max_examples=25, deadline=None)
@given(
    check=st.sampled_from([check_gather, check_scatter]),
    layers=st.integers(1, 3),
    slices=st.sampled_from([1, 2, 3, 4]),
    heads_per_slice=st.integers(1, 2),
    spare=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    head_dim=st.sampled_from([16, 48, 80]),
    dtype=st.sampled_from(DTYPES),
    page_size=st.sampled_from([1, 4, 8]),
    order=st.sampled_from(["NHD", "HND"]),
    tokens=st.integers(1, 24),
    tiling=st.builds(Tiling, units=st.sampled_from([64, 256]), warps=st.just(4)),
)
def test_any_shape(check, layers, slices, heads_per_slice, spare, head_dim, dtype, page_size, order, tokens, tiling):
    moved = range(spare[0], spare[0] + slices * heads_per_slice)
    pool = random_pool(layers, moved.stop + spare[1], head_dim, dtype, page_size, order, pages=24)
    check(pool, tokens, moved, slices, tiling=tiling)


@pytest.mark.parametrize("check", [check_gather, check_scatter])
def test_few_programs_do_all_the_work(check):
    check(random_pool(), 21, None, 1, tiling=Tiling(units=32, warps=4), programs=3)


@pytest.mark.parametrize(
    ("move", "order"), [("gather", "NHD"), ("scatter", "NHD"), ("gather", "HND"), ("scatter", "HND")]
)
def test_requests_of_a_batch_do_not_touch_each_other(move, order):
    pool = random_pool(order=order, pages=20)
    lengths = [9, 4, 0, 17]
    heads = range(2)
    all_pages = random_pages(20, 20)
    spans, page, offset = [], 0, 16
    for tokens in lengths:
        spans.append([page, tokens, offset])
        page += -(-tokens // 4)
        offset += staging_bytes(pool, tokens, heads) + 32
    staging = random_bytes(offset)
    expected_staging, expected_pool = staging.clone(), copy_of(pool)
    for first, tokens, at in spans:
        pages = all_pages[first:]
        size = staging_bytes(pool, tokens, heads)
        if move == "gather":
            expected_staging[at : at + size] = gather_reference(pool, pages, tokens, heads=heads, slices=2)
        else:
            scatter_reference(expected_pool, pages, tokens, staging[at : at + size].clone(), heads=heads, writers=2)
    table = torch.tensor(spans, device=DEVICE)
    if move == "gather":
        gather_batch(pool, all_pages, table, staging, longest_tokens=17, heads=heads, slices=2)
    else:
        scatter_batch(pool, all_pages, table, staging, longest_tokens=17, heads=heads, writers=2, programs=2)
    assert torch.equal(staging, expected_staging)
    assert same_bytes(pool, expected_pool)


def test_captured_copies_take_any_length():
    source, target = random_pool(page_size=1, pages=150), random_pool(page_size=1, pages=150)
    staging = random_bytes(staging_bytes(source, 150) + 16)
    collect = CapturedCopy("gather", source, staging, most_tokens=130, slices=2)
    distribute = CapturedCopy("scatter", target, staging, most_tokens=130, slices=2)
    for tokens in (1, 64, 65, 130):
        pages = random_pages(tokens, 150)
        expected = copy_of(target)
        scatter_reference(expected, pages, tokens, gather_reference(source, pages, tokens, slices=2), writers=2)
        collect(pages.tolist(), tokens, offset_bytes=16)
        distribute(pages.cpu().numpy(), tokens, offset_bytes=16)
        distribute.wait()
        assert same_bytes(target, expected)
    with pytest.raises(ValueError, match="at most"):
        collect(list(range(300)), 300)


@pytest.mark.parametrize(
    ("source_ranks", "target_ranks", "kv_heads"), [(4, 1, 4), (4, 2, 4), (1, 4, 4), (2, 4, 8), (4, 1, 2)]
)
def test_between_tensor_parallel_layouts(source_ranks, target_ranks, kv_heads):
    """Heads leave all source ranks and arrive in all target ranks as if the cache had never been split."""
    tokens, page_size = 11, 4
    whole = random_pool(heads=kv_heads, page_size=page_size)
    sources = [part_of(whole, rank, source_ranks) for rank in range(source_ranks)]
    targets = [random_pool(heads=max(1, kv_heads // target_ranks), page_size=page_size) for _ in range(target_ranks)]
    pages, target_pages = random_pages(3, 12), random_pages(3, 12)
    for move in head_moves(kv_heads, source_ranks, target_ranks):
        source, target = sources[move.source_rank], targets[move.target_rank]
        staging = random_bytes(staging_bytes(source, tokens, move.source_heads))
        gather(source, pages, tokens, staging, heads=move.source_heads)
        scatter(target, target_pages, tokens, staging, heads=move.target_heads)
    for rank, target in enumerate(targets):
        expected = gather_reference(part_of(whole, rank, target_ranks), pages, tokens)
        assert torch.equal(gather_reference(target, target_pages, tokens), expected)


def part_of(whole: Pool, rank: int, ranks: int) -> Pool:
    heads = whole.layout.heads
    each = max(1, heads // ranks)
    first = rank * each if ranks <= heads else rank // (ranks // heads)
    keys, values = (
        [plane[:, first : first + each].contiguous() for plane in planes] for planes in (whole.keys, whole.values)
    )
    return Pool(keys, values, whole.page_size)


@given(
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    source=st.sampled_from([1, 2, 4, 8, 16]),
    target=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_every_target_head_is_filled_once(kv_heads, source, target):
    moves = head_moves(kv_heads, source, target)
    for rank in range(target):
        filled = [head for move in moves if move.target_rank == rank for head in move.target_heads]
        assert filled == list(range(max(1, kv_heads // target)))
    assert all(len(move.source_heads) == len(move.target_heads) for move in moves)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="6 KV heads do not divide over 4 ranks"):
        head_moves(6, 4, 1)
