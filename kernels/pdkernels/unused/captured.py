"""Gathers or scatters that are captured in CUDA graphs, for page lists that the host knows. They take the least host
time.

A replay uploads page list and length from pinned memory and launches the kernel, in one call. It allocates nothing, and
reads no pageable memory. Only the reuse of the pinned memory waits for the device.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from pdkernels.copies.gather import gather_batch
from pdkernels.copies.scatter import scatter_batch
from pdkernels.layout import Pool

_SPAN_BYTES = 24
_HEADER_BYTES = 32  # a span, padded so that the page list is aligned
_SMALLEST_PAGES = 4


class CapturedCopy:
    """Copies requests of up to most_tokens tokens between one pool and one staging buffer, by CUDA graphs (on a CPU,
    without graphs).

    Each graph is for page lists up to a length, and each length is about a quarter larger than the one before. A
    request uses the graph with the smallest sufficient length, so it uploads and launches little more than it needs.

    Args:
        direction: "gather" or "scatter".
        pool: pool with the request's pages.
        staging: staging buffer.
        most_tokens: maximum tokens of a request.
        heads: KV heads of the pool to copy; None: all heads.
        slices: number of target ranks, or for a scatter of source ranks, that share the heads evenly.
        programs: at most this many programs at a time; no limit if None.

    """

    def __init__(
        self,
        direction: Literal["gather", "scatter"],
        pool: Pool,
        staging: torch.Tensor,
        *,
        most_tokens: int,
        heads: range | None = None,
        slices: int = 1,
        programs: int | None = None,
    ) -> None:
        self._pool, self._staging = pool, staging
        self._direction, self._heads, self._slices, self._programs = direction, heads, slices, programs
        self._page_size = pool.layout.page_size
        most_pages = -(-most_tokens // self._page_size)
        sizes = [_SMALLEST_PAGES]
        while sizes[-1] < most_pages:
            sizes.append(max(sizes[-1] + 1, sizes[-1] * 5 // 4))
        cuda = pool.device.type == "cuda"
        self._host = torch.zeros(_HEADER_BYTES + sizes[-1] * 4, dtype=torch.uint8, pin_memory=cuda)
        self._device = torch.zeros_like(self._host, device=pool.device)
        self._span = self._host[:_SPAN_BYTES].view(torch.int64).numpy()
        self._pages = self._host[_HEADER_BYTES:].view(torch.int32).numpy()
        self._sizes = sizes
        self._replayed: torch.cuda.Event | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if cuda:
            self._replayed = torch.cuda.Event()
            self._graphs = [self._capture(size) for size in sizes]

    def __call__(self, pages: Sequence[int] | np.ndarray, tokens: int, offset_bytes: int = 0) -> None:
        """Moves one request on the current stream. pages: on the host. Other arguments: as for gather and scatter.
        Raises ValueError if the page list is too short for the tokens, or if the tokens need more pages than the
        largest graph has.
        """
        used = -(-tokens // self._page_size)
        if len(pages) < used or used > self._sizes[-1]:
            raise ValueError(f"{tokens} tokens need {used} pages, found {len(pages)}; at most {self._sizes[-1]} fit")
        bucket = bisect_left(self._sizes, used)
        if self._replayed is not None:
            self._replayed.synchronize()  # the last replay has read the pinned memory
        self._span[1] = tokens
        self._span[2] = offset_bytes
        self._pages[:used] = pages[:used]
        if self._replayed is None:
            self._move(self._sizes[bucket])
        else:
            self._graphs[bucket].replay()
            self._replayed.record()

    def wait(self) -> None:
        """Waits until the last request has been moved."""
        if self._replayed is not None:
            self._replayed.synchronize()

    def _move(self, most_pages: int) -> None:
        upload_bytes = _HEADER_BYTES + most_pages * 4
        self._device[:upload_bytes].copy_(self._host[:upload_bytes], non_blocking=True)
        spans = self._device[:_SPAN_BYTES].view(torch.int64).view(1, 3)
        pages = self._device[_HEADER_BYTES:].view(torch.int32)
        longest = most_pages * self._page_size
        if self._direction == "gather":
            gather_batch(
                self._pool,
                pages,
                spans,
                self._staging,
                longest_tokens=longest,
                heads=self._heads,
                slices=self._slices,
                programs=self._programs,
            )
        else:
            scatter_batch(
                self._pool,
                pages,
                spans,
                self._staging,
                longest_tokens=longest,
                heads=self._heads,
                writers=self._slices,
                programs=self._programs,
            )

    def _capture(self, most_pages: int) -> torch.cuda.CUDAGraph:
        self._move(most_pages)  # compiles; the span has no tokens yet
        torch.cuda.synchronize(self._pool.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
            self._move(most_pages)
        return graph
