"""Makes pools with random bytes, and page lists, on the device on which the tests run."""

import torch
from pdkernels import Pool

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def random_pool(
    layers: int = 2,
    heads: int = 4,
    head_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 4,
    order: str = "NHD",
    pages: int = 12,
) -> Pool:
    """A pool with random bits, in which every bit pattern occurs, also those of NaN, because copies must keep all of
    them. pages: number of pages.
    """
    shape = (pages * page_size, heads, head_dim) if order == "NHD" else (pages, heads, page_size, head_dim)
    planes = [random_bytes(*shape[:-1], head_dim * dtype.itemsize).view(dtype) for _ in range(2 * layers)]
    return Pool(planes[:layers], planes[layers:], page_size if order == "NHD" else None)


def normal_pool(dtype: torch.dtype = torch.bfloat16, **shape: int | str) -> Pool:
    """A pool with normally distributed values, for kernels that compute. shape: arguments of random_pool."""
    pool = random_pool(dtype=dtype, **shape)
    for plane in pool.planes:
        plane.copy_(torch.randn(plane.shape, device=DEVICE))
    return pool


def copy_of(pool: Pool) -> Pool:
    keys, values = ([plane.clone() for plane in planes] for planes in (pool.keys, pool.values))
    return Pool(keys, values, pool.page_size)


def random_pages(count: int, among: int) -> torch.Tensor:
    return torch.randperm(among, device=DEVICE)[:count].to(torch.int32)


def same_bytes(pool: Pool, expected: Pool) -> bool:
    return all(
        torch.equal(plane.view(torch.uint8), other.view(torch.uint8))
        for plane, other in zip(pool.planes, expected.planes, strict=True)
    )
