"""The copies of a unit move the right bytes, and are as many as the core says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdreal.control.tasks import Windows
from pdreal.memory.geometry import (
    CacheGeometry,
    Exchange,
    heads_of_rank,
    move_of,
    move_of_windows,
    planes_of,
    rank_pairs,
)

from pdsim.core.messages import TransferUnit
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.scenario.building.wiring import wire
from pdsim.system.catalog import load_gpu, load_model
from pdsim.system.memory import Layout
from pdsim.system.model import GroupedQueryAttention

NUM_PAGES = 12
HEAD_DIM = 3


def layout(tp, num_kv_heads, num_layers, num_window_layers=0, window_tokens=0):
    attention = GroupedQueryAttention(
        num_layers=num_layers,
        num_query_heads=32,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        num_window_layers=num_window_layers,
        window_tokens=window_tokens,
    )
    model = replace(load_model("qwen3-0.6b"), attention=attention, num_layers=num_layers)
    return Layout(model=model, gpu=load_gpu("h200"), tp=tp, kv_dtype="bf16")


def geometry(server, page_size):
    attention = server.model.attention
    return CacheGeometry(
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_layers=attention.num_layers,
        num_kv_heads=len(heads_of_rank(attention.num_kv_heads, server.tp, 0)),
        head_dim=HEAD_DIM,
        itemsize=2,
    )


@st.composite
def exchanges(draw, has_windows=False):
    """Any two sides that the core accepts."""
    num_kv_heads, prefill_tp, decode_tp = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(3))
    num_layers, page_size = draw(st.integers(1 + has_windows, 5)), draw(st.integers(1, 4))
    windows = (
        sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers - 1)))
        if has_windows
        else ()
    )
    shape = num_kv_heads, num_layers, len(windows), draw(st.integers(1, 3 * page_size)) if windows else 0
    sides = [layout(tp, *shape) for tp in (prefill_tp, decode_tp)]
    return Exchange(
        wire=wire(*sides, page_size, draw(st.booleans())),
        num_kv_heads=num_kv_heads,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill=geometry(sides[0], page_size),
        decode=geometry(sides[1], page_size),
        layer_groups=draw(st.integers(0, num_layers)) if prefill_tp == decode_tp and not windows else 0,
        window_layers=windows,
    )


def page_lists():
    """Pages in runs and out of order, none twice."""
    return st.permutations(range(NUM_PAGES)) | st.integers(0, 3).map(lambda n: [*range(n, NUM_PAGES), *range(n)])


def units(exchange, source, target):
    """As the planner makes them: one, or one for each group of layers."""
    load = exchange.wire.size(source, target)
    if not exchange.layer_groups:
        return [TransferUnit(0, "p", "d", source, target, *load, 0, is_last=True)]
    groups = range(exchange.layer_groups)
    parts = [exchange.wire.part(load, group, exchange.layer_groups) for group in groups]
    return [
        TransferUnit(0, "p", "d", source, target, *part, 0, is_last=False, after_layers=(7, group))
        for group, part in enumerate(parts)
    ]


def whole_cache(exchange, seed):
    """Of the model, before it is split: [plane, page, token of the page, head, byte]."""
    side = exchange.prefill
    shape = side.num_planes, NUM_PAGES, side.page_size, exchange.num_kv_heads, side.head_bytes
    return np.random.default_rng(seed).integers(1, 255, shape, np.uint8)


def caches(whole, exchange, tp):
    """What each rank holds of it."""
    held = [heads_of_rank(exchange.num_kv_heads, tp, rank) for rank in range(tp)]
    return [np.ascontiguousarray(whole[:, :, :, heads.start : heads.stop]) for heads in held]


def carry_out(move, source, target):
    source, target = source.reshape(len(source), -1), target.reshape(len(target), -1)
    for plane in move.planes:
        for local, remote, length in zip(move.local_offsets, move.remote_offsets, move.lengths, strict=True):
            assert length > 0
            assert local + length <= source.shape[1]
            assert remote + length <= target.shape[1]
            target[plane, remote : remote + length] = source[plane, local : local + length]


@settings(max_examples=300)
@given(exchanges(), page_lists(), page_lists(), st.integers(0, NUM_PAGES))
def test_moves_carry_the_right_bytes_in_as_many_pieces_as_the_core_says(exchange, source, target, num_pages):
    source, target = tuple(source[:num_pages]), tuple(target[:num_pages])
    before, arriving = whole_cache(exchange, 1), whole_cache(exchange, 2)
    prefill, decode = caches(arriving, exchange, exchange.prefill_tp), caches(before, exchange, exchange.decode_tp)
    for pair in exchange.pairs:
        for unit in units(exchange, source, target):
            move = move_of(unit, pair, exchange)
            assert (move.num_bytes, move.num_descriptors) == (unit.num_bytes, unit.num_descriptors)
            carry_out(move, prefill[pair.prefill_rank], decode[pair.decode_rank])
    expected = before.copy()
    expected[:, list(target)] = arriving[:, list(source)]
    for got, want in zip(decode, caches(expected, exchange, exchange.decode_tp), strict=True):
        assert np.array_equal(got, want)


@settings(max_examples=200)
@given(exchanges(has_windows=True), st.data())
def test_windows_are_the_last_tokens_of_their_layers_and_as_many_bytes_as_the_core_says(exchange, data):
    wire, page_size = exchange.wire, exchange.wire.page_size
    sent = range(page_size * data.draw(st.integers(0, 2)), data.draw(st.integers(2 * page_size, NUM_PAGES * page_size)))
    first = sent.start // page_size
    source, target = (data.draw(page_lists())[: -(-sent.stop // page_size)] for _ in range(2))
    before, arriving = whole_cache(exchange, 1), whole_cache(exchange, 2)
    prefill, decode = caches(arriving, exchange, exchange.prefill_tp), caches(before, exchange, exchange.decode_tp)
    num_pages = wire.num_window_pages(sent)
    windows = Windows(source[len(source) - num_pages :], target[len(target) - num_pages :])
    pages = tuple(source[first:]), tuple(target[first:])
    unit = TransferUnit(0, "p", "d", *pages, *wire.size(*pages, sent), 0, is_last=True)
    for pair in exchange.pairs:
        moves = move_of(unit, pair, exchange), move_of_windows(windows, pair, exchange)
        assert sum(move.num_bytes for move in moves) == unit.num_bytes
        for move in moves:
            carry_out(move, prefill[pair.prefill_rank], decode[pair.decode_rank])
    expected = before.copy()
    kept = range(max(sent.start, sent.stop - wire.window_tokens), sent.stop)
    for plane in range(exchange.prefill.num_planes):
        is_window = plane // 2 in exchange.window_layers
        for page in range(kept.start // page_size if is_window else first, len(target)):
            expected[plane, target[page]] = arriving[plane, source[page]]
    for got, want in zip(decode, caches(expected, exchange, exchange.decode_tp), strict=True):
        assert np.array_equal(got, want)


@given(exchanges())
def test_pairs_of_ranks_are_those_of_the_wire(exchange):
    pairs, wire = exchange.pairs, exchange.wire
    assert len(pairs) == wire.num_pairs
    targets = [pair.decode_rank for pair in pairs]
    assert all(targets.count(rank) == wire.num_writers for rank in range(exchange.decode_tp))
    sources = [pair.prefill_rank for pair in pairs]
    assert {sources.count(rank) for rank in sources} == {wire.num_targets}
    for rank in range(exchange.decode_tp):
        filled = {head for pair in pairs if pair.decode_rank == rank for head in pair.target_heads}
        assert filled == set(range(exchange.decode.num_kv_heads))
        assert [pair.writer for pair in pairs if pair.decode_rank == rank] == list(range(wire.num_writers))


def test_copies_of_a_head_are_sent_once_if_the_wire_deduplicates():
    """Eight prefill ranks hold each of four heads twice."""
    assert [p.prefill_rank for p in rank_pairs(4, 8, 2, num_writers=4)] == list(range(8))
    assert [p.prefill_rank for p in rank_pairs(4, 8, 2, num_writers=2)] == [0, 2, 4, 6]


@given(exchanges())
def test_groups_of_layers_hold_every_plane_once(exchange):
    planes = [plane for unit in units(exchange, (1,), (2,)) for plane in planes_of(unit, exchange)]
    assert planes == list(range(exchange.prefill.num_planes))


def test_models_that_real_mode_cannot_move_are_refused():
    side = geometry(layout(1, 4, 2), 4)
    sides = {"num_kv_heads": 4, "prefill_tp": 1, "decode_tp": 1, "prefill": side, "decode": side}
    page_bytes = 4 * side.page_bytes
    with pytest.raises(ValueError, match="a state has 0 bytes, and 8 in the scenario"):
        Exchange(wire=RankPairLayout(page_size=4, page_bytes=page_bytes, num_planes=4, state_bytes=8), **sides)
    with pytest.raises(ValueError, match="a cache has 4 planes; 2 are sent in the scenario"):
        Exchange(wire=RankPairLayout(page_size=4, page_bytes=page_bytes, num_planes=2), **sides)
    with pytest.raises(ValueError, match=r"kv_dtype must have elements of 2 bytes"):
        Exchange(wire=RankPairLayout(page_size=4, page_bytes=2 * page_bytes, num_planes=4), **sides)
