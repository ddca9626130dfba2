"""How the KV of a page crosses from the ranks of a prefill instance to those of a decode instance.

Ranks of one instance do the same at the same time, so one pair of them stands for all. What a pair moves follows from
the tensor-parallel sizes (SGLang 0.5.23, common/conn.py: _resolve_rank_mapping, staging_buffer.py):

as many ranks    each sends all its KV heads to its counterpart             whole pages
fewer on decode  several prefill ranks write to each decode rank            a slice of each token's heads, or staging
more on decode   each prefill rank writes to several, one after another     a slice of each token's heads, or staging
latent KV        every rank holds all of it: one writer per decode rank     whole pages
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Between a prefill and a decode instance, for one pair of ranks."""

    page_size: int
    page_bytes: int
    """KV of one page that one prefill rank sends to one decode rank, all layers."""
    num_planes: int
    """Arrays that hold a part of every page: K and V of each layer, or the latent of each layer."""
    planes_per_layer: int = 1
    num_writers: int = 1
    """Prefill ranks that write to one decode rank."""
    num_targets: int = 1
    """Decode ranks that one prefill rank writes to."""
    num_pairs: int = 1
    """Of ranks, in all."""
    slices: bool = False
    """Heads are laid out differently on the two sides: each token of each plane is a piece of its own."""
    coalesces: bool = True
    """The engine joins pages that follow each other on both sides (Mooncake does, NIXL does not)."""
    state_bytes: int = 0
    """Of linear-attention layers, per request, sent behind the last page."""
    num_state_planes: int = 0

    def load(self, source: Sequence[int], target: Sequence[int], *, with_state: bool) -> "Load":
        """Of these pages, and of the request's state."""
        if self.slices:
            pieces = len(source) * self.page_size
        else:
            pieces = num_runs(source, target) if self.coalesces else len(source)
        num_bytes, num_descriptors = len(source) * self.page_bytes, pieces * self.num_planes
        if with_state:
            return Load(num_bytes + self.state_bytes, num_descriptors + self.num_state_planes)
        return Load(num_bytes, num_descriptors)

    def part(self, load: "Load", group: int, num_groups: int) -> "Load":
        """What of a load belongs to one group of layers; layers with state lie somewhere between those with KV."""
        if self.num_state_planes:
            return load.share(range(group, group + 1), num_groups)
        num_layers = self.num_planes // self.planes_per_layer
        return load.share(layers_of_group(num_layers, group, num_groups), num_layers)


def layers_of_group(num_layers: int, group: int, num_groups: int) -> range:
    """Groups are as equal as whole layers allow."""
    return range(num_layers * group // num_groups, num_layers * (group + 1) // num_groups)


class Load(NamedTuple):
    """What one pair of ranks moves: bytes, and pieces of memory that the engine is told to copy."""

    num_bytes: int
    num_descriptors: int

    def share(self, parts: range, num_parts: int) -> "Load":
        """Some neighbours of num_parts that are as equal as whole numbers allow."""
        return Load(*(n * parts.stop // num_parts - n * parts.start // num_parts for n in self))


def num_runs(source: Sequence[int], target: Sequence[int]) -> int:
    """Longest stretches in which the page ids of both sides rise by one."""
    count = 1 if source else 0
    for before, after, target_before, target_after in zip(source, source[1:], target, target[1:], strict=False):
        if after - before != 1 or target_after - target_before != 1:
            count += 1
    return count
