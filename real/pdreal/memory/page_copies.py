"""Copies of some KV heads of pages, all layers at once: into staging memory, out of staging memory, or into a peer's
pages.

A staged cell is contiguous, [plane, token, head, head_dim], with K of every layer before V of every layer. The cells of
all ranks that write to one decode rank follow each other.

A push copies from a sender's planes into a peer's planes, which are mapped here. One call takes the place of one copy
for each token and plane, and needs no staging memory.
"""

import ctypes
from collections.abc import Sequence

import torch

from pdreal.memory.geometry import CacheGeometry, RankPair, slots_of
from pdreal.memory.paged_kv import bits_of
from pdreal.transports.protocol import Addresses, TransferError


class TorchStaging:
    def __init__(self, planes: Sequence[torch.Tensor], page_size: int) -> None:
        """planes: [slots, heads, head_dim] each, K and V of each layer in turn. page_size: tokens of a page."""
        self._planes = [*map(bits_of, planes[0::2]), *map(bits_of, planes[1::2])]
        self._page_size = page_size

    def gather(self, pages: Sequence[int], heads: range, cell: torch.Tensor) -> None:
        """Copies some KV heads of the given pages into a staging cell. pages: page ids. heads: indices of the KV heads,
        counted among the heads of this rank. cell: [bytes] in uint8.
        """
        slots = self._slots(pages)
        for plane, part in zip(self._planes, self._by_plane(cell, heads), strict=True):
            torch.index_select(plane[:, _slice(heads)], 0, slots, out=part)

    def scatter(self, pages: Sequence[int], writers: Sequence[range], cells: torch.Tensor) -> None:
        """Copies the cells of all writers (the ranks that send to this one) into the pages. writers: for each writer's
        cell, its heads' indices among this rank's heads. cells: the cells in the same order, uint8 [bytes].
        """
        slots = self._slots(pages)
        for heads, cell in zip(writers, cells.chunk(len(writers)), strict=True):
            for plane, part in zip(self._planes, self._by_plane(cell, heads), strict=True):
                plane[:, _slice(heads)].index_copy_(0, slots, part)

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(slots_of(pages, self._page_size))

    def _by_plane(self, cell: torch.Tensor, heads: range) -> torch.Tensor:
        first = self._planes[0]
        return cell.view(first.dtype).view(len(self._planes), -1, len(heads), first.shape[2])


class KernelStaging:
    """Copies between the cache of one rank on a GPU and staging memory. Each copy moves all layers in one kernel
    launch, on the current stream of the calling thread. A scatter of cells that share KV heads launches one kernel for
    each cell.
    """

    def __init__(self, planes: Sequence[torch.Tensor], page_size: int) -> None:
        """planes: [slots, heads, head_dim] each, K and V of each layer in turn. page_size: tokens of a page."""
        import pdkernels  # noqa: PLC0415 - only where there is a GPU

        self._kernels = pdkernels
        self._pool = pdkernels.Pool(planes[0::2], planes[1::2], page_size)
        self._page_size = page_size

    def gather(self, pages: Sequence[int], heads: range, cell: torch.Tensor) -> None:
        self.launch_gather(pages, heads, cell).synchronize()

    def scatter(self, pages: Sequence[int], writers: Sequence[range], cells: torch.Tensor) -> None:
        self.launch_scatter(pages, writers, cells).synchronize()

    def launch_gather(self, pages: Sequence[int], heads: range, cell: torch.Tensor) -> torch.cuda.Stream:
        """Launches a kernel that copies some KV heads of the given pages into a staging cell. Returns the kernel's
        stream. pages: page ids. heads: indices of the KV heads, counted among the heads of this rank. cell: [bytes] in
        uint8.
        """
        self._kernels.gather(self._pool, *self._tokens(pages), cell, heads=heads)
        return torch.cuda.current_stream(self._pool.device)

    def launch_scatter(self, pages: Sequence[int], writers: Sequence[range], cells: torch.Tensor) -> torch.cuda.Stream:
        """Launches a copy of staged cells into pages of this rank. writers: for each rank that sends a cell, indices
        of the cell's heads among this rank's heads. cells: the cells in the same order, uint8 [bytes]. Returns the
        stream on which the copy runs.
        """
        tokens = self._tokens(pages)
        if [head for heads in writers for head in heads] == list(range(self._pool.layout.heads)):
            self._kernels.scatter(self._pool, *tokens, cells, writers=len(writers))
        else:  # some bring the same heads
            for heads, cell in zip(writers, cells.chunk(len(writers)), strict=True):
                self._kernels.scatter(self._pool, *tokens, cell, heads=heads)
        return torch.cuda.current_stream(self._pool.device)

    def _tokens(self, pages: Sequence[int]) -> tuple[torch.Tensor, int]:
        table = torch.tensor(pages, dtype=torch.int32, device=self._pool.device)
        return table, len(pages) * self._page_size


Staging = TorchStaging | KernelStaging
"""Copies between one rank's cache and staging memory. Each call returns when its bytes are copied."""


def staging_of(planes: Sequence[torch.Tensor], page_size: int) -> Staging:
    """Returns the object that copies between a rank's cache and staging memory. The object uses torch on a CPU, and
    kernels on a GPU. planes: the cache, [slots, heads, head_dim] each, K and V of each layer in turn. page_size: number
    of tokens of a page.
    """
    return TorchStaging(planes, page_size) if planes[0].device.type == "cpu" else KernelStaging(planes, page_size)


class TorchPush:
    def __init__(
        self, planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry
    ) -> None:
        """planes: planes of the source's cache, each [slots, heads, head_dim]. addresses: where the target's planes are
        mapped in this process. pair: the two ranks, with the heads that are sent. target: shape of the target's cache.
        """
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
    """Copies from pages of the source rank to pages of the target rank, which are mapped here. One launch copies all
    planes (K, V or latents of one layer), on the current stream of the calling thread.
    """

    def __init__(
        self, planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry
    ) -> None:
        """planes: planes of the source's cache, [slots, heads, head_dim] each. addresses: where the target's planes are
        mapped in this process. pair: the two ranks, with the heads that are sent. target: shape of the target's cache.
        """
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
"""Copies from pages of the source rank to pages of the target rank. Each call returns when its bytes are copied."""


def push_of(planes: Sequence[torch.Tensor], addresses: Addresses, pair: RankPair, target: CacheGeometry) -> Push:
    """Returns the function that copies pages of a prefill rank directly into pages of a decode rank. planes: the
    prefill rank's, [slots, heads, head_dim] each. addresses: where the decode rank's planes are mapped in this process.
    pair: the two ranks, with the heads that are sent. target: shape of the decode rank's cache.
    """
    made = TorchPush if planes[0].device.type == "cpu" else KernelPush
    return made(planes, addresses, pair, target)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
