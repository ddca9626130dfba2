"""Laws of host memory behind vLLM's prefix caches (OffloadingConnector)."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.offload_cache import MUST_WAIT, OffloadCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import LoadBack, LoadedBack, Offload, Offloaded, PrefillStep
from pdsim.core.sequence import Spans
from pdsim.scenario.yaml_file import ConfigError
from tests.strategies import KV_TOKEN_BYTES, fault_schedules, vllm_aggregated_scenarios, vllm_scenarios
from tests.support import MILLISECOND, parts, request, run, run_both_ways, small, small_aggregated

PAGE = 4
SHARED = Spans.of(1, 64)


@st.composite
def offloading(draw: st.DrawFn, clusters=None):
    """vLLM's clusters with host memory from a few blocks to plenty."""
    scenario = draw(st.one_of(vllm_scenarios(), vllm_aggregated_scenarios()) if clusters is None else clusters)
    role = "aggregated" if scenario.prefill is None else "prefill"
    blocks = draw(st.sampled_from([1, 3, 12, 4000]))
    host_bytes = blocks * scenario.page_size * KV_TOKEN_BYTES
    update = {"radix_cache": draw(st.booleans()), "host_cache": host_bytes, "eviction": None}
    settings = getattr(scenario, role)
    update["eviction"] = type(settings).model_fields["eviction"].default
    return scenario.model_copy(update={role: settings.model_copy(update=update)})


@given(offloading())
def test_many_steps_at_once_are_single_steps_and_all_requests_end(scenario):
    many, _ = run_both_ways(scenario)
    assert all(one.outcome == "finished" for one in many.records.requests)


@given(offloading())
def test_every_page_has_one_owner_and_what_is_loaded_is_computed_by_nobody(scenario):
    traced = run(scenario, checked=True)
    loading = defaultdict(set)
    stored = defaultdict(set)
    for entry in traced.journal:
        if entry.call == "on_message" and isinstance(entry.args[0], LoadedBack):
            loading[entry.instance_id].remove(entry.args[0].request_id)
        if entry.call == "on_message" and isinstance(entry.args[0], Offloaded):
            stored[entry.instance_id].remove(entry.args[0].store)
        step, commands = entry.returned if entry.call == "next_step" else (None, entry.returned)
        for command in commands if isinstance(commands, list) else ():
            if isinstance(command, LoadBack):
                assert len(command.pages) == len(command.host_pages) > 0
                loading[entry.instance_id].add(command.request_id)
            elif isinstance(command, Offload):
                assert len(command.pages) == len(command.host_pages) > 0
                stored[entry.instance_id].add(command.store)
        for part in parts(step) if entry.call == "next_step" and entry.instance_id != "router" else ():
            if isinstance(part, PrefillStep):
                assert not {chunk.request_id for chunk in part.chunks} & loading[entry.instance_id]
    assert not any(loading.values())
    assert not any(stored.values())


@given(fault_schedules(offloading()))
def test_nothing_leaks_when_things_go_wrong(scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []


def evicted_and_asked_again(**changes):
    """A prompt of 64 tokens, another that takes all its pages but two, and the first again, with 8 more tokens."""
    specs = [
        request(0, SHARED, 1),
        request(1, 76, 1, arrival_ns=200 * MILLISECOND),
        request(2, SHARED.then(Spans.of(2, 8)), 1, arrival_ns=400 * MILLISECOND),
    ]
    return specs, {"engine": "vllm", "page_size": PAGE, **changes}


@pytest.mark.parametrize("cluster", [small, small_aggregated])
def test_a_prompt_from_host_memory_is_loaded_and_only_its_rest_is_computed(cluster):
    """Prefill takes 1 ms a token. The forward begins as the load of 14 blocks ends."""
    role = "prefill" if cluster is small else "aggregated"
    specs, changes = evicted_and_asked_again(**{f"{role}__pool_tokens": 84, f"{role}__host_cache": "1 GB"})
    if cluster is small:
        changes |= {"decode__admission": "free_pages"}
    traced = run(cluster(*specs, **changes), checked=True)
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    assert load.num_pages == len(SHARED) // PAGE - 2
    forward = [step for step in traced.records.steps if step.kind == "prefill"][-1]
    assert (forward.start_ns, forward.duration_ns) == (load.end_ns, 8 * MILLISECOND)
    assert traced.records.requests[2].num_prefill_cached_tokens == len(SHARED)


def test_without_host_memory_the_prompt_is_computed_again():
    specs, changes = evicted_and_asked_again(aggregated__pool_tokens=84)
    forward = [step for step in run(small_aggregated(*specs, **changes)).records.steps if step.kind == "prefill"][-1]
    assert forward.duration_ns == (72 - 2 * PAGE) * MILLISECOND


def test_a_prompt_that_is_wholly_in_host_memory_computes_its_last_token():
    specs, changes = evicted_and_asked_again(aggregated__pool_tokens=84, aggregated__host_cache="1 GB")
    specs[2] = request(2, SHARED, 1, arrival_ns=400 * MILLISECOND)
    forward = [step for step in run(small_aggregated(*specs, **changes)).records.steps if step.kind == "prefill"][-1]
    assert (forward.num_tokens, forward.num_context_tokens) == (1, len(SHARED) - 1)


def test_other_prompts_are_computed_while_one_is_loaded():
    """Request 3 comes behind request 2, whose load takes some milliseconds, and is begun before the load has ended."""
    specs, changes = evicted_and_asked_again(aggregated__pool_tokens=160, aggregated__host_cache="1 GB")
    specs[1] = request(1, 140, 1, arrival_ns=200 * MILLISECOND)
    specs.append(request(3, 16, 1, arrival_ns=400 * MILLISECOND))
    traced = run(small_aggregated(*specs, **changes), checked=True)
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    before, last = [step for step in traced.records.steps if step.kind == "prefill"][-2:]
    assert before.start_ns == load.start_ns < load.end_ns
    assert before.num_tokens == 16
    assert last.start_ns == max(load.end_ns, before.start_ns + before.duration_ns)
    assert last.num_tokens == 8


def cache_of(num_pages):
    return OffloadCache(PagePool(num_pages), PAGE)


def test_a_block_that_is_being_copied_lets_others_wait():
    cache = cache_of(16)
    cache.store(0, SHARED, 32, list(range(8)))
    (store,) = cache.take_copies()
    assert cache.num_loadable_pages(1, SHARED, 0, 64) == MUST_WAIT
    assert cache.num_loadable_pages(1, SHARED, 8, 64) == 0  # the GPU has them all
    cache.on_stored(store.store)
    assert cache.num_loadable_pages(1, SHARED, 2, 64) == 6
    cache.load(1, SHARED, 2, list(range(6)))
    assert cache.num_loadable_pages(2, SHARED, 0, 8) == 2  # no block that request 1 loads
    assert cache.num_loadable_pages(2, SHARED, 0, 64) == MUST_WAIT
    cache.on_loaded(1)
    assert cache.num_loadable_pages(2, SHARED, 0, 64) == 8


def test_without_a_prefix_cache_each_prompt_loads_its_blocks():
    cache = OffloadCache(PagePool(16), PAGE, shares_loads=False)
    cache.store(0, SHARED, 32, list(range(8)))
    assert cache.num_loadable_pages(1, SHARED, 0, 64) == MUST_WAIT  # blocks that are being stored
    cache.on_stored(1)
    for request_id in (1, 2):
        assert cache.num_loadable_pages(request_id, SHARED, 0, 64) == 8
        cache.load(request_id, SHARED, 0, list(range(8)))
    cache.on_loaded(1)
    assert list(cache.loads) == [2]


def test_two_prompts_load_the_same_blocks_at_once():
    """Without a prefix cache nothing is left on the GPU, so both load all 16 blocks of the first prompt."""
    specs, changes = evicted_and_asked_again(aggregated__radix_cache=False, aggregated__host_cache="1 GB")
    specs[1] = specs[2]._replace(request_id=1)
    traced = run(small_aggregated(*specs, **changes), checked=True)
    loads = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    assert [load.num_pages for load in loads] == [len(SHARED) // PAGE] * 2
    assert [one.num_prefill_cached_tokens for one in traced.records.requests] == [0, len(SHARED), len(SHARED)]


def test_blocks_that_lack_are_stored_and_the_least_recently_used_go_from_their_end():
    cache, other = cache_of(16), Spans.of(3, 64)
    for num_tokens in (32, 48):  # chunk by chunk
        cache.store(0, SHARED, num_tokens, list(range(16)))
    assert [len(copy.pages) for copy in cache.take_copies()] == [8, 4]
    cache.store(1, other, 24, list(range(16)))
    assert cache.take_copies() == []  # no room: all blocks are being written
    for store in list(cache.stores):
        cache.on_stored(store)
    cache.store(1, other, 24, list(range(16)))
    cache.on_stored(3)
    assert cache.num_loadable_pages(2, SHARED, 0, 64) == 10
    assert cache.num_loadable_pages(2, other, 0, 64) == 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode__host_cache": "1 GB", "decode__radix_cache": True}, "one connector loads all KV of a request"),
        ({"prefill__host_cache": "1 GB", "prefill__host_cache_write": "write_back"}, "is a setting of SGLang"),
        ({"prefill__host_cache": "1 GB", "storage": {}}, "behind prefill.host_cache_connector lmcache only"),
    ],
)
def test_what_vllm_has_not_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        small(request(0, 4, 4), engine="vllm", decode__admission="free_pages", **changes)
