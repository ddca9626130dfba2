"""Laws of Dynamo's KVBM as host memory behind vLLM's prefix caches (DynamoConnector)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.kvbm_cache import KvbmCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import LoadBack, LoadedBack, Offload, Offloaded, PrefillStep
from pdsim.core.sequence import Spans
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from tests.laws.test_offloading import offloading
from tests.strategies import fault_schedules
from tests.support import MILLISECOND, examples, parts, request, run, run_both_ways, small, small_aggregated

PAGE = 4
SHARED = Spans.of(1, 64)


@st.composite
def with_kvbm(draw: st.DrawFn):
    """vLLM's clusters with KVBM, from one block to plenty."""
    scenario = draw(offloading())
    role = "aggregated" if scenario.prefill is None else "prefill"
    update = {"host_cache_connector": "kvbm"}
    return scenario.model_copy(update={role: getattr(scenario, role).model_copy(update=update)})


@examples(25)
@given(with_kvbm())
def test_all_requests_end_and_a_load_reads_what_a_store_has_written(scenario):
    many, _ = run_both_ways(scenario)
    assert all(one.outcome == "finished" for one in many.records.requests)
    stores, stored, loading = {}, {}, set()
    for entry in many.journal:
        at = entry.instance_id
        if entry.call == "on_message" and isinstance(entry.args[0], Offloaded):
            stored.setdefault(at, set()).update(stores.pop((at, entry.args[0].store)))
        if entry.call == "on_message" and isinstance(entry.args[0], LoadedBack):
            loading.remove((at, entry.args[0].request_id))
        step, commands = entry.returned if entry.call == "next_step" else (None, entry.returned)
        for command in commands if isinstance(commands, list) else ():
            if isinstance(command, Offload):
                stored.setdefault(at, set()).difference_update(command.host_pages)
                stores[at, command.store] = command.host_pages
            elif isinstance(command, LoadBack):
                assert set(command.host_pages) <= stored[at]
                loading.add((at, command.request_id))
        computes = parts(step) if step is not None and at != "router" else ()
        chunks = [chunk for part in computes if isinstance(part, PrefillStep) for chunk in part.chunks]
        assert not {(at, chunk.request_id) for chunk in chunks} & loading
    assert not stores
    assert not loading


@examples(25)
@given(fault_schedules(with_kvbm()))
def test_every_block_has_one_owner_and_nothing_leaks_when_things_go_wrong(scenario):
    assert run(scenario, checked=True).result.stall == []


class ListOfBlocks:
    """The naive twin: a list of whole prefixes, the next to be evicted first, and the prefixes that loads read."""

    def __init__(self, num_blocks):
        self.num_free, self.prefixes, self.read = num_blocks, [], []

    def found(self, prompt):
        stops = range(PAGE, len(prompt) + 1, PAGE)
        missing = [stop for stop in stops if prompt.first(stop) not in [*self.prefixes, *self.read]]
        return (missing[0] - PAGE if missing else len(prompt) - len(prompt) % PAGE) // PAGE

    def store(self, prompt, first):
        stops = range((first + 1) * PAGE, len(prompt) + 1, PAGE)
        if len(stops) > self.num_free + len(self.prefixes):
            return []
        del self.prefixes[: max(0, len(stops) - self.num_free)]
        self.num_free = max(0, self.num_free - len(stops))
        return [prompt.first(stop) for stop in stops]

    def end(self, stored=(), loaded=()):
        for prefix in loaded:
            self.read.remove(prefix)
        for prefix in (*stored, *loaded):
            known = prefix in self.prefixes or prefix in self.read
            self.num_free += known and prefix in stored
            self.prefixes = [one for one in self.prefixes if one != prefix]
            if prefix not in self.read:
                self.prefixes.append(prefix)


prompts = st.builds(
    lambda shared, own, n: Spans([(0, 0, shared * PAGE), (own, 0, n)]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4, 8, 9, 12]),
)


@given(
    st.lists(st.tuples(prompts, st.sampled_from(["store", "store all", "begin load", "end load"])), max_size=30),
    st.integers(1, 8),
)
def test_blocks_come_and_go_as_in_a_list_of_prefixes(calls, num_blocks):
    cache, twin, loads = KvbmCache(PagePool(num_blocks), PAGE), ListOfBlocks(num_blocks), {}
    for number, (prompt, call) in enumerate(calls):
        found = twin.found(prompt)
        loadable = found - (found * PAGE == len(prompt) > 0)
        assert cache.num_loadable_pages(prompt, 0, len(prompt)) == loadable
        assert cache.peek(prompt) == found * PAGE
        if call.startswith("store"):
            first = 0 if call == "store all" else loadable
            stored = twin.store(prompt, first)
            cache.store(prompt, first * PAGE, len(prompt), list(range(100)))
            assert len(cache.stores) == bool(stored)
            for store in list(cache.stores):
                cache.on_stored(store)
            twin.end(stored=stored)
        elif call == "begin load" and loadable:
            loads[number] = [prompt.first(stop) for stop in range(PAGE, loadable * PAGE + 1, PAGE)]
            cache.load(number, prompt, 0, list(range(loadable)))
            twin.read += loads[number]
            twin.prefixes = [one for one in twin.prefixes if one not in loads[number]]
        elif call == "end load" and loads:
            first = min(loads)
            cache.on_loaded(first)
            twin.end(loaded=loads.pop(first))
        assert list(cache.idle) == [cache_key(prefix) for prefix in twin.prefixes]
        assert cache.pool.num_free == twin.num_free


def cache_key(prefix):
    key = 0
    for start in range(0, len(prefix), PAGE):
        key = hash((key, prefix.page_key(start, PAGE)))
    return key


def evicted_and_asked_again(role, **changes):
    """A prompt of 16 blocks, another that takes all its pages but two, and the first again, with 8 more tokens."""
    specs = [
        request(0, SHARED, 1),
        request(1, 76, 1, arrival_ns=200 * MILLISECOND),
        request(2, SHARED.then(Spans.of(2, 8)), 1, arrival_ns=400 * MILLISECOND),
    ]
    own = {"pool_tokens": 84, "chunked_prefill_tokens": 80, "host_cache": "1 GB", "host_cache_connector": "kvbm"}
    transport = {"network__transport": "nixl-rdma"} if role == "prefill" else {}
    own = {f"{role}__{name}": value for name, value in own.items()}
    return specs, {"engine": "vllm", "page_size": PAGE, **own, **transport, **changes}


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_stores_follow_the_step_and_a_prompt_waits_for_its_load(role):
    """Prefill takes 1 ms a token. Steps do not wait for stores. The last prompt stores the two blocks it computes."""
    specs, changes = evicted_and_asked_again(role)
    traced = run((small if role == "prefill" else small_aggregated)(*specs, **changes), checked=True)
    first, _, last = [step for step in traced.records.steps if step.kind == "prefill"]
    writes = [copy for copy in traced.records.host_copies if copy.kind == "write"]
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    assert [write.num_pages for write in writes] == [16, 19, 2]
    assert writes[0].start_ns == first.start_ns + first.duration_ns == first.start_ns + 64 * MILLISECOND
    assert load.num_pages == len(SHARED) // PAGE - 2
    assert (last.start_ns, last.duration_ns) == (load.end_ns, 8 * MILLISECOND)
    assert traced.records.requests[2].num_prefill_cached_tokens == len(SHARED)


def test_of_a_prompt_that_is_wholly_in_host_memory_the_last_block_is_computed_and_stored_again():
    specs, changes = evicted_and_asked_again("aggregated")
    specs[2] = request(2, SHARED, 1, arrival_ns=400 * MILLISECOND)
    traced = run(small_aggregated(*specs, **changes), checked=True)
    last = [step for step in traced.records.steps if step.kind == "prefill"][-1]
    assert (last.num_tokens, last.num_context_tokens) == (PAGE, len(SHARED) - PAGE)
    assert [copy.num_pages for copy in traced.records.host_copies if copy.kind == "write"] == [16, 19, 1]


def test_a_prompt_does_not_wait_for_a_store():
    """The twin of a prompt comes while the first is stored: its blocks are computed again, without a prefix cache."""
    specs, changes = evicted_and_asked_again("aggregated", aggregated__radix_cache=False)
    specs = [specs[0], specs[0]._replace(request_id=1, arrival_ns=64 * MILLISECOND + 1)]
    traced = run(small_aggregated(*specs, **changes), checked=True)
    assert [one.num_prefill_cached_tokens for one in traced.records.requests] == [0, 0]


@pytest.mark.parametrize(("connector", "num_loads"), [("kvbm", 0), ("offloading", 1)])
def test_a_preempted_request_is_computed_again_and_not_loaded(connector, num_loads):
    """Two prompts of 12 blocks take 24 of 27 pages. Their outputs need more, so the second prompt is preempted."""
    specs, changes = evicted_and_asked_again("aggregated", aggregated__radix_cache=False, aggregated__pool_tokens=108)
    specs = [request(0, 48, 20), request(1, 48, 20)]
    changes["aggregated__host_cache_connector"] = connector
    records = run(small_aggregated(*specs, **changes), checked=True).records
    assert [one.num_retractions for one in records.requests] == [0, 1]
    assert sum(copy.kind == "load" for copy in records.host_copies) == num_loads


@pytest.mark.parametrize(
    ("model", "reason"), [("qwen3-next-80b-a3b", "does not start"), ("gpt-oss-20b", "sliding window")]
)
def test_models_that_need_a_hybrid_manager_of_kv_are_refused(model, reason):
    specs, changes = evicted_and_asked_again("aggregated", page_size=16)
    with pytest.raises(ConfigError, match=reason):
        resolve(small_aggregated(*specs, **changes, model=model))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill__tp": 2, "prefill__dp": 2, "model": "qwen3-30b-a3b"}, "dp 2 beside KVBM"),
        ({"prefill__pp": 2}, "pp 2 beside KVBM"),
        ({"network__transport": "mooncake-rdma"}, "transport is mooncake-rdma"),
        ({"network__nixl_push": True}, "with nixl_push"),
        ({"decode__returns_kv": True, "decode__radix_cache": True}, "asks KVBM alone"),
        ({"engine": "sglang"}, "SGLang's LMCache .* and KVBM"),
    ],
)
def test_what_pdsim_does_not_model_of_kvbm_is_refused(changes, reason):
    specs, given_changes = evicted_and_asked_again("prefill")
    with pytest.raises(ConfigError, match=reason):
        small(*specs, **{**given_changes, "decode__admission": "free_pages", **changes})
