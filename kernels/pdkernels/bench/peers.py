"""Measures two ways from one GPU to another over NVLink: a push, and a gather followed by a copy and a scatter on the
other GPU.
"""

import time as clock
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from pdkernels.bench.cases import MODELS, Case
from pdkernels.bench.rows import Row
from pdkernels.bench.staging import Bench
from pdkernels.bench.timing import Call
from pdkernels.copies.gather import gather
from pdkernels.copies.push import map_peer, push
from pdkernels.copies.scatter import scatter
from pdkernels.layout import Pool

_HERE, _THERE = torch.device("cuda", 0), torch.device("cuda", 1)


def peers(bench: Bench, *, quick: bool) -> Iterator[Row]:
    """Measures transfers of a request's KV from one source rank to another GPU: a push (also with few programs), a
    gather, copy and scatter, and a plain copy of as many bytes. Yields a row for each measurement. A row's copy_us is
    the time of the plain copy, so copy_fraction is the reached fraction of the link's bandwidth. quick: True: fewer
    lengths of requests.
    """
    map_peer(_HERE, _THERE)
    for model in (MODELS[1], MODELS[2]):
        for page_size in (1, 16):
            for tokens in (256, 1000, 4096) if quick else (64, 256, 1000, 4096, 16384):
                yield from _measure(bench, Case(model, tokens, page_size, 4, 1))


def _measure(bench: Bench, case: Case) -> Iterator[Row]:
    """Measures transfers from one of four source ranks, on this GPU, to a target rank on the other GPU, and yields a
    row for each measurement.
    """
    source, target = _pool(case, case.source_heads, _HERE), _pool(case, case.target_heads, _THERE)
    payload = case.payload_bytes(case.source_heads)
    pages = torch.randperm(len(source.keys[0]) // case.page_size, device=_HERE).to(torch.int32)
    far_pages = pages.to(_THERE)
    near, far = (torch.empty(payload, dtype=torch.uint8, device=device) for device in (_HERE, _THERE))
    heads = range(case.source_heads)

    def by_push(programs: int | None = None) -> None:
        push(source, pages, target, pages, case.tokens, target_heads=heads, programs=programs)

    def by_staging() -> None:
        gather(source, pages, case.tokens, near)
        far.copy_(near, non_blocking=True)
        scatter(target, far_pages, case.tokens, far, heads=heads)

    copied = _both_us(lambda: far.copy_(near, non_blocking=True))
    yield bench.row("push", "peer_copy", case, payload, copied, time_us=copied)
    yield bench.row("push", "fused", case, payload, copied, time_us=_both_us(by_push))
    yield bench.row("push", "gather_copy_scatter", case, payload, copied, time_us=_both_us(by_staging))
    if case.tokens >= 16384:
        for programs in (4, 8, 16, 32, 64, 132):
            limited = partial(by_push, programs)
            row = bench.row("push", "few_programs", case, payload, copied, time_us=_both_us(limited))
            yield replace(row, programs=programs)


def _pool(case: Case, heads: int, device: torch.device) -> Pool:
    slots = max(8192, 2 * case.tokens)
    shape = (slots, heads, case.model.head_bytes)
    planes = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(case.model.dtype)
        for _ in range(2 * case.model.layers)
    ]
    return Pool(planes[: case.model.layers], planes[case.model.layers :], case.page_size)


def _both_us(call: Call) -> float:
    """Returns the time per call in us, by the host's clock: the smallest of three means over 20 calls, each until both
    devices are idle. Events of one device cannot measure two devices.
    """
    for _ in range(3):
        call()
    _idle()
    best = float("inf")
    for _ in range(3):
        begin = clock.perf_counter_ns()
        for _ in range(20):
            call()
        _idle()
        best = min(best, (clock.perf_counter_ns() - begin) / 20e3)
    return best


def _idle() -> None:
    torch.cuda.synchronize(_HERE)
    torch.cuda.synchronize(_THERE)
