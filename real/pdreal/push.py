"""Pushes of KV: heads of pages, of many planes at once, from a sender's planes into a peer's, which are mapped here.

One call moves what would be a slice for each token and plane, and needs no staging memory.
"""

import ctypes
from collections.abc import Sequence

import torch

from pdreal.geometry import CacheGeometry, RankPair, slots_of
from pdreal.paged_kv import bits_of
from pdreal.transports.protocol import Addresses, TransferError


class TorchPush:
    def __init__(
        self, planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry
    ) -> None:
        self.addresses = addresses
        self._page_size = target.page_size
        self._sources = [bits_of(plane)[:, _slice(pair.source_heads)] for plane in planes]
        plane_bytes = (target.num_pages + 1) * target.page_bytes
        shape = (-1, target.num_kv_heads, planes[0].shape[2])
        mapped = [(ctypes.c_uint8 * plane_bytes).from_address(address) for address in addresses.tolist()]
        there = [torch.frombuffer(memory, dtype=planes[0].dtype).view(shape) for memory in mapped]
        self._targets = [bits_of(plane)[:, _slice(pair.target_heads)] for plane in there]

    def __call__(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        source, target = (torch.from_numpy(slots_of(pages, self._page_size)) for pages in (source_pages, target_pages))
        for here, there in zip(self._sources, self._targets, strict=True):
            there.index_copy_(0, target, here.index_select(0, source))


class KernelPush:
    """Copies all planes in one launch, on the current stream of the calling thread."""

    def __init__(
        self, planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry
    ) -> None:
        import pdkernels  # noqa: PLC0415 - only where there is a GPU

        self.addresses = addresses
        self._push = pdkernels.push
        self._pair = pair
        self._source = pdkernels.Pool(planes, (), target.page_size)  # in any order that both sides have
        layout = pdkernels.KvLayout(target.num_kv_heads, target.head_dim, planes[0].dtype, target.page_size)
        self._target = pdkernels.MappedPool(addresses.tolist(), layout)

    def __call__(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        device = self._source.device
        try:
            here, there = torch.tensor([source_pages, target_pages], dtype=torch.int32, device=device)
            self._push(
                self._source,
                here,
                self._target,
                there,
                len(source_pages) * self._target.layout.page_size,
                source_heads=self._pair.source_heads,
                target_heads=self._pair.target_heads,
            )
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as wrong:
            raise TransferError(f"push: {wrong}") from None


Push = TorchPush | KernelPush
"""From source to target pages of one pair of ranks. Returns when the bytes are in place."""


def push_of(planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry) -> Push:
    """planes: [slots, heads, head_dim]; addresses: those of the target's, as they are mapped here."""
    made = TorchPush if planes[0].device.type == "cpu" else KernelPush
    return made(planes, addresses, pair, target)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
