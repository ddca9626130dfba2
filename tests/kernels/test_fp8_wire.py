"""The lossy wire: it rounds as the oracle does, and the oracle stays within the error that is stated."""

import pytest
import torch
from pdkernels.reference import gather_fp8_reference, scatter_fp8_reference
from pdkernels.unused import fp8_scales, gather_fp8, scatter_fp8

from tests.kernels.pools import DEVICE, copy_of, normal_pool, random_bytes, random_pages, same_bytes


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_wire_follows_the_oracle(order, dtype):
    tokens = 7
    pool, target = (normal_pool(dtype=dtype, order=order) for _ in range(2))
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25], device=DEVICE)
    if DEVICE.type == "cpu":  # the interpreter loses the carry when it rounds up: give it what needs no rounding
        for plane, scale in zip(pool.planes, scales, strict=True):
            plane.copy_(plane.float().to(torch.float8_e4m3fn).float() * scale)
    pages = random_pages(2, 12)
    expected = gather_fp8_reference(pool, pages, tokens, scales, slices=2)
    staging = random_bytes(expected.numel() + 16)
    gather_fp8(pool, pages, tokens, staging, scales, slices=2, offset_bytes=16)
    assert torch.equal(staging[16:], expected)
    expected_target = copy_of(target)
    scatter_fp8_reference(expected_target, pages, tokens, expected, scales, writers=2)
    scatter_fp8(target, pages, tokens, staging, scales, writers=2, offset_bytes=16)
    assert same_bytes(target, expected_target)


def test_the_oracle_stays_within_the_stated_error():
    tokens = 40
    pool, target = normal_pool(), normal_pool()
    scales = fp8_scales(pool)
    pages = random_pages(10, 12)
    scatter_fp8_reference(target, pages, tokens, gather_fp8_reference(pool, pages, tokens, scales), scales)
    moved = (pages.long()[:, None] * 4 + torch.arange(4, device=DEVICE)).flatten()
    for plane, back, scale in zip(pool.planes, target.planes, scales, strict=True):
        value = plane[moved].float()
        error = (back[moved].float() - value).abs()
        rounding_of_bf16 = 2**-8
        allowed = torch.maximum(value.abs() * 2**-4, scale * 2**-10) + value.abs() * rounding_of_bf16
        assert bool((error <= allowed).all())
