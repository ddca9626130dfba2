"""Push: from the pages of one pool straight into the pages of another, on this GPU or a peer, without staging.

The kernel does the same as reference.push_reference. It reads and writes each payload byte once; if the target is a
peer, it writes over NVLink. Gather, copy and scatter would read and write each byte two more times. The kernel needs
the target's page list on the source GPU, and the target's memory mapped there (peer access, or CUDA IPC).
"""

import torch
import triton
import triton.language as tl

from pdkernels.addressing import plane_pointer, table_entry, unit_in_pool, words
from pdkernels.copies.staging import check_pages
from pdkernels.copies.tiling import FEW_PROGRAMS, SCATTER, Tiling, grid_of
from pdkernels.launch import Launcher
from pdkernels.layout import UNIT_BYTES, KvLayout, MappedPool, Pool


@triton.jit(
    do_not_specialize=(
        "source_table",
        "target_table",
        "source_pages",
        "target_pages",
        "tokens",
        "source_first_byte",
        "target_first_byte",
    )
)
def push_kernel(
    source_table: tl.int64,
    target_table: tl.int64,
    source_pages: tl.int64,
    target_pages: tl.int64,
    tokens: tl.int32,
    source_first_byte: tl.int64,
    target_first_byte: tl.int64,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    SOURCE_HEADS: tl.constexpr,
    SOURCE_PAGE: tl.constexpr,
    SOURCE_HND: tl.constexpr,
    TARGET_HEADS: tl.constexpr,
    TARGET_PAGE: tl.constexpr,
    TARGET_HND: tl.constexpr,
    PLANES: tl.constexpr,
    UNITS: tl.constexpr,
):
    tiles = tl.cdiv(tokens * ROW, UNITS)
    plane = tl.program_id(2)
    while plane < PLANES:  # each loop runs once, unless the grid was made smaller than the work
        source = plane_pointer(table_entry(source_table, plane) + source_first_byte)
        target = plane_pointer(table_entry(target_table, plane) + target_first_byte)
        tile = tl.program_id(0)
        while tile < tiles:
            unit = tile * UNITS + tl.arange(0, UNITS)
            live = unit < tokens * ROW
            from_unit = unit_in_pool(source_pages, unit, live, ROW, HEAD, SOURCE_HEADS, SOURCE_PAGE, SOURCE_HND)
            to_unit = unit_in_pool(target_pages, unit, live, ROW, HEAD, TARGET_HEADS, TARGET_PAGE, TARGET_HND)
            moved = tl.load(source + words(from_unit), mask=live[:, None], eviction_policy="evict_first")
            tl.store(target + words(to_unit), moved, mask=live[:, None], eviction_policy="evict_first")
            tile += tl.num_programs(0)
        plane += tl.num_programs(2)


def push(
    source: Pool,
    source_pages: torch.Tensor,
    target: Pool | MappedPool,
    target_pages: torch.Tensor,
    tokens: int,
    *,
    source_heads: range | None = None,
    target_heads: range | None = None,
    tiling: Tiling | None = None,
    programs: int | None = None,
) -> None:
    """Copies one request from the source's pages into the target's. The kernel runs on the source's device.

    Args:
        source, target: pools of the same layers, head dimension and dtype. The target may lie on a peer GPU (see
            map_peer) or in another process (MappedPool) and may differ in heads, page size and order.
        source_pages, target_pages: int32 on the source's device.
        source_heads, target_heads: ranges of equal size; None: all heads of the pool.
        programs: at most this many programs at a time; no limit if None.

    Raises:
        ValueError: the pools, head ranges or page lists do not fit each other.

    """
    if tokens <= 0:
        return
    check_pages(source, source_pages, tokens)
    if target_pages.device != source.device or target_pages.dtype != torch.int32 or not target_pages.is_contiguous():
        raise ValueError(f"target_pages must be contiguous int32 on {source.device}, where the kernel runs")
    if target_pages.numel() * target.layout.page_size < tokens:
        raise ValueError(f"{tokens} tokens need more than {target_pages.numel()} pages of {target.layout.page_size}")
    tiling = tiling or (SCATTER if programs is None else FEW_PROGRAMS)
    key = ("push", id(target), source_heads, target_heads, tiling)
    ready = source.prepared.get(key)
    if ready is None:
        ready = source.prepared[key] = _Push(source, target, source_heads, target_heads, tiling)
    ready(source_pages.data_ptr(), target_pages.data_ptr(), tokens, programs)


class _Push:
    """A prepared launch of the kernel that copies pages of one pool straight into pages of another pool. The pools,
    heads and tiling stay the same for all calls.
    """

    def __init__(
        self,
        source: Pool,
        target: Pool | MappedPool,
        source_heads: range | None,
        target_heads: range | None,
        tiling: Tiling,
    ) -> None:
        self._source, self._target = source, target  # kept: the addresses are theirs
        source_heads = source.layout.check_heads(source_heads, 1)
        target_heads = target.layout.check_heads(target_heads, 1)
        _check_alike(source, target)
        if len(source_heads) != len(target_heads):
            raise ValueError(f"{len(source_heads)} source heads cannot fill {len(target_heads)} target heads")
        self._planes = source.num_planes
        self._row = len(source_heads) * source.layout.head_bytes // UNIT_BYTES
        self._units = tiling.units
        self._target_table = target.table_on(source.device)
        self._first_bytes = source.layout.first_byte(source_heads.start), target.layout.first_byte(target_heads.start)
        constants = {
            "ROW": self._row,
            "HEAD": source.layout.head_bytes // UNIT_BYTES,
            **_of("SOURCE", source.layout),
            **_of("TARGET", target.layout),
            "PLANES": self._planes,
            "UNITS": tiling.units,
        }
        self._launch = Launcher(push_kernel, constants, tiling.warps)

    def __call__(self, source_pages: int, target_pages: int, tokens: int, at_most: int | None) -> None:
        grid = grid_of(-(-tokens * self._row // self._units), 1, self._planes, at_most)
        pages = source_pages, target_pages
        tables = self._source.table.data_ptr(), self._target_table.data_ptr()
        self._launch(self._source.device, grid, *tables, *pages, tokens, *self._first_bytes)


def _of(side: str, layout: KvLayout) -> dict[str, int | bool]:
    return {
        f"{side}_HEADS": layout.heads,
        f"{side}_PAGE": layout.page_size,
        f"{side}_HND": layout.order == "HND",
    }


def _check_alike(source: Pool, target: Pool | MappedPool) -> None:
    for what in ("head_dim", "dtype"):
        if getattr(source.layout, what) != getattr(target.layout, what):
            raise ValueError(f"the pools differ in {what}: {source.layout} and {target.layout}")
    if source.num_planes != target.num_planes:
        raise ValueError(f"the pools have {source.num_planes} and {target.num_planes} planes")


def map_peer(source: torch.device, target: torch.device) -> None:
    """Lets kernels on one GPU of this process write to another GPU's memory. Raises RuntimeError if the hardware
    cannot.
    """
    if not torch.cuda.can_device_access_peer(source, target):
        raise RuntimeError(f"{source} cannot reach the memory of {target}")
    for here, there in ((source, target), (target, source)):  # torch maps peers at the first copy between them
        torch.zeros(1, device=here).copy_(torch.zeros(1, device=there))
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
