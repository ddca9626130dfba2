"""A router's memory against a prefix cache whose pages are told apart."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.routing.prompt_memory import PromptMemories, PromptMemory
from pdsim.core.sequence import Spans
from pdsim.policy.pages import LeastRecentlyUsed

PAGE, NUM_PAGES = 64, 12

prompts = st.lists(
    st.builds(
        lambda stream, shared, private: Spans([(stream, 0, shared), (stream + 10, shared, private)]),
        st.integers(0, 2),
        st.integers(1, 6 * PAGE),
        st.integers(0, 10 * PAGE),
    ),
    max_size=25,
)


@given(prompts)
def test_a_memory_knows_what_a_cache_would_hold(sent):
    memory, pool = PromptMemory(NUM_PAGES * PAGE), PagePool(NUM_PAGES)
    cache = KvCache(pool, PAGE, RadixCache(pool, PAGE, LeastRecentlyUsed()))
    cache.prefix_cache.uses_whole_nodes = cache.evicts_early = False  # by time of use alone
    for prompt in sent:
        memory.add(prompt)
        if len(prompt) // PAGE <= NUM_PAGES:
            lease = cache.open(prompt, len(prompt))
            cache.grow(lease, len(prompt) // PAGE - lease.num_shared)
            cache.close(lease, prompt, len(prompt))
        assert [memory.num_tokens(p) for p in sent] == [cache.num_cached_tokens(p) for p in sent]


@given(prompts, st.lists(st.integers(0, 3), min_size=1))
def test_only_holders_know_anything_of_a_prompt(sent, places):
    """3: the first instance forgets all."""
    names = ["a", "b", "c"]
    memories = PromptMemories(names, NUM_PAGES * PAGE)
    for i, prompt in enumerate(sent):
        place = places[i % len(places)]
        if place == len(names):
            memories.forget("a")
        else:
            memories.add(prompt, names[place])
        for one in sent:
            known = {name for name in names if memories.num_tokens(one, name)}
            assert known == set(memories.holders(one))
