"""Where the bytes of a KV cache lie: the layout that all planes (K or V of one layer) share, and the pool of pages with
that layout.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

UNIT_BYTES = 16
"""Kernels copy units of this many bytes: the widest access of a GPU thread."""

_LARGEST_PLANE_BYTES = 16 << 30  # offsets inside a plane are 32-bit counts of 8-byte words


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one plane (K or V of one layer) on one rank. heads: KV heads of the rank.

    Order NHD: [slots, heads, head_dim], token after token. Order HND: [pages, heads, page_size, head_dim], so that one
    head of a page is contiguous. Page p holds token slots p * page_size to (p + 1) * page_size - 1 in both.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 1
    order: Literal["NHD", "HND"] = "NHD"

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one plane (K or V of one layer)."""
        return self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of all heads of one token in one plane (K or V of one layer)."""
        return self.heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def first_byte(self, head: int) -> int:
        """Returns the offset in bytes of a head in every page (HND) or token (NHD)."""
        return head * self.head_bytes * (self.page_size if self.order == "HND" else 1)

    def check_heads(self, heads: range | None, parts: int) -> range:
        """Returns `heads`, or the range of all heads if `heads` is None. parts: number of equal parts into which the
        heads are to be divided. Raises ValueError if the range is empty or has gaps, if the layout lacks some of the
        heads, or if the heads do not divide into this number of equal parts.
        """
        if heads is None:
            heads = range(self.heads)
        if heads.step != 1 or not 0 <= heads.start < heads.stop <= self.heads:
            raise ValueError(f"heads must be a range within range(0, {self.heads}), not {heads}")
        if parts < 1 or len(heads) % parts:
            raise ValueError(f"{len(heads)} heads do not divide into {parts} equal slices")
        return heads


@dataclass(eq=False)
class Pool:
    """The KV pages of one rank, registered once: K and V tensors of every layer and the table of their addresses.
    prepared: launches that were prepared for this pool (checked arguments and kernels), by their arguments.

    Args: keys, values: one tensor per layer, contiguous, alike in shape, dtype and device; values are empty for
    latents. Three dimensions mean NHD [slots, heads, head_dim], four mean HND [pages, heads, page_size, head_dim].
    page_size: tokens per page, a power of two. None: 1 for NHD; for HND, the size is taken from the tensors.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    page_size: int | None = None
    layout: KvLayout = field(init=False)
    table: torch.Tensor = field(init=False)  # addresses of all planes, K of every layer before V of every layer
    prepared: dict[Hashable, Any] = field(init=False, default_factory=dict)  # kernels made ready

    def __post_init__(self) -> None:
        self.layout = _layout(self.planes, self.page_size)
        self._tables = {self.device: self._make_table(self.device)}
        self.table = self._tables[self.device]

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def planes(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values]

    @property
    def num_planes(self) -> int:
        return len(self.planes)

    def table_on(self, device: torch.device) -> torch.Tensor:
        """Returns the address table for a kernel on another device. That device must have mapped this device's
        memory.
        """
        if device not in self._tables:
            self._tables[device] = self._make_table(device)
        return self._tables[device]

    def _make_table(self, device: torch.device) -> torch.Tensor:
        return _table_of([plane.data_ptr() for plane in self.planes], device)


@dataclass(eq=False)
class MappedPool:
    """The KV pages of a rank in another process. addresses: where that rank's planes (K, V or latents of one layer) are
    mapped in this process, in the order of the planes of the Pool from which `push` copies.
    """

    addresses: Sequence[int]
    layout: KvLayout

    def __post_init__(self) -> None:
        _check_layout(self.layout, self.addresses)

    @property
    def num_planes(self) -> int:
        return len(self.addresses)

    def table_on(self, device: torch.device) -> torch.Tensor:
        return _table_of(self.addresses, device)


def _table_of(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _layout(planes: list[torch.Tensor], page_size: int | None) -> KvLayout:
    first = planes[0]
    for plane in planes:
        if (plane.shape, plane.dtype, plane.device) != (first.shape, first.dtype, first.device):
            raise ValueError(f"planes differ: {_describe(plane)} beside {_describe(first)}")
        if not plane.is_contiguous():
            raise ValueError("planes must be contiguous")
    if first.dim() not in {3, 4}:
        raise ValueError(
            f"a plane is [slots, heads, head_dim] or [pages, heads, page_size, head_dim], not {_describe(first)}"
        )
    if first.nbytes > _LARGEST_PLANE_BYTES:
        raise ValueError(f"a plane may have {_LARGEST_PLANE_BYTES} bytes at most, not {first.nbytes}")
    if first.dim() == 3:
        layout = KvLayout(first.shape[1], first.shape[2], first.dtype, page_size or 1)
    else:
        if page_size not in {None, first.shape[2]}:
            raise ValueError(f"page_size is {page_size}, but the planes are {_describe(first)}")
        layout = KvLayout(first.shape[1], first.shape[3], first.dtype, first.shape[2], "HND")
    _check_layout(layout, [plane.data_ptr() for plane in planes])
    return layout


def _check_layout(layout: KvLayout, addresses: Sequence[int]) -> None:
    if any(address % UNIT_BYTES for address in addresses):
        raise ValueError(f"planes must begin at multiples of {UNIT_BYTES} bytes")
    if layout.page_size & (layout.page_size - 1):
        raise ValueError(f"page_size must be a power of two, not {layout.page_size}")
    if layout.head_bytes % UNIT_BYTES:
        raise ValueError(f"a head must be a multiple of {UNIT_BYTES} bytes, not {layout.head_bytes}")


def _describe(plane: torch.Tensor) -> str:
    return f"{list(plane.shape)} {plane.dtype} on {plane.device}"
