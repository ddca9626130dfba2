"""Laws of storage behind LMCache's host memory, which is read while prompts wait (enable_async_loading)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.chunk_cache import ChunkCache, EvictionOrder
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import Prefetched, PrefetchKv, PrefillStep
from pdsim.cost.copies import SLEEP_NS
from pdsim.scenario.sections.servers import StorageSettings
from pdsim.scenario.yaml_file import ConfigError
from tests.laws.test_lmcache import CHUNK, PAGE, SHARED, evicted_and_asked_again, prompts, with_lmcache
from tests.strategies import KV_TOKEN_BYTES, fault_schedules
from tests.support import MILLISECOND, examples, parts, request, run, run_both_ways, small, small_aggregated


@st.composite
def with_storage(draw: st.DrawFn):
    """vLLM's clusters with LMCache and storage, from two chunks to plenty."""
    scenario = draw(with_lmcache())
    role = "aggregated" if scenario.prefill is None else "prefill"
    servers = getattr(scenario, role).model_copy(update={"host_cache_layerwise": False})
    size = draw(st.sampled_from([2, 4000])) * servers.host_cache_chunk_tokens * KV_TOKEN_BYTES
    times = {"read_bandwidth": "1 MB/s", "latency": f"{draw(st.sampled_from([0, 3]))} ms"}
    storage = StorageSettings(shared=draw(st.booleans()), size=f"{size} B", **times)
    return scenario.model_copy(update={role: servers, "storage": storage})


@examples(25)
@given(with_storage())
def test_all_requests_end_and_no_prompt_begins_before_its_lookup_has_ended(scenario):
    many, _ = run_both_ways(scenario)
    assert all(one.outcome == "finished" for one in many.records.requests)
    asking = set()
    for entry in many.journal:
        if entry.call == "on_message" and isinstance(entry.args[0], Prefetched) and entry.args[0].is_over:
            asking.remove((entry.instance_id, entry.args[0].request_id))
        if entry.call != "next_step" or entry.instance_id == "router":
            continue
        step, commands = entry.returned
        asking |= {(entry.instance_id, one.request_id) for one in commands if isinstance(one, PrefetchKv)}
        for part in parts(step):
            if isinstance(part, PrefillStep):
                assert not {(entry.instance_id, chunk.request_id) for chunk in part.chunks} & asking
    assert not asking


@examples(25)
@given(fault_schedules(with_storage()))
def test_nothing_leaks_when_things_go_wrong(scenario):
    assert run(scenario, checked=True).result.stall == []


class ListOfHeldChunks:
    """The naive twin: prefixes in host memory in the order of their saves, and what each waiting prompt has found."""

    def __init__(self, num_chunks):
        self.num_chunks, self.prefixes, self.waiting = num_chunks, [], {}

    def make_room(self, num_wanted):
        num_taken = len(self.prefixes) + sum(num_read for _, num_read in self.waiting.values())
        kept = [prefix for held, _ in self.waiting.values() for prefix in held]
        while num_taken + num_wanted > self.num_chunks and (lost := [one for one in self.prefixes if one not in kept]):
            self.prefixes.remove(lost[0])
            num_taken -= 1
        return min(num_wanted, self.num_chunks - num_taken)

    def look_up(self, number, prompt, num_stored):
        held = []
        for stop in range(CHUNK, len(prompt) + 1, CHUNK):
            if prompt.first(stop) not in self.prefixes:
                break
            held.append(prompt.first(stop))
        self.waiting[number] = held, 0
        num_read = self.make_room(min(num_stored, len(prompt) // CHUNK - len(held)))
        self.waiting[number] = held, num_read
        return len(held), num_read

    def begin(self, number, prompt):
        held, num_read = self.waiting.pop(number)
        stops = range((len(held) + num_read + 1) * CHUNK, len(prompt) + 1, CHUNK)
        room = self.make_room(len(stops))
        self.prefixes += [prompt.first(stop) for stop in stops[:room] if prompt.first(stop) not in self.prefixes]


@given(st.lists(st.tuples(prompts, st.integers(0, 3), st.integers(0, 2)), max_size=20), st.integers(1, 8))
def test_chunks_are_held_from_the_lookup_until_the_prompt_begins(calls, num_chunks):
    cache = ChunkCache(PagePool(num_chunks), PAGE, CHUNK, stores=True)
    twin, waiting = ListOfHeldChunks(num_chunks), []
    for number, (prompt, num_stored, num_begins) in enumerate(calls):
        assert cache.must_wait(number, prompt)
        most = cache.take_copies()[-1].most_pages
        cache.on_prefetched(Prefetched(number, min(num_stored, most), min(num_stored, most), True))
        assert not cache.must_wait(number, prompt)
        num_found = sum(twin.look_up(number, prompt, num_stored))
        assert cache.num_loadable_pages(number, prompt, 0, len(prompt)) == num_found * CHUNK // PAGE
        waiting.append((number, prompt, num_found))
        for _ in range(min(num_begins, len(waiting))):
            begun, its_prompt, found = waiting.pop(0)
            cache.release(begun)
            cache.save(its_prompt, found, len(its_prompt), list(range(100)))
            twin.begin(begun, its_prompt)
        assert len(cache.places) == len(twin.prefixes)


@given(st.lists(st.one_of(st.sets(st.integers(0, 7), min_size=1), st.integers(0, 3), st.none()), max_size=20))
def test_the_key_evicted_next_is_the_first_in_order_that_nobody_holds(calls):
    """A set of keys is held, a number releases one of these sets, and None evicts."""
    order, keys, holds = EvictionOrder(), list(range(8)), []

    def evict():
        free = [key for key in keys if not any(key in held for held in holds)]
        assert order.pop() == (free[0] if free else None)
        keys[:] = [key for key in keys if key not in free[:1]]

    for key in keys:
        order.use(key)
    for call in calls:
        if isinstance(call, set):
            holds.append([key for key in keys if key in call])
            order.hold(holds[-1])
        elif call is None:
            evict()
        elif holds:
            order.release(holds.pop(call % len(holds)))
            evict()
    while holds:
        order.release(holds.pop())
    while keys:
        evict()


def stored_and_asked_again(role, read_bandwidth):
    """Host memory of 4 chunks. The second prompt replaces the first one's chunks, which the third reads."""
    specs, changes = evicted_and_asked_again(role, **{f"{role}__host_cache": f"{4 * CHUNK * KV_TOKEN_BYTES} B"})
    storage = {"read_bandwidth": read_bandwidth, "latency": "1 ms"}
    return (small if role == "prefill" else small_aggregated)(*specs, **changes, storage=storage)


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
@pytest.mark.parametrize("read_bandwidth", ["100 MB/s", "100 GB/s"])
def test_a_prompt_sleeps_and_waits_for_its_reads(role, read_bandwidth):
    """One lookup, one read and the load follow one another. The scheduler wakes every 10 ms and asks."""
    traced = run(stored_and_asked_again(role, read_bandwidth), checked=True)
    *_, last = [step for step in traced.records.steps if step.kind == "prefill"]
    (read,) = [copy for copy in traced.records.host_copies if copy.kind == "read"]
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    asked_ns = read.start_ns - MILLISECOND
    size = 4 * CHUNK * KV_TOKEN_BYTES
    assert (read.num_pages, read.num_bytes) == (4, size)
    assert traced.result.summary()["pdsim"]["storage_read_tokens"] == 4 * CHUNK
    bandwidth = 1e8 if "MB" in read_bandwidth else 1e11
    assert abs(read.end_ns - read.start_ns - MILLISECOND - size * 1e9 / bandwidth) <= 1
    num_sleeps = -((asked_ns - read.end_ns) // SLEEP_NS)
    assert load.start_ns == asked_ns + num_sleeps * SLEEP_NS
    assert (num_sleeps > 1) == ("MB" in read_bandwidth)
    assert (last.start_ns, last.num_tokens) == (load.end_ns, 8)
    assert traced.records.requests[2].num_prefill_cached_tokens == len(SHARED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill__host_cache_layerwise": True}, "host_cache_layerwise"),
        ({"prefill__host_cache_connector": "offloading"}, "host_cache_connector lmcache only"),
        ({"storage": {"prefetch": "best_effort"}}, "storage.prefetch: it is a setting of SGLang"),
    ],
)
def test_storage_that_vllm_lacks_is_refused(changes, reason):
    given = {"engine": "vllm", "prefill__host_cache": "1 GB", "prefill__host_cache_connector": "lmcache", "storage": {}}
    with pytest.raises(ConfigError, match=reason):
        small(request(0, 4, 4), decode__admission="free_pages", **given | changes)
