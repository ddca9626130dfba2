"""The host side that gather and scatter share: check the arguments, take the kernel made ready for them, launch."""

from dataclasses import dataclass
from typing import Any

import torch

from pdkernels.launch import Launcher
from pdkernels.layout import UNIT_BYTES, Pool
from pdkernels.tiling import FEW_PROGRAMS, Tiling

_LARGEST_SPAN_BYTES = 16 << 30


def staging_bytes(pool: Pool, tokens: int, heads: range | None = None) -> int:
    """Size of the staging span of a request, over all slices or writers."""
    moved = pool.layout.heads if heads is None else len(heads)
    return len(pool.planes) * tokens * moved * pool.layout.head_bytes


@dataclass(frozen=True, eq=False)
class StagingCopy:
    """A kernel between pages and staging, and how it is cut by default."""

    kernel: Any
    tiling: Tiling

    def request(
        self,
        pool: Pool,
        pages: torch.Tensor,
        tokens: int,
        staging: torch.Tensor,
        *,
        heads: range | None,
        slices: int,
        offset_bytes: int,
        tiling: Tiling | None,
        programs: int | None,
    ) -> None:
        """One request, its length known to the host."""
        if tokens <= 0:
            return
        payload = staging_bytes(pool, tokens, heads)
        ready = self.ready(pool, heads, slices, tiling or self._default(programs), batched=False)
        check_pages(pool, pages, tokens)
        check_staging(pool, staging, offset_bytes, payload)
        address = staging.data_ptr() + offset_bytes
        ready(ready.programs(tokens, programs), 1, pages.data_ptr(), 0, address, tokens)

    def batch(
        self,
        pool: Pool,
        pages: torch.Tensor,
        spans: torch.Tensor,
        staging: torch.Tensor,
        *,
        longest_tokens: int,
        heads: range | None,
        slices: int,
        tiling: Tiling | None,
        programs: int | None,
    ) -> None:
        """Several requests, their lengths read on the device."""
        if not len(spans) or longest_tokens <= 0:
            return
        ready = self.ready(pool, heads, slices, tiling or self._default(programs), batched=True)
        check_pages(pool, pages, 0)
        check_staging(pool, staging, 0, 0)
        if spans.dtype != torch.int64 or spans.shape[1:] != (3,) or spans.device != pool.device:
            raise ValueError(f"spans must be int64 [requests, 3] on {pool.device}")
        rows = len(spans)
        at_most = ready.programs(longest_tokens, programs)
        ready(at_most, rows, pages.data_ptr(), spans.data_ptr(), staging.data_ptr(), 0)

    def _default(self, programs: int | None) -> Tiling:
        return self.tiling if programs is None else FEW_PROGRAMS

    def ready(self, pool: Pool, heads: range | None, slices: int, tiling: Tiling, *, batched: bool) -> "_Ready":
        """The kernel for these constants, made on the first call and kept in the pool."""
        key = (self, heads, slices, tiling, batched)
        ready = pool.prepared.get(key)
        if ready is None:
            checked = pool.layout.check_heads(heads, slices)
            ready = pool.prepared[key] = _Ready(self, pool, checked, slices, tiling, batched=batched)
        return ready


class _Ready:
    """A staging copy with all that does not change from call to call."""

    def __init__(self, copy: StagingCopy, pool: Pool, heads: range, slices: int, tiling: Tiling, *, batched: bool) -> None:
        layout = pool.layout
        self._planes = len(pool.planes)
        self._row = len(heads) * layout.head_bytes // UNIT_BYTES
        self._units = tiling.units
        self._table = pool.table.data_ptr()
        self._first_byte = layout.first_byte(heads.start)
        self._device = pool.device
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

    def programs(self, tokens: int, at_most: int | None) -> int:
        """Programs that each take one piece of work, or as many as are allowed."""
        work = -(-tokens * self._row // self._units) * self._planes
        return work if at_most is None else min(work, at_most)

    def __call__(self, programs: int, rows: int, pages: int, spans: int, staging: int, tokens: int) -> None:
        self._launch(
            self._device, programs, rows, self._table, pages, spans, staging, tokens, self._first_byte
        )


def check_pages(pool: Pool, pages: torch.Tensor, tokens: int) -> None:
    """ValueError unless the page list can be read by a kernel and is long enough."""
    if pages.dtype != torch.int32 or pages.device != pool.device or not pages.is_contiguous():
        raise ValueError(f"pages must be contiguous int32 on {pool.device}, not {pages.dtype} on {pages.device}")
    if pages.numel() * pool.layout.page_size < tokens:
        raise ValueError(f"{tokens} tokens need more than {pages.numel()} pages of {pool.layout.page_size}")


def check_staging(pool: Pool, staging: torch.Tensor, offset_bytes: int, span_bytes: int) -> None:
    """ValueError unless the staging buffer has room for the span at that offset."""
    if staging.dtype != torch.uint8 or staging.device != pool.device or not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous uint8 on {pool.device}, not {staging.dtype} on {staging.device}")
    if (staging.data_ptr() | offset_bytes) % UNIT_BYTES:
        raise ValueError(f"a span must begin at a multiple of {UNIT_BYTES} bytes, not at offset {offset_bytes}")
    if span_bytes > _LARGEST_SPAN_BYTES:
        raise ValueError(f"a span may have {_LARGEST_SPAN_BYTES} bytes at most, not {span_bytes}: move fewer tokens")
    if not 0 <= offset_bytes <= staging.numel() - span_bytes:
        raise ValueError(f"{span_bytes} bytes at offset {offset_bytes} do not fit in {staging.numel()} bytes of staging")
