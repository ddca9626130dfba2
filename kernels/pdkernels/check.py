"""Runs kernels on a few irregular shapes, and compares them with their references: python -m pdkernels.check. The
kernels are gather, scatter, push, gather and scatter with fp8 on the wire, append, and decode attention.

The shapes are small enough for compute-sanitizer. The tests cover many more shapes, and the other kernels.
"""

from collections.abc import Callable

import torch

from pdkernels.attention.append import append
from pdkernels.attention.decode import paged_decode
from pdkernels.copies.gather import gather, gather_batch
from pdkernels.copies.push import push
from pdkernels.copies.scatter import scatter
from pdkernels.copies.staging import staging_bytes
from pdkernels.layout import Pool
from pdkernels.reference import (
    append_reference,
    gather_fp8_reference,
    gather_reference,
    paged_decode_reference,
    push_reference,
    scatter_fp8_reference,
    scatter_reference,
)
from pdkernels.unused.fp8_wire import gather_fp8, scatter_fp8

_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
_TOKENS = 37  # of pages of 8: the last page is ragged
_HEADS = range(1, 5)


def _pool(heads: int = 6, page_size: int = 8, order: str = "NHD", head_dim: int = 80) -> Pool:
    """Returns a pool of three layers with 64 slots and random KV in bf16."""
    shape = (64, heads, head_dim) if order == "NHD" else (64 // page_size, heads, page_size, head_dim)
    planes = [torch.randn(shape, device=_DEVICE).to(torch.bfloat16) for _ in range(6)]
    return Pool(planes[:3], planes[3:], page_size if order == "NHD" else None)


def _pages(page_size: int = 8) -> torch.Tensor:
    return torch.randperm(64 // page_size, device=_DEVICE).to(torch.int32)


def _span(pool: Pool) -> torch.Tensor:
    return torch.randint(0, 256, (staging_bytes(pool, _TOKENS, _HEADS),), dtype=torch.uint8, device=_DEVICE)


def check_gather() -> None:
    for order in ("NHD", "HND"):
        pool, pages = _pool(order=order), _pages()
        staging, many = _span(pool), _span(pool)
        expected = gather_reference(pool, pages, _TOKENS, heads=_HEADS, slices=2)
        gather(pool, pages, _TOKENS, staging, heads=_HEADS, slices=2)
        _same(staging, expected)
        spans = torch.tensor([[0, _TOKENS, 0]], device=_DEVICE)
        gather_batch(pool, pages, spans, many, longest_tokens=_TOKENS, heads=_HEADS, slices=2, programs=3)
        _same(many, expected)


def check_scatter() -> None:
    for order in ("NHD", "HND"):
        pool, pages = _pool(order=order), _pages()
        staging = _span(pool)
        scatter(pool, pages, _TOKENS, staging, heads=_HEADS, writers=4)
        _same(gather_reference(pool, pages, _TOKENS, heads=_HEADS, slices=4), staging)
        expected = _pool(order=order)
        scatter_reference(expected, pages, _TOKENS, staging, heads=_HEADS, writers=4)
        _same(gather_reference(expected, pages, _TOKENS, heads=_HEADS, slices=4), staging)


def check_push() -> None:
    source, target, expected = _pool(heads=4), _pool(order="HND", page_size=16), _pool(order="HND", page_size=16)
    pages, target_pages = _pages(), _pages(16)
    push(source, pages, target, target_pages, _TOKENS, target_heads=_HEADS)
    push_reference(source, pages, expected, target_pages, _TOKENS, target_heads=_HEADS)
    both = [gather_reference(pool, target_pages, _TOKENS, heads=_HEADS) for pool in (target, expected)]
    _same(*both)


def check_fp8_wire() -> None:
    pool, pages = _pool(), _pages()
    scales = torch.ones(6, device=_DEVICE)
    for plane in pool.planes:
        plane.copy_(plane.float().to(torch.float8_e4m3fn))  # exact, as the interpreter rounds in a way of its own
    expected = gather_fp8_reference(pool, pages, _TOKENS, scales, heads=_HEADS)
    staging = torch.zeros_like(expected)
    gather_fp8(pool, pages, _TOKENS, staging, scales, heads=_HEADS)
    _same(staging, expected)
    target, wanted = _pool(), _pool()
    scatter_fp8(target, pages, _TOKENS, staging, scales, heads=_HEADS)
    scatter_fp8_reference(wanted, pages, _TOKENS, staging, scales, heads=_HEADS)
    _same(*[gather_reference(pool, pages, _TOKENS, heads=_HEADS) for pool in (target, wanted)])


def check_append() -> None:
    for order in ("NHD", "HND"):
        pool, slots = _pool(order=order), torch.tensor([5, -1, 63], dtype=torch.int32, device=_DEVICE)
        keys, values = (torch.randn(3, 6, 80, device=_DEVICE).to(torch.bfloat16) for _ in range(2))
        key_pages, value_pages = pool.keys[0].clone(), pool.values[0].clone()
        append_reference(key_pages, value_pages, slots, keys, values)
        append(pool.keys[0], pool.values[0], slots, keys, values)
        _same(pool.keys[0], key_pages)
        _same(pool.values[0], value_pages)


def check_decode() -> None:
    pool = _pool(heads=2, head_dim=64)
    lengths = [_TOKENS, 0, 1]
    table = torch.stack([_pages() for _ in lengths])
    query = torch.randn(3, 6, 64, device=_DEVICE).to(torch.bfloat16)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=_DEVICE)
    out = paged_decode(query, pool.keys[0], pool.values[0], table, on_device, page_size=8)
    expected = paged_decode_reference(query, pool, 0, table, lengths, 64**-0.5)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


def _same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError(f"{int((found != expected).sum())} of {found.numel()} elements differ")


CHECKS: dict[str, Callable[[], None]] = {
    "gather": check_gather,
    "scatter": check_scatter,
    "push": check_push,
    "fp8_wire": check_fp8_wire,
    "append": check_append,
    "decode": check_decode,
}


def main() -> None:
    torch.manual_seed(0)
    for name, check in CHECKS.items():
        check()
        print(f"{name:8} equals its reference on {_DEVICE}")


if __name__ == "__main__":
    main()
