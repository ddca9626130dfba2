"""Host memory behind the pages of one rank: the copies that the core's host cache decides."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdreal.paged_kv import PagedKv
from pdreal.streams import wait_for_engines
from pdsim.core.messages import LoadBack, WriteBackup

_PART_BYTES = 64 * 2**20
"""Memory of a GPU beside its cache: as much is gathered at a time."""


class HostKv:
    """memory[page] holds all planes of a page, one behind another: on a GPU each run of pages is one copy."""

    def __init__(self, kv: PagedKv, num_pages: int) -> None:
        """num_pages: 1 to num_pages, as in a page pool."""
        num_planes = len(kv.planes)
        # as the widest integers: torch does not copy e4m3 by index, and copies short elements one by one
        self._pages = kv.memory.view(num_planes, kv.num_pages + 1, -1).view(torch.int64).transpose(0, 1)
        """[pages, planes, words] of the cache."""
        self.memory = torch.zeros((num_pages + 1, *self._pages.shape[1:]), dtype=torch.int64)
        self._device = kv.memory.device
        self._most_pages = max(1, _PART_BYTES // (8 * self._pages[0].numel()))
        if self._device.type == "cuda":
            _pin(self.memory)

    def copy(self, command: WriteBackup | LoadBack) -> None:
        """It is done on return."""
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
    """Runs of consecutive pages: their places in the list, and the pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield slice(start, i), slice(pages[start], pages[i - 1] + 1)
            start = i


def _pin(memory: Tensor) -> None:
    """Pin just these bytes: torch's own pinned memory is rounded up to a power of two."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
