"""Page tables break up with churn: the sign of experiments/fragmentation, at small size."""

from functools import cache

import pytest

from pdsim.scenario.schema import Scenario
from tests.support import run, small


def churning(page_size: int, radix_cache: bool) -> Scenario:
    """More prefixes than decode's pool holds."""
    return small(
        workload={
            "use": "prefix_pool",
            "num_requests": 400,
            "num_prefixes": 24,
            "prefix_tokens": 128,
            "input_tokens": {"use": "uniform", "low": 20, "high": 120},
            "output_tokens": {"use": "uniform", "low": 2, "high": 60},
        },
        client={"use": "closed_loop", "concurrency": 6},
        page_size=page_size,
        prefill__radix_cache=False,
        decode__pool_tokens=2048,
        decode__radix_cache=radix_cache,
        cost={"use": "affine", "prefill_per_token": "10 us", "decode_base": "10 ms"},
        network__descriptor_latency="10 us",
    )


@cache
def young_and_old(page_size: int, radix_cache: bool) -> tuple[float, float, float, float]:
    """Descriptors and ms a token sent, of the first and of the last transfers."""
    transfers = run(churning(page_size, radix_cache)).records.transfers
    found = []
    for some in (transfers[:8], transfers[-200:]):
        num_tokens = sum(t.num_pages for t in some) * page_size
        found.append(sum(t.num_descriptors for t in some) / num_tokens)
        found.append(sum(t.end_ns - t.start_ns for t in some) / 1e6 / num_tokens)
    return found[0], found[2], found[1], found[3]


def test_increments_with_pages_of_one_token_break_up():
    young, old, young_ms, old_ms = young_and_old(1, radix_cache=True)
    assert old > 5 * young
    assert old_ms > 3 * young_ms


@pytest.mark.parametrize(("page_size", "radix_cache"), [(16, True), (1, False)])
def test_larger_pages_and_whole_prompts_break_up_less(page_size, radix_cache):
    _, old, _, old_ms = young_and_old(page_size, radix_cache)
    _, worst, _, worst_ms = young_and_old(1, radix_cache=True)
    assert old < worst / 2
    assert old_ms < worst_ms / 2
