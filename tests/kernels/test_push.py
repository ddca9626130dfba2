"""Pages to pages, between pools of different layouts."""

import pytest
import torch
from pdkernels import Pool
from pdkernels.reference import gather_reference, push_reference
from pdkernels.unused import map_peer, push

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
