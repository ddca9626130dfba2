"""The KV cache of one rank: memory that the page ids of pdsim.core index."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from pdreal.geometry import slots_of

SCRATCH_PAGE = 0
"""Never handed out by a page pool: takes what nobody reads."""


class PagedKv:
    """Keys and values of every layer, in pages.

    planes[2 * layer] holds the layer's keys and planes[2 * layer + 1] its values, each a contiguous
    [slots, KV heads of the rank, head_dim] of one allocation. The slot of a token is page * page_size + offset.
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
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        """num_pages: those of the pool, 1 to num_pages; the scratch page comes on top.

        allocate: bytes on the device to lie in, e.g. shared with other processes; None for its own.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        shape = (2 * num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        if allocate is None:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        else:
            self.memory = allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
        self.planes = self.memory.unbind()
        self._num_slots = shape[1]
        self._layers = self.memory.view(num_layers, 2 * self._num_slots, num_kv_heads, head_dim).unbind()
        """The two planes of each as one."""

    def slots(self, page_table: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots of a sequence's tokens [start, stop), in int32 on the CPU."""
        positions = torch.arange(start, stop, dtype=torch.int32)
        pages = torch.from_numpy(np.asarray(page_table[: -(-stop // self.page_size)], dtype=np.int32))
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def append(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write [tokens, heads, head_dim] to their slots."""
        keys, values = self.layer(layer)
        if keys.is_cuda:
            import pdkernels  # noqa: PLC0415  Triton is needed on GPUs only

            pdkernels.append(keys, values, slots, key, value)
        else:
            keys[slots], values[slots] = key, value

    def rows(self, slots: Tensor) -> Tensor:
        """Rows that `read` takes for slots: where a layer has their keys, and then where it has their values."""
        slots = slots.long()  # indexing by int32 would convert them again at each layer
        return torch.cat((slots, slots + self._num_slots))

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of keys and values, [tokens, heads, head_dim]."""
        keys, values = self._layers[layer][rows].chunk(2)
        return keys, values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its planes of keys and of values."""
        return self.planes[2 * layer], self.planes[2 * layer + 1]


class SavedKv:
    """KV of retracted sequences in host memory, by request."""

    def __init__(self, kv: PagedKv) -> None:
        self._kv = kv
        self._saved: dict[int, Tensor] = {}
        """[planes, tokens, heads, head_dim]."""

    def save(self, request_id: int, num_kv_tokens: int, page_table: Sequence[int]) -> None:
        self._saved[request_id] = self._kv.memory[:, self._slots(page_table, num_kv_tokens)].cpu()

    def restore(self, request_id: int, page_table: Sequence[int]) -> None:
        """Nothing is kept."""
        saved = self._saved.pop(request_id)
        memory = self._kv.memory
        memory[:, self._slots(page_table, saved.shape[1])] = saved.to(memory.device)

    def forget(self, request_id: int) -> None:
        self._saved.pop(request_id, None)

    def _slots(self, page_table: Sequence[int], num_kv_tokens: int) -> Tensor:
        return self._kv.slots(page_table, 0, num_kv_tokens).to(self._kv.memory.device)


Digests = Mapping[str, int]
"""Fingerprint of each KV head of the model; heads are text, for they cross as JSON."""


def digest(
    planes: Sequence[torch.Tensor], heads: range, pages: Sequence[int], tokens: range, page_size: int
) -> Digests:
    """CRC-32 over all layers of the KV of some tokens of a page list. heads: those that the rank holds."""
    slots = torch.from_numpy(slots_of(pages, page_size)[tokens.start : tokens.stop]).to(planes[0].device)
    sums = dict.fromkeys(heads, 0)
    for plane in planes:
        by_head = plane.index_select(0, slots).transpose(0, 1).contiguous().view(torch.uint8).cpu().numpy()
        for head, kv in zip(heads, by_head, strict=True):
            sums[head] = zlib.crc32(kv, sums[head])
    return {str(head): value for head, value in sums.items()}
