"""Ranges for the copy engines name the bytes that a gather or scatter moves."""

import ctypes

import pytest
import torch
from pdkernels.bench import baselines
from pdkernels.bench.cases import Arena, Case, Memory, Model
from pdkernels.reference import gather_reference

MODEL = Model("two-layers", 2, 4, 16, torch.bfloat16)


@pytest.mark.parametrize(("side", "target_ranks"), [("gather", 1), ("scatter", 1), ("scatter", 2)])
def test_ranges_cover_what_the_oracle_gathers(side: str, target_ranks: int) -> None:
    case = Case(MODEL, 70, 16, 4, target_ranks)  # the last page is ragged
    memory = Memory.of(Arena(64 << 20, "cpu"), case, case.source_heads if side == "gather" else case.target_heads)
    writers = case.writers if side == "scatter" else 1
    expected = gather_reference(memory.pool, memory.pages[0], case.tokens, slices=writers).view(torch.uint8).flatten()
    moved = torch.zeros_like(expected)
    paged, staged, sizes = baselines.ranges(case, memory, side, memory.pages[0].numpy(), moved.data_ptr())
    for address, target, size in zip(paged, staged, sizes, strict=True):
        ctypes.memmove(int(target), int(address), int(size))
    assert torch.equal(moved, expected)
    assert sizes.sum() == len(expected)
