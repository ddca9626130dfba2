"""Pages to pages, between pools of different layouts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pdkernels import MappedPool, Pool, map_peer, push
from pdkernels.reference import gather_reference, push_reference

from tests.kernels.pools import copy_of, random_pages, random_pool, same_bytes


@pytest.mark.parametrize("source_order", ["NHD", "HND"])
@pytest.mark.parametrize("target_order", ["NHD", "HND"])
@pytest.mark.parametrize(("source_page", "target_page"), [(1, 1), (4, 4), (1, 8), (8, 2)])
def test_push_between_layouts(source_order, target_order, source_page, target_page):
    tokens = 13
    source = random_pool(heads=2, page_size=source_page, order=source_order, pages=32 // source_page)
    target = random_pool(heads=4, page_size=target_page, order=target_order, pages=32 // target_page)
    source_pages = random_pages(-(-tokens // source_page), 32 // source_page)
    target_pages = random_pages(-(-tokens // target_page), 32 // target_page)
    expected = copy_of(target)
    push_reference(source, source_pages, expected, target_pages, tokens, target_heads=range(1, 3))
    push(source, source_pages, target, target_pages, tokens, target_heads=range(1, 3), programs=5)
    assert same_bytes(target, expected)


def test_push_to_addresses():
    """Of memory that another process has, as this one has it mapped; planes in any order, the same on both sides."""
    source, target = random_pool(heads=2, page_size=4), random_pool(heads=4, page_size=4)
    source_pages, target_pages, expected = random_pages(12, 12), random_pages(12, 12), copy_of(target)
    push_reference(source, source_pages, expected, target_pages, 45, target_heads=range(2, 4))
    mapped = MappedPool([plane.data_ptr() for plane in target.planes], target.layout)
    push(source, source_pages, mapped, target_pages, 45, target_heads=range(2, 4))
    assert same_bytes(target, expected)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        MappedPool([8], target.layout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_real_mode_pushes_by_the_kernel_what_it_pushes_by_torch_on_a_cpu(monkeypatch):
    """Planes of K and V in turn, as real mode has them; the last page is there besides those of the pool."""
    geometry = pytest.importorskip("pdreal.memory.geometry")
    pushes = pytest.importorskip("pdreal.memory.page_copies")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    source, target = random_pool(heads=2, page_size=4), random_pool(heads=4, page_size=4)
    source, target = (Pool(pool.planes, (), 4) for pool in (source, target))
    layout, before = target.layout, copy_of(target)
    cache = geometry.CacheGeometry(
        num_pages=11,
        page_size=4,
        num_layers=2,
        num_kv_heads=4,
        head_dim=layout.head_dim,
        itemsize=layout.dtype.itemsize,
    )
    addresses = np.array([plane.data_ptr() for plane in target.planes])
    pair = geometry.RankPair(1, 0, 1, range(2), range(2, 4))
    pages = (3, 0, 7), (11, 2, 5)
    made = []
    for kind in (pushes.KernelPush, pushes.TorchPush):
        kind(source.planes, addresses, pair, cache)(*pages)
        made.append(copy_of(target))
        for plane, was in zip(target.planes, before.planes, strict=True):
            plane.copy_(was)
    assert same_bytes(*made)
    assert not same_bytes(made[0], before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_push_to_a_peer():
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    map_peer(here, there)
    source, near = random_pool(heads=2, page_size=4), random_pool(heads=4, page_size=4)
    target = Pool([k.to(there) for k in near.keys], [v.to(there) for v in near.values], 4)
    pages, target_pages = random_pages(12, 12), random_pages(12, 12)
    push(source, pages, target, target_pages, 47, target_heads=range(2, 4))
    torch.cuda.synchronize(here)
    push_reference(source, pages, near, target_pages, 47, target_heads=range(2, 4))
    expected = gather_reference(near, target_pages, 48)
    assert torch.equal(gather_reference(target, target_pages.to(there), 48).to(here), expected)
