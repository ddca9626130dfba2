"""What does not fit is refused before anything is launched, with what was found and what is possible."""

import pytest
import torch
from pdkernels import Pool, append, gather, paged_decode, push, scatter, staging_bytes
from pdkernels.unused import gather_fp8

from tests.kernels.pools import DEVICE, normal_pool, random_bytes, random_pages, random_pool


@pytest.fixture
def pool():
    return random_pool()


@pytest.mark.parametrize("move", [gather, scatter])
def test_staging_copies(move, pool):
    pages = random_pages(3, 12)
    staging = random_bytes(staging_bytes(pool, 12))
    with pytest.raises(ValueError, match=r"within range\(0, 4\)"):
        move(pool, pages, 12, staging, heads=range(2, 5))
    with pytest.raises(ValueError, match="3 heads do not divide into 2"):
        move(pool, pages, 12, staging, heads=range(3), **{"slices" if move is gather else "writers": 2})
    with pytest.raises(ValueError, match="13 tokens need more than 3 pages of 4"):
        move(pool, pages, 13, staging)
    with pytest.raises(ValueError, match="do not fit in"):
        move(pool, pages, 12, staging, offset_bytes=16)
    with pytest.raises(ValueError, match="multiple of 16 bytes, not at offset 8"):
        move(pool, pages, 12, staging, offset_bytes=8)
    with pytest.raises(ValueError, match="contiguous int32"):
        move(pool, pages.long(), 12, staging)
    with pytest.raises(ValueError, match="contiguous uint8"):
        move(pool, pages, 12, staging.view(torch.int32))


def test_pools():
    plane = torch.zeros(8, 2, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="planes differ"):
        Pool([plane], [plane[:4]])
    with pytest.raises(ValueError, match="power of two, not 3"):
        Pool([plane], [plane], page_size=3)
    with pytest.raises(ValueError, match="multiple of 16 bytes, not 8"):
        Pool([plane[..., :4].contiguous()], [plane[..., :4].contiguous()])
    with pytest.raises(ValueError, match="must be contiguous"):
        Pool([plane[:, :1]], [plane[:, :1]])
    with pytest.raises(ValueError, match="page_size is 4, but"):
        Pool([plane.view(4, 2, 2, 16)], [plane.view(4, 2, 2, 16)], page_size=4)
    with pytest.raises(ValueError, match="a plane is"):
        Pool([plane[0]], [plane[0]])


def test_push(pool):
    pages = random_pages(3, 12)
    with pytest.raises(ValueError, match="2 source heads cannot fill 4"):
        push(pool, pages, random_pool(), pages, 12, source_heads=range(2))
    with pytest.raises(ValueError, match="differ in dtype"):
        push(pool, pages, random_pool(dtype=torch.float16), pages, 12)
    with pytest.raises(ValueError, match="4 and 6 planes"):
        push(pool, pages, random_pool(layers=3), pages, 12)
    with pytest.raises(ValueError, match="12 tokens need more than 2 pages"):
        push(pool, pages, random_pool(), pages[:2], 12)
    with pytest.raises(ValueError, match="target_pages must be contiguous int32"):
        push(pool, pages, random_pool(), pages.long(), 12)


def test_fp8_wire():
    pool = random_pool(dtype=torch.float8_e4m3fn)
    pages, staging = random_pages(1, 12), random_bytes(1024)
    with pytest.raises(ValueError, match="bf16 or fp16 cache"):
        gather_fp8(pool, pages, 4, staging, torch.ones(4, device=DEVICE))
    with pytest.raises(ValueError, match=r"float32 \[4\]"):
        gather_fp8(random_pool(), pages, 4, staging, torch.ones(3, device=DEVICE))


def test_append(pool):
    new = torch.zeros(3, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit pages"):
        append(pool.keys[0], pool.values[0], slots, new[:, :2], new[:, :2])
    with pytest.raises(ValueError, match=r"slots must be contiguous int32 \[3\]"):
        append(pool.keys[0], pool.values[0], slots.long(), new, new)
    wide = torch.zeros(3, 4, 32, dtype=torch.bfloat16, device=DEVICE)[..., :16]
    with pytest.raises(ValueError, match="heads must be contiguous"):
        append(pool.keys[0], pool.values[0], slots, wide, wide)


def test_decode():
    pool = normal_pool()
    planes = pool.keys[0], pool.values[0]
    query = torch.zeros(2, 8, 16, dtype=torch.bfloat16, device=DEVICE)
    table, lengths = (
        torch.zeros(2, 3, dtype=torch.int32, device=DEVICE),
        torch.ones(2, dtype=torch.int32, device=DEVICE),
    )
    with pytest.raises(ValueError, match="does not fit pages"):
        paged_decode(query[:, :6], *planes, table, lengths, page_size=4)
    with pytest.raises(ValueError, match="block_table must be int32"):
        paged_decode(query, *planes, table.long(), lengths, page_size=4)
    with pytest.raises(ValueError, match="lengths must be int32"):
        paged_decode(query, *planes, table, lengths[:1], page_size=4)
