"""Other ways to gather or scatter: a plain Triton kernel per plane (K or V of one layer), torch index operations, copy
engines. Each function returns calls that do the same work as our kernel on the same bytes: one call for each pair of
Memory.rotation. The argument `side` is "gather" or "scatter". A scatter may have several writers (prefill ranks that
send to this decode rank); a gather counts as one writer.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pdkernels.bench.cases import Case, Memory
from pdkernels.bench.timing import Call

_ELEMENTS = 1024


@triton.jit
def plain_kernel(
    plane,
    slots,
    staging,
    elements,
    ROW: tl.constexpr,
    STRIDE: tl.constexpr,
    TO_STAGING: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copies the part of one plane (K or V of one layer) that one writer (a prefill rank) sends, one element at a time,
    as the simplest kernel would.

    slots: slot of each token. elements: number of elements to copy. ROW: elements of a token that are copied. STRIDE:
    elements of a token in the plane. TO_STAGING: True: copies from the plane to staging; False: back. ELEMENTS:
    elements per program.
    """
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    live = element < elements
    slot = tl.load(slots + element // ROW, mask=live, other=0).to(tl.int64)
    in_plane = slot * STRIDE + element % ROW
    if TO_STAGING:
        tl.store(staging + element, tl.load(plane + in_plane, mask=live), mask=live)
    else:
        tl.store(plane + in_plane, tl.load(staging + element, mask=live), mask=live)


def plain_triton(case: Case, memory: Memory, side: str) -> list[Call]:
    """Returns one call for each page list of `memory`. Each call launches plain_kernel once for each plane (K or V of
    one layer) and, if side is "scatter" instead of "gather", for each writer (a prefill rank that sends to this rank).
    """
    return [_per_slice(case, memory, side, pages, offset, _plain_slice) for pages, offset in memory.rotation()]


def torch_index(case: Case, memory: Memory, side: str) -> list[Call]:
    """Returns one call for each page list of `memory`. Each call uses index_select (side "gather") or index_copy (side
    "scatter"), once for each plane (K or V of one layer) and, when scattering, for each writer (a prefill rank that
    sends to this rank).
    """
    return [_per_slice(case, memory, side, pages, offset, _index_slice) for pages, offset in memory.rotation()]


Slice = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], Call]


def _per_slice(case: Case, memory: Memory, side: str, pages: torch.Tensor, offset: int, move: Slice) -> Call:
    """Returns a function that moves one request. The function runs calls that `move` has made, one for each plane (K or
    V of one layer) and, if side is "scatter" instead of "gather", for each writer (a prefill rank that sends to this
    rank). pages: the request's page list. offset: beginning of the request in staging, in bytes.
    """
    slots = _slots(case, pages)
    writers = case.writers if side == "scatter" else 1
    planes = memory.pool.planes
    heads = planes[0].shape[1] // writers
    slice_bytes = case.tokens * heads * case.model.head_bytes
    span = memory.staging[offset : offset + writers * len(planes) * slice_bytes]
    rows = span.view(planes[0].dtype).view(writers, len(planes), case.tokens, heads, case.model.head_dim)
    calls = [
        move(plane[:, writer * heads : (writer + 1) * heads], slots, rows[writer, index], side)
        for writer in range(writers)
        for index, plane in enumerate(planes)
    ]

    def all_slices() -> None:
        for call in calls:
            call()

    return all_slices


def _plain_slice(part: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, side: str) -> Call:
    bits = torch.uint8 if part.element_size() == 1 else torch.int16
    first, rows, slots = part.view(bits), rows.view(bits), slots.to(torch.int32)
    elements, row = rows.numel(), rows[0].numel()
    grid = (triton.cdiv(elements, _ELEMENTS),)
    constants = {"ROW": row, "STRIDE": part.stride(0), "TO_STAGING": side == "gather", "ELEMENTS": _ELEMENTS}
    return lambda: plain_kernel[grid](first, slots, rows, elements, **constants)


def _index_slice(part: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, side: str) -> Call:
    bits = torch.uint8 if part.element_size() == 1 else torch.int16
    part, rows = part.view(bits), rows.view(bits)
    if side == "gather":
        return lambda: torch.index_select(part, 0, slots, out=rows)
    return lambda: part.index_copy_(0, slots, rows)


def _slots(case: Case, pages: torch.Tensor) -> torch.Tensor:
    within = torch.arange(case.page_size, device=pages.device)
    return (pages.long()[:, None] * case.page_size + within).flatten()[: case.tokens]


def copy_engine(case: Case, memory: Memory, side: str) -> list[Call]:
    """Returns one call for each page list of `memory`, which copies the list's KV with cudaMemcpy2DAsync. side:
    "gather" copies from pages to staging, "scatter" from staging to pages. Each plane (K or V of one layer) of each
    page takes one copy. When scattering, each writer (a prefill rank that sends to this rank) has copies of its own,
    for its share of the heads.
    """
    copy_2d = _runtime().cudaMemcpy2DAsync
    pool = memory.pool
    writers = case.writers if side == "scatter" else 1
    row_bytes = pool.layout.token_bytes
    width = row_bytes // writers
    planes = [plane.data_ptr() for plane in pool.planes]
    calls: list[Call] = []
    for pages, offset in memory.rotation():
        page_list = pages.tolist()
        base = memory.staging.data_ptr() + offset

        def request(page_list: list[int] = page_list, base: int = base) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            for writer in range(writers):
                for index, plane in enumerate(planes):
                    span = base + (writer * len(planes) + index) * case.tokens * width
                    for number, page in enumerate(page_list):
                        first = number * case.page_size
                        height = min(case.page_size, case.tokens - first)
                        paged = plane + page * case.page_size * row_bytes + writer * width, row_bytes
                        staged = span + first * width, width
                        target, source = (staged, paged) if side == "gather" else (paged, staged)
                        copy_2d(*map(_word, (*target, *source, width, height)), 3, stream)  # 3: device to device

        calls.append(request)
    return calls


class _Attributes(ctypes.Structure):
    """The struct cudaMemcpyAttributes: order of access, hints of two locations (type, id), flags."""

    _fields_ = (("access_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_COPY_BATCH_SINCE = 13
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


def has_copy_batch() -> bool:
    """True from CUDA 13 on: cudaMemcpyBatchAsync has the arguments with which copy_batch calls it."""
    return _cuda_major() >= _COPY_BATCH_SINCE


def copy_batch(case: Case, memory: Memory, side: str) -> list[Call]:
    """Returns one call for each page list of `memory`. Each call uses cudaMemcpyBatchAsync. side: "gather" copies from
    pages to staging, "scatter" from staging to pages.

    A call copies a range of bytes for each page and plane (K or V of one layer). If several writers (prefill ranks that
    send to this rank) share a token's row, it copies a range for each token, plane and writer.
    """
    batch = _runtime().cudaMemcpyBatchAsync
    stream = torch.cuda.Stream()  # the call refuses the default stream
    attributes, first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)
    calls: list[Call] = []
    for pages, offset in memory.rotation():
        page_list = pages.cpu().numpy()

        def request(page_list: np.ndarray = page_list, base: int = memory.staging.data_ptr() + offset) -> None:
            paged, staged, sizes = ranges(case, memory, side, page_list, base)
            targets, sources = (staged, paged) if side == "gather" else (paged, staged)
            caller = torch.cuda.current_stream()
            stream.wait_stream(caller)
            arrays = [ctypes.c_void_p(each.ctypes.data) for each in (targets, sources, sizes)]
            count, handle = ctypes.c_size_t(len(sizes)), ctypes.c_void_p(stream.cuda_stream)
            code = batch(*arrays, count, ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), handle)
            if code:
                raise RuntimeError(f"cudaMemcpyBatchAsync: error {code}")
            caller.wait_stream(stream)

        calls.append(request)
    return calls


def ranges(case: Case, memory: Memory, side: str, pages: np.ndarray, base: int) -> tuple[np.ndarray, ...]:
    """Returns three arrays over all ranges of one request, in the order of staging: addresses in pages, addresses in
    staging, bytes. side: "gather" or "scatter"; only a scatter has a range for each writer (a prefill rank that sends
    to this rank). pages: the request's page list. base: address of the request in staging.
    """
    writers = case.writers if side == "scatter" else 1
    run = case.page_size if writers == 1 else 1  # tokens that lie together for one writer
    firsts = np.arange(0, case.tokens, run)
    row_bytes = memory.pool.layout.token_bytes
    width = row_bytes // writers
    planes = np.array([plane.data_ptr() for plane in memory.pool.planes], np.uint64)
    slots = pages[firsts // case.page_size].astype(np.uint64) * case.page_size + firsts % case.page_size
    within = np.arange(writers, dtype=np.uint64) * width
    paged = within[:, None, None] + planes[:, None] + slots.astype(np.uint64) * row_bytes
    tokens = np.minimum(run, case.tokens - firsts).astype(np.uint64)
    sizes = np.broadcast_to(tokens * width, paged.shape).ravel()
    staged = base + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.uint64)
    return np.ascontiguousarray(paged.ravel()), staged, np.ascontiguousarray(sizes)


def _word(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _runtime() -> Any:
    """Returns the CUDA runtime library that torch loaded."""
    return ctypes.CDLL(f"libcudart.so.{_cuda_major()}")


def _cuda_major() -> int:
    return int((torch.version.cuda or "0").split(".")[0])
