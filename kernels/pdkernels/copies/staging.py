"""The host's part of gather and scatter: checks arguments, chooses the compiled kernel for them, and launches it."""

from dataclasses import dataclass
from typing import Any

import torch

from pdkernels.copies.tiling import FEW_PROGRAMS, Tiling, grid_of
from pdkernels.launch import Launcher
from pdkernels.layout import UNIT_BYTES, Pool

_LARGEST_SPAN_BYTES = 16 << 30


def staging_bytes(pool: Pool, tokens: int, heads: range | None = None) -> int:
    """Returns the size in bytes of one request's staging span. The span holds the parts of all target ranks (gather's
    `slices`) or of all source ranks (scatter's `writers`). heads: as for gather.
    """
    moved = pool.layout.heads if heads is None else len(heads)
    return len(pool.planes) * tokens * moved * pool.layout.head_bytes


@dataclass(frozen=True, eq=False)
class StagingCopy:
    """A kernel between pages and staging, and its default tiling."""

    kernel: Any
    tiling: Tiling

    def ready(
        self, pool: Pool, heads: range | None, slices: int, tiling: Tiling | None, *, limited: bool, batched: bool
    ) -> "Ready":
        """Returns the copy, prepared for these arguments, which is kept in the pool. Its kernel is compiled at the
        first launch. heads: heads to move; None: all. slices: number of target ranks, or for a scatter of source ranks.
        tiling: None: the default. limited: True: the number of programs is limited. batched: True: for several
        requests. Raises ValueError if the pool lacks the heads, or if they do not divide into the slices.
        """
        key = (self, heads, slices, tiling, limited, batched)
        ready = pool.prepared.get(key)
        if ready is None:
            cut = tiling or (FEW_PROGRAMS if limited else self.tiling)
            ready = pool.prepared[key] = Ready(self, pool, heads, slices, cut, batched=batched)
        return ready


class Ready:
    """A gather or scatter that is prepared for many calls: all arguments that stay the same are checked and stored
    once, so a call takes only a few microseconds on the host.
    """

    def __init__(
        self, copy: StagingCopy, pool: Pool, heads: range | None, slices: int, tiling: Tiling, *, batched: bool
    ) -> None:
        layout = pool.layout
        moved = layout.check_heads(heads, slices)
        self._pool = pool
        self._device = pool.device
        self._page_size = layout.page_size
        self._planes = len(pool.planes)
        self._row = len(moved) * layout.head_bytes // UNIT_BYTES
        self._token_bytes = self._planes * self._row * UNIT_BYTES
        self._units = tiling.units
        self._table = pool.table.data_ptr()
        self._first_byte = layout.first_byte(moved.start)
        self._checked: torch.Tensor | None = None  # the staging buffer of the last call, and its size
        self._staging_bytes = 0
        self.constants = {
            "ROW": self._row,
            "HEAD": layout.head_bytes // UNIT_BYTES,
            "HEADS": layout.heads,
            "PAGE": layout.page_size,
            "HND": layout.order == "HND",
            "SLICES": slices,
            "PLANES": self._planes,
            "BATCHED": batched,
            "UNITS": tiling.units,
        }
        self._launch = Launcher(copy.kernel, self.constants, tiling.warps)

    def request(
        self, pages: torch.Tensor, tokens: int, staging: torch.Tensor, offset_bytes: int, programs: int | None
    ) -> None:
        """Copies KV of one request between pages and staging. The arguments are those of gather and scatter. The host
        knows the request's length.
        """
        if tokens <= 0:
            return
        if pages.dtype is not torch.int32 or pages.numel() * self._page_size < tokens or not pages.is_contiguous():
            check_pages(self._pool, pages, tokens)
        self._check(staging, offset_bytes, tokens * self._token_bytes)
        grid = grid_of(-(-tokens * self._row // self._units), 1, self._planes, programs)
        self._launch(
            self._device,
            grid,
            self._table,
            pages.data_ptr(),
            0,
            staging.data_ptr() + offset_bytes,
            tokens,
            self._first_byte,
        )

    def batch(
        self,
        pages: torch.Tensor,
        spans: torch.Tensor,
        staging: torch.Tensor,
        longest_tokens: int,
        programs: int | None,
    ) -> None:
        """Copies KV of several requests between pages and staging. The arguments are those of gather_batch and
        scatter_batch. The kernel reads the requests' lengths on the device.
        """
        if not len(spans) or longest_tokens <= 0:
            return
        check_pages(self._pool, pages, 0)
        self._check(staging, 0, 0)
        if spans.dtype != torch.int64 or spans.shape[1:] != (3,) or spans.device != self._device:
            raise ValueError(f"spans must be int64 [requests, 3] on {self._device}")
        grid = grid_of(-(-longest_tokens * self._row // self._units), len(spans), self._planes, programs)
        addresses = pages.data_ptr(), spans.data_ptr(), staging.data_ptr()
        self._launch(self._device, grid, self._table, *addresses, 0, self._first_byte)

    def _check(self, staging: torch.Tensor, offset_bytes: int, span_bytes: int) -> None:
        if staging is not self._checked:
            check_staging(self._pool, staging, 0, 0)
            self._checked, self._staging_bytes = staging, staging.numel()
        fits = 0 <= offset_bytes <= self._staging_bytes - span_bytes
        if not fits or offset_bytes % UNIT_BYTES or span_bytes > _LARGEST_SPAN_BYTES:
            check_staging(self._pool, staging, offset_bytes, span_bytes)


def check_pages(pool: Pool, pages: torch.Tensor, tokens: int) -> None:
    """Raises ValueError unless kernels can read the page list and the list is long enough."""
    if pages.dtype != torch.int32 or pages.device != pool.device or not pages.is_contiguous():
        raise ValueError(f"pages must be contiguous int32 on {pool.device}, not {pages.dtype} on {pages.device}")
    if pages.numel() * pool.layout.page_size < tokens:
        raise ValueError(f"{tokens} tokens need more than {pages.numel()} pages of {pool.layout.page_size}")


def check_staging(pool: Pool, staging: torch.Tensor, offset_bytes: int, span_bytes: int) -> None:
    """Raises ValueError unless kernels can use the staging buffer, the span begins at a multiple of 16 bytes and has at
    most 16 GiB, and the buffer has room for the span at that offset.
    """
    if staging.dtype != torch.uint8 or staging.device != pool.device or not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous uint8 on {pool.device}, not {staging.dtype} on {staging.device}")
    if (staging.data_ptr() | offset_bytes) % UNIT_BYTES:
        raise ValueError(f"a span must begin at a multiple of {UNIT_BYTES} bytes, not at offset {offset_bytes}")
    if span_bytes > _LARGEST_SPAN_BYTES:
        raise ValueError(f"a span may have {_LARGEST_SPAN_BYTES} bytes at most, not {span_bytes}: move fewer tokens")
    if not 0 <= offset_bytes <= staging.numel() - span_bytes:
        raise ValueError(
            f"{span_bytes} bytes at offset {offset_bytes} do not fit in {staging.numel()} bytes of staging"
        )
