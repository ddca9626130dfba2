"""Flushing: caches forget what nobody uses, wherever they are, and the router what it believed of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import FlushCache, Send
from pdsim.core.routing.role_router import RoleRouter
from pdsim.core.sequence import TokenIds
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.routing import CacheAware
from pdsim.scenario.building.machines import build_instances, build_router
from pdsim.scenario.building.sizing import resolve
from tests.support import small, small_aggregated

PAGE = 2
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(TokenIds), max_size=8)


@given(PROMPTS, PROMPTS)
def test_what_a_lease_holds_stays_and_all_else_goes(done, held):
    pool = PagePool(200)
    cache = KvCache(pool, PAGE, RadixCache(pool, PAGE, LeastRecentlyUsed()))
    leases = []
    for prompt, stays in [(p, False) for p in done] + [(p, True) for p in held]:
        lease = cache.open(prompt, len(prompt))
        cache.grow(lease, -(-len(prompt) // PAGE) - lease.num_shared)
        if stays:
            cache.checkpoint(lease, prompt, len(prompt))
            leases.append((prompt, lease))
        else:
            cache.close(lease, prompt, len(prompt))
    cache.flush()
    assert cache.levels()[1] == 0
    for prompt, lease in leases:
        assert cache.num_cached_tokens(prompt) == len(prompt) // PAGE * PAGE
        cache.drop(lease)
    cache.flush()
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("scenario", [small(), small(health={}), small_aggregated()], ids=["pair", "watched", "alone"])
def test_the_router_has_every_instance_flush(scenario):
    scenario = resolve(scenario)
    instances = build_instances(scenario)
    assert build_router(scenario).on_message(FlushCache(), 0) == [Send(i.instance_id, FlushCache()) for i in instances]
    assert all(instance.on_message(FlushCache(), 0) == [] for instance in instances)


def test_the_router_forgets_what_it_believed_to_be_cached():
    role = RoleRouter(["decode-0"], CacheAware())
    prompt = TokenIds(range(200))
    role.num_cached_tokens(prompt, "decode-0")  # from now on it remembers
    role.pick(prompt, 0)
    assert role.num_cached_tokens(prompt, "decode-0") > 0
    role.forget()
    assert role.num_cached_tokens(prompt, "decode-0") == 0
