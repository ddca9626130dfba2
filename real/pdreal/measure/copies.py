"""How long gather and scatter take, as harness threads call them: half of a model's heads, pages in random order.

These are the cells between ranks of which one side has twice as many: a decode rank takes in two of them at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch

from pdreal.measure.forwards import free_bytes, kv_page_bytes
from pdreal.measure.rows import Kind, Row, repeat_us, row_of
from pdreal.model.config import ModelConfig
from pdreal.paged_kv import PagedKv
from pdreal.staging import KernelStaging, Staging, staging_of

_SHARE_OF_MEMORY = 0.4
"""Of what is free: cells are as large as the cache."""


def copy_rows(
    kinds: Sequence[Kind],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    page_counts: Sequence[int],
    seconds: float,
) -> Iterator[Row]:
    """Counts of pages that do not fit in memory are left out. The model has an even number of KV heads."""
    page_bytes = kv_page_bytes(config, dtype, page_size)
    most_pages = int(_SHARE_OF_MEMORY * free_bytes(device)) // page_bytes
    counts = [count for count in page_counts if count <= most_pages]
    kv = PagedKv(
        num_pages=max(counts, default=1),
        page_size=page_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    staging = staging_of(kv.planes, page_size)
    half = config.num_kv_heads // 2
    halves = [range(half), range(half, 2 * half)]
    for num_pages in counts:
        pages = Random(num_pages).sample(range(1, kv.num_pages + 1), num_pages)
        cells = torch.zeros(num_pages * page_bytes, dtype=torch.uint8, device=device)
        cell = cells.chunk(2)[0]
        if "gather" in kinds:
            yield _copy_row("gather", staging, (pages, halves[0], cell), len(cell), seconds)
        if "scatter" in kinds:
            yield _copy_row("scatter", staging, (pages, halves, cells), len(cells), seconds)


def _copy_row(kind: Kind, staging: Staging, arguments: tuple[Any, ...], payload_bytes: int, seconds: float) -> Row:
    times_us = repeat_us(partial(getattr(staging, kind), *arguments), seconds)
    submit_us = None
    if isinstance(staging, KernelStaging):
        submit_us = _submit_us(partial(getattr(staging, f"launch_{kind}"), *arguments), len(times_us))
    return row_of(kind, times_us, payload_bytes=payload_bytes, submit_us=submit_us)


def _submit_us(launch: Callable[[], torch.cuda.Stream], repeats: int) -> float:
    """Each is waited for, but not timed until its end."""
    times_us = []
    for _ in range(repeats):
        begin_ns = perf_counter_ns()
        stream = launch()
        times_us.append((perf_counter_ns() - begin_ns) / 1e3)
        stream.synchronize()
    return median(times_us)
