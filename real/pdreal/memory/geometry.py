"""Layout of KV: the planes of a rank's cache, which KV heads each pair of ranks exchanges, and the copies of a transfer
unit.

A plane is K or V of one layer: [slots, heads, head_dim], token after token, with slot = page * page_size + offset.
Plane 2 * layer holds K, and plane 2 * layer + 1 holds V. With latent attention plane `layer` holds latents: one head,
which all ranks have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdreal.control.tasks import Windows
from pdsim.core.messages import TransferUnit
from pdsim.core.transfer.send_planner import RankPairLayout, layers_of_group


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """Shape of the KV cache of one rank."""

    num_pages: int
    """Number of pages of the pool. One page more exists, page 0, for writes of padding rows."""
    page_size: int
    """Number of tokens of a page."""
    num_layers: int
    """Number of layers with a KV cache."""
    num_kv_heads: int
    """Number of KV heads of this rank."""
    head_dim: int
    """Number of elements of a head."""
    itemsize: int
    """Bytes of one element of the cache."""
    planes_per_layer: int = 2
    """2: keys and values. 1: latents."""

    @property
    def num_planes(self) -> int:
        return self.planes_per_layer * self.num_layers

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane (K, V or latents of one layer)."""
        return self.head_dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one plane (K, V or latents of one layer)."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one plane (K, V or latents of one layer)."""
        return self.page_size * self.token_bytes


class RankPair(NamedTuple):
    """A prefill rank that writes to a decode rank, and the KV heads that it sends."""

    prefill_rank: int
    """Index of the prefill rank among all ranks of its instance."""
    decode_rank: int
    """Index of the decode rank among all ranks of its instance."""
    writer: int
    """Index of the prefill rank, from 0, among only those prefill ranks that write to this decode rank. In the
    staging ring, the cells of these ranks follow each other in this order."""
    source_heads: range
    """Indices of the KV heads that the pair sends, among the prefill rank's heads."""
    target_heads: range
    """Indices of the sent KV heads among the decode rank's heads."""


def heads_of_rank(num_kv_heads: int, tp: int, rank: int) -> range:
    """Returns the KV heads that a rank holds. With more ranks than heads, neighbouring ranks hold copies of the same
    head. num_kv_heads: number of KV heads of the model. tp: number of ranks of the instance. rank: index of the rank.
    """
    if tp > num_kv_heads:
        head = rank // (tp // num_kv_heads)
        return range(head, head + 1)
    heads = num_kv_heads // tp
    return range(rank * heads, (rank + 1) * heads)


def rank_pairs(num_kv_heads: int, prefill_tp: int, decode_tp: int, num_writers: int) -> tuple[RankPair, ...]:
    """Returns the pairs of ranks between which KV is sent, ordered by decode rank. num_kv_heads: number of KV heads of
    the model. prefill_tp, decode_tp: numbers of ranks of the two instances. num_writers: number of prefill ranks that
    write to each decode rank. With latents this number is 1, because all prefill ranks hold the same KV.
    """
    pairs = []
    for decode_rank in range(decode_tp):
        sources = range(decode_rank * prefill_tp // decode_tp, -(-(decode_rank + 1) * prefill_tp // decode_tp))
        for writer, prefill_rank in enumerate(sources[:: len(sources) // num_writers]):
            held = heads_of_rank(num_kv_heads, prefill_tp, prefill_rank)
            wanted = heads_of_rank(num_kv_heads, decode_tp, decode_rank)
            heads = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            pairs.append(RankPair(prefill_rank, decode_rank, writer, _within(heads, held), _within(heads, wanted)))
    return tuple(pairs)


def _within(heads: range, held: range) -> range:
    return range(heads.start - held.start, heads.stop - held.start)


Planes = tuple[int, ...]
"""Indices of planes. Each plane holds K, V or latents of one layer."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The layouts of a prefill and a decode instance between which KV moves. wire: the layout by which the scenario
    computes transfers. Raises ValueError if prefill's cache, the states or the window layers do not match `wire`.
    """

    wire: RankPairLayout
    num_kv_heads: int
    """Number of KV heads of the model."""
    prefill_tp: int
    """Number of ranks of the prefill instance."""
    decode_tp: int
    """Number of ranks of the decode instance."""
    prefill: CacheGeometry
    """Shape of the cache of one prefill rank."""
    decode: CacheGeometry
    """Shape of the cache of one decode rank."""
    layer_groups: int = 0
    """Number of groups into which a forward's layers are divided. The KV of each group is sent when the group is
    computed. 0: all KV is sent when the forward is done.
    """
    window_layers: Sequence[int] = ()
    """Indices of sliding-window layers. For these only the KV of a prompt's last tokens is sent, with the prompt's last
    unit."""
    state_bytes: Sequence[int] = ()
    """Size in bytes of one slot in each plane of linear-attention states. Prefill and decode ranks have states of the
    same shape.
    """

    def __post_init__(self) -> None:
        wire, side = self.wire, self.prefill
        if wire.num_planes + wire.num_window_planes != side.num_planes:
            raise ValueError(f"a cache has {side.num_planes} planes; {wire.num_planes} are sent in the scenario")
        if sum(self.state_bytes) != wire.state_bytes:
            raise ValueError(f"a state has {sum(self.state_bytes)} bytes, and {wire.state_bytes} in the scenario")
        if len(self.window_planes) != wire.num_window_planes:
            raise ValueError(
                f"window_layers have {len(self.window_planes)} planes, but {wire.num_window_planes} in the scenario"
            )
        for pair in self.pairs:
            one = len(pair.source_heads) * side.head_bytes * side.page_size
            moved, of_windows = one * wire.num_planes, one * wire.num_window_planes
            if (moved, of_windows) != (wire.page_bytes, wire.window_page_bytes):
                raise ValueError(
                    f"a page has {moved} bytes for each pair of ranks, and {of_windows} in windows; {wire.page_bytes} "
                    f"and {wire.window_page_bytes} in the scenario: its kv_dtype must have elements of "
                    f"{side.itemsize} bytes"
                )

    @property
    def window_planes(self) -> Planes:
        return _planes_of_layers(self.window_layers, self.prefill.planes_per_layer)

    @property
    def pairs(self) -> tuple[RankPair, ...]:
        return rank_pairs(self.num_kv_heads, self.prefill_tp, self.decode_tp, self.wire.num_writers)


Integers = NDArray[np.int64]


class Move(NamedTuple):
    """Copies between pages of two ranks. The same copies are made in each of `planes` (K, V or latents of one layer).
    Offsets and lengths are in bytes; offsets count from the start of the plane on this rank (local) and on the other
    rank (remote).
    """

    planes: Planes
    local_offsets: Integers
    remote_offsets: Integers
    lengths: Integers

    @property
    def num_descriptors(self) -> int:
        return len(self.planes) * len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return len(self.planes) * int(self.lengths.sum())


def move_of(unit: TransferUnit, pair: RankPair, exchange: Exchange) -> Move:
    """Returns the copies that send a unit without staging: from pages of the prefill rank to pages of the decode rank.
    A unit without pages, which carries only the first token, has no copies. pair: the two ranks. exchange: layouts of
    both instances.
    """
    return _move(unit.source_pages, unit.target_pages, planes_of(unit, exchange), pair, exchange)


def move_of_windows(windows: Windows, pair: RankPair, exchange: Exchange) -> Move:
    """Returns the copies that send KV of sliding-window layers without staging: from pages of the prefill rank to pages
    of the decode rank. windows: the page ids of both ranks. pair: the two ranks. exchange: layouts of both instances.
    """
    return _move(*windows, exchange.window_planes, pair, exchange)


def _move(
    source_pages: Sequence[int], target_pages: Sequence[int], planes: Planes, pair: RankPair, exchange: Exchange
) -> Move:
    source, target = np.array(source_pages, np.int64), np.array(target_pages, np.int64)
    if exchange.wire.slices:
        return _slices(source, target, planes, pair, exchange.prefill, exchange.decode)
    return _pages(source, target, planes, exchange.wire, exchange.prefill.page_bytes)


def planes_of(unit: TransferUnit, exchange: Exchange) -> Planes:
    """Returns the planes (K, V or latents of one layer) that a unit sends. If the unit belongs to a layer group
    (unit.after_layers), these are the planes of the group; otherwise those of all layers without a sliding window.
    """
    if unit.after_layers is None:
        whole = [layer for layer in range(exchange.prefill.num_layers) if layer not in exchange.window_layers]
        return _planes_of_layers(whole, exchange.prefill.planes_per_layer)
    return planes_of_group(unit.after_layers[1], exchange)


def planes_of_group(group: int, exchange: Exchange) -> Planes:
    layers = layers_of_group(exchange.prefill.num_layers, group, exchange.layer_groups)
    return _planes_of_layers(layers, exchange.prefill.planes_per_layer)


def _planes_of_layers(layers: Sequence[int], planes_per_layer: int) -> Planes:
    return tuple(planes_per_layer * layer + plane for layer in layers for plane in range(planes_per_layer))


def _pages(source: Integers, target: Integers, planes: Planes, wire: RankPairLayout, page_bytes: int) -> Move:
    """Returns copies of whole pages. source, target: ids of the pages on prefill and on decode, in the same order.
    Pages that are consecutive on both sides are one copy if wire.coalesces.
    """
    begins = np.ones(len(source) + 1, bool)  # the last is the end
    if wire.coalesces:
        begins[1:-1] = (source[1:] != source[:-1] + 1) | (target[1:] != target[:-1] + 1)
    bounds = begins.nonzero()[0]
    first, num_pages = bounds[:-1], bounds[1:] - bounds[:-1]
    return Move(planes, source[first] * page_bytes, target[first] * page_bytes, num_pages * page_bytes)


def _slices(
    source: Integers, target: Integers, planes: Planes, pair: RankPair, prefill: CacheGeometry, decode: CacheGeometry
) -> Move:
    """Returns copies of the heads that a pair of ranks sends, one copy for each token. source, target: ids of the pages
    on prefill and on decode, in the same order. planes: the planes to copy. prefill, decode: layouts of both caches.
    """
    local = slots_of(source, prefill.page_size) * prefill.token_bytes + pair.source_heads.start * prefill.head_bytes
    remote = slots_of(target, decode.page_size) * decode.token_bytes + pair.target_heads.start * decode.head_bytes
    return Move(planes, local, remote, np.full(len(local), len(pair.source_heads) * prefill.head_bytes))


def slots_of(pages: Sequence[int] | Integers, page_size: int) -> Integers:
    """Returns the slots of all tokens of the pages, in order. A slot is the index of one token's KV in a plane."""
    return (np.asarray(pages, np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
