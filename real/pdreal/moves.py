"""From a transfer unit to the copies of memory that carry it out, for one pair of ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdreal.geometry import CacheGeometry, Exchange, RankPair
from pdsim.core.transfer_plan import RankPairLayout, TransferUnit, layers_of_group

Integers = NDArray[np.int64]


class Move(NamedTuple):
    """The same copies in each of some planes: from local to remote offsets, in bytes from the plane's begin."""

    planes: range
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
    """Pages to pages, without staging. An empty unit, which carries only the first token, moves nothing."""
    sides = exchange.prefill, exchange.decode
    source, target = np.array(unit.source_pages, np.int64), np.array(unit.target_pages, np.int64)
    planes = planes_of(unit, exchange)
    if exchange.wire.slices:
        return _slices(source, target, planes, pair, *sides)
    return _pages(source, target, planes, exchange.wire, exchange.prefill.page_bytes)


def planes_of(unit: TransferUnit, exchange: Exchange) -> range:
    """All, or those of the unit's group of layers."""
    if unit.after_layers is None:
        return range(exchange.prefill.num_planes)
    layers = layers_of_group(exchange.prefill.num_layers, unit.after_layers[1], exchange.layer_groups)
    return range(2 * layers.start, 2 * layers.stop)


def _pages(source: Integers, target: Integers, planes: range, wire: RankPairLayout, page_bytes: int) -> Move:
    """Whole pages; runs of them as one copy if the engine is to see them joined."""
    begins = np.ones(len(source) + 1, bool)  # the last is the end
    if wire.coalesces:
        begins[1:-1] = (source[1:] != source[:-1] + 1) | (target[1:] != target[:-1] + 1)
    bounds = begins.nonzero()[0]
    first, num_pages = bounds[:-1], bounds[1:] - bounds[:-1]
    return Move(planes, source[first] * page_bytes, target[first] * page_bytes, num_pages * page_bytes)


def _slices(
    source: Integers, target: Integers, planes: range, pair: RankPair, prefill: CacheGeometry, decode: CacheGeometry
) -> Move:
    """Of each token the heads that cross."""
    local = slots_of(source, prefill.page_size) * prefill.token_bytes + pair.source_heads.start * prefill.head_bytes
    remote = slots_of(target, decode.page_size) * decode.token_bytes + pair.target_heads.start * decode.head_bytes
    return Move(planes, local, remote, np.full(len(local), len(pair.source_heads) * prefill.head_bytes))


def slots_of(pages: Sequence[int] | Integers, page_size: int) -> Integers:
    """Token slots of pages, in their order."""
    return (np.asarray(pages, np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
