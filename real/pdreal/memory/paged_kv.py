"""The KV cache of one rank, indexed by the page ids of pdsim.core, and host memory for KV that leaves the cache."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from pdreal.memory.geometry import slots_of
from pdreal.transports.streams import wait_for_engines
from pdsim.core.messages import LoadBack, WriteBackup

SCRATCH_PAGE = 0
"""Page that page pools never allocate. Padding writes to it, and nothing reads it."""


class PagedKv:
    """Keys and values, or latents, of every layer, in pages.

    planes[2 * layer] holds the keys of a layer and planes[2 * layer + 1] its values, each contiguous [slots, KV heads
    of the rank, head_dim]. With latent attention planes[layer] holds latents, with one head. All planes lie in one
    allocation. The slot of a token is page * page_size + offset.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        computed_dtype: torch.dtype | None = None,
        planes_per_layer: int = 2,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        """num_pages: pages of the pool, with the ids 1 to num_pages. Page 0 is added for writes of padding rows.

        planes_per_layer: 2: keys and values; 1: latents. computed_dtype: type in which KV is written and read if the
        cache is kept in e4m3.

        allocate: makes the cache's memory, of the given number of bytes, for example shared with other processes. None:
        torch allocates the memory.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self._planes_per_layer = planes_per_layer
        self._widen_to = computed_dtype if dtype == torch.float8_e4m3fn else None
        shape = (planes_per_layer * num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        if allocate is None:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.memory = allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.planes = self.memory.unbind()
        self._num_slots = shape[1]
        self._layers = self.memory.view(num_layers, planes_per_layer * self._num_slots, num_kv_heads, head_dim).unbind()
        """One tensor per layer: its planes (K and V, or latents), one after another in the first dimension."""

    def slots(self, page_table: Sequence[int], start: int, stop: int) -> Tensor:
        """Returns the slots of a sequence's tokens start to stop - 1, int32 on the CPU. A slot is the index of one
        token's KV in a plane.
        """
        positions = torch.arange(start, stop, dtype=torch.int32)
        pages = torch.from_numpy(np.asarray(page_table[: -(-stop // self.page_size)], dtype=np.int32))
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def append(self, layer: int, slots: Tensor, *new: Tensor) -> tuple[Tensor, ...]:
        """Writes keys and values [tokens, heads, head_dim], or latents, to their slots. Returns the written keys and
        values, or latents, as the method `read` would return them.

        e4m3 is used without scales, as engines do if a checkpoint has no scales.
        """
        planes = self.layer(layer)
        if self._widen_to is not None:
            new = tuple(_narrowed(part) for part in new)
        if planes[0].is_cuda and len(new) > 1:
            import pdkernels  # noqa: PLC0415  Triton is needed on GPUs only

            pdkernels.append(planes[0], planes[1], slots, new[0], new[1])
        else:
            for plane, part in zip(planes, new, strict=True):
                bits_of(plane).index_copy_(0, slots.long(), bits_of(part))
        return self._wide(new)

    def _wide(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return kept if self._widen_to is None else tuple(part.to(self._widen_to) for part in kept)

    def rows(self, slots: Tensor) -> Tensor:
        """Returns the row numbers of slots, for the method `read`. A layer's planes lie one after another in one
        tensor, so each slot has one row in each plane: first come the rows of all slots in the first plane.
        """
        slots = slots.long()  # indexing by int32 would convert them again at each layer
        return torch.cat([slots + plane * self._num_slots for plane in range(self._planes_per_layer)])

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, ...]:
        """Returns a copy of keys and values, [tokens, heads, head_dim], or of latents. rows: the tokens' rows, as
        `PagedKv.rows` returns them.
        """
        return self._wide(self._layers[layer][rows].chunk(self._planes_per_layer))

    def layer(self, layer: int) -> Sequence[Tensor]:
        """Returns the planes of a layer: keys and values, or latents."""
        begin = self._planes_per_layer * layer
        return self.planes[begin : begin + self._planes_per_layer]


def bits_of(kv: Tensor) -> Tensor:
    """Returns the same memory, viewed as bytes if torch cannot index the type (e4m3)."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


class SavedKv:
    """KV of retracted sequences in host memory, by request id."""

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv
        self._saved: dict[int, Tensor] = {}
        """Saved KV by request, [planes (K, V or latents of one layer), tokens, heads, head_dim]."""

    def save(self, request_id: int, num_kv_tokens: int, page_table: Sequence[int]) -> None:
        self._saved[request_id] = self._kv.memory[:, self._slots(page_table, num_kv_tokens)].cpu()

    def restore(self, request_id: int, page_table: Sequence[int]) -> None:
        """Copies the saved KV of a request into pages, and drops the saved copy."""
        saved = self._saved.pop(request_id)
        memory = bits_of(self._kv.memory)
        memory[:, self._slots(page_table, saved.shape[1])] = bits_of(saved.to(memory.device))

    def forget(self, request_id: int) -> None:
        self._saved.pop(request_id, None)

    def _slots(self, page_table: Sequence[int], num_kv_tokens: int) -> Tensor:
        return self._kv.slots(page_table, 0, num_kv_tokens).to(self._kv.memory.device)


Digests = Mapping[str, int]
"""Fingerprints of a rank's KV heads and of its part of a linear-attention state. Keys are texts, because digests are
sent as JSON: the number of the head in the model, or "state of rank" and the rank's index."""


def digest(
    planes: Sequence[torch.Tensor],
    heads: range,
    pages: Sequence[int],
    tokens: range,
    page_size: int,
    windows: Mapping[int, int] = MappingProxyType({}),
) -> Digests:
    """Returns the CRC-32 of the KV of some tokens, over all layers, for each KV head.

    heads: the heads that the rank holds. pages: pages of a sequence. tokens: indices of the tokens; token 0 is the
    first token of the first page. windows: number of last tokens to read in a plane with a sliding window, by the
    plane's index; all tokens are read in other planes.
    """
    slots = torch.from_numpy(slots_of(pages, page_size)[tokens.start : tokens.stop]).to(planes[0].device)
    sums = dict.fromkeys(heads, 0)
    for number, plane in enumerate(planes):
        by_head = (
            plane.index_select(0, slots[-windows.get(number, 0) :])
            .transpose(0, 1)
            .contiguous()
            .view(torch.uint8)
            .cpu()
            .numpy()
        )
        for head, kv in zip(heads, by_head, strict=True):
            sums[head] = zlib.crc32(kv, sums[head])
    return {str(head): value for head, value in sums.items()}


_PART_BYTES = 64 * 2**20
"""Maximum number of bytes copied at a time; at least one page is copied. Besides the KV cache, copies need a GPU buffer
of this size."""


class HostKv:
    """The host memory that extends the prefix cache. memory[page] holds all planes (K, V or latents of one layer) of a
    page, so consecutive pages are one copy to or from a GPU.
    """

    def __init__(self, kv: PagedKv, num_pages: int) -> None:
        """num_pages: number of host pages, which are numbered 1 to num_pages as in a page pool."""
        num_planes = len(kv.planes)
        # as the widest integers: torch does not copy e4m3 by index, and copies short elements one by one
        self._pages = kv.memory.view(num_planes, kv.num_pages + 1, -1).view(torch.int64).transpose(0, 1)
        """The cache, viewed as [pages, planes, words of 8 bytes]."""
        self.memory = torch.zeros((num_pages + 1, *self._pages.shape[1:]), dtype=torch.int64)
        self._device = kv.memory.device
        self._most_pages = max(1, _PART_BYTES // (8 * self._pages[0].numel()))
        if self._device.type == "cuda":
            _pin(self.memory)

    def copy(self, command: WriteBackup | LoadBack) -> None:
        """Copies pages to host memory (WriteBackup) or from host memory (LoadBack), and returns when the copy
        is done.
        """
        if isinstance(command, WriteBackup):
            self._write(command.pages, command.host_pages)
        else:
            self._load(command.host_pages, command.pages)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _write(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        wait_for_engines(self._device)
        for i in range(0, len(pages), self._most_pages):
            part = slice(i, i + self._most_pages)
            gathered = self._pages.index_select(0, self._index(pages[part]))
            for here, there in _runs(host_pages[part]):
                self.memory[there].copy_(gathered[here], non_blocking=True)

    def _load(self, host_pages: Sequence[int], pages: Sequence[int]) -> None:
        for i in range(0, len(pages), self._most_pages):
            part = slice(i, i + self._most_pages)
            gathered = torch.empty((len(pages[part]), *self._pages.shape[1:]), dtype=torch.int64, device=self._device)
            for here, there in _runs(host_pages[part]):
                gathered[here].copy_(self.memory[there], non_blocking=True)
            self._pages.index_copy_(0, self._index(pages[part]), gathered)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages).to(self._device)


def _runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yields each run of consecutive pages: its positions in the list, and its pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield slice(start, i), slice(pages[start], pages[i - 1] + 1)
            start = i


def _pin(memory: Tensor) -> None:
    """Pins exactly the bytes of this memory, until it is freed. torch's own pinning would allocate up to the next power
    of two.
    """
    cuda, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(address, memory.nbytes, 0))
    finalize(memory, cuda.cudaHostUnregister, address).atexit = False


_LARGEST_E4M3 = 448.0


def _narrowed(kv: Tensor) -> Tensor:
    """Returns keys, values or latents in e4m3. Values beyond the range of e4m3 become the largest or smallest value."""
    return kv.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
