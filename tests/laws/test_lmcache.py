"""Laws of LMCache as host memory behind vLLM's prefix caches (LMCacheConnectorV1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.messages import LoadChunks, PrefillStep, SaveChunks
from pdsim.core.sequence import Spans
from pdsim.cost.copies import end_behind_load, end_of_saves
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from tests.laws.test_offloading import offloading
from tests.strategies import fault_schedules
from tests.support import MILLISECOND, examples, parts, request, run, run_both_ways, small, small_aggregated

PAGE, CHUNK = 4, 16
SHARED = Spans.of(1, 4 * CHUNK)


@st.composite
def with_lmcache(draw: st.DrawFn):
    """vLLM's clusters with LMCache, from one chunk to plenty."""
    scenario = draw(offloading())
    role = "aggregated" if scenario.prefill is None else "prefill"
    pages = draw(st.sampled_from([1, 2, 4]))
    update = {"host_cache_connector": "lmcache", "host_cache_chunk_tokens": pages * scenario.page_size}
    update["host_cache_layerwise"] = draw(st.booleans())
    return scenario.model_copy(update={role: getattr(scenario, role).model_copy(update=update)})


@examples(25)
@given(with_lmcache())
def test_all_requests_end_and_the_step_that_begins_a_prompt_waits_for_what_was_saved(scenario):
    many, _ = run_both_ways(scenario)
    assert all(one.outcome == "finished" for one in many.records.requests)
    saved = {}
    for entry in many.journal:
        if entry.call != "next_step" or entry.instance_id == "router":
            continue
        step, commands = entry.returned
        held = saved.setdefault(entry.instance_id, set())
        chunks = [chunk for part in parts(step) if isinstance(part, PrefillStep) for chunk in part.chunks]
        for command in commands:
            if isinstance(command, LoadChunks):
                assert set(command.host_chunks) <= held
                (chunk,) = [chunk for chunk in chunks if chunk.request_id == command.request_id]
                assert chunk.num_context_tokens >= len(command.pages) * scenario.page_size - 1
            elif isinstance(command, SaveChunks):
                held |= set(command.host_chunks)


@examples(25)
@given(fault_schedules(with_lmcache()))
def test_nothing_leaks_when_things_go_wrong(scenario):
    assert run(scenario, checked=True).result.stall == []


class ListOfChunks:
    """The naive twin: a list of whole prefixes, least recently used first."""

    def __init__(self, num_chunks, is_layerwise):
        self.num_chunks, self.is_layerwise, self.prefixes = num_chunks, is_layerwise, []

    def look_up(self, prompt):
        found = []
        for stop in range(CHUNK, len(prompt) + 1, CHUNK):
            if prompt.first(stop) not in self.prefixes:
                break
            found.append(prompt.first(stop))
        for prefix in reversed(found):
            self.prefixes.remove(prefix)
            self.prefixes.append(prefix)
        return len(found)

    def save(self, prompt, found):
        stops = range((found + 1) * CHUNK, len(prompt) + 1, CHUNK)
        if self.is_layerwise:
            stops = [stop for stop in stops if prompt.first(stop) not in self.prefixes]
        num_free = self.num_chunks - len(self.prefixes)
        taken = min(len(stops), self.num_chunks)
        del self.prefixes[: max(0, taken - num_free)]
        self.prefixes += [prompt.first(stop) for stop in stops[:taken] if prompt.first(stop) not in self.prefixes]


prompts = st.builds(
    lambda shared, own, n: Spans([(0, 0, shared * CHUNK), (own, 0, n)]),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 70),
)


@given(st.lists(st.tuples(prompts, st.booleans()), max_size=30), st.integers(1, 8), st.booleans())
def test_chunks_come_and_go_as_in_a_list_of_prefixes(calls, num_chunks, is_layerwise):
    cache = ChunkCache(PagePool(num_chunks), PAGE, CHUNK, is_layerwise=is_layerwise)
    twin = ListOfChunks(num_chunks, is_layerwise)
    for prompt, knows in calls:
        found = twin.look_up(prompt)
        assert cache.num_loadable_pages(0, prompt, 0, len(prompt)) == found * CHUNK // PAGE
        found = found if knows else 0  # a twin of the prompt was saved meanwhile
        cache.save(prompt, found, len(prompt), list(range(100)))
        twin.save(prompt, found)
        assert len(cache.places) == len(twin.prefixes) == num_chunks - cache.pool.num_free


def evicted_and_asked_again(role, **changes):
    """A prompt of 4 chunks, another that takes all its pages but two, and the first again, with 8 more tokens."""
    specs = [
        request(0, SHARED, 1),
        request(1, 76, 1, arrival_ns=200 * MILLISECOND),
        request(2, SHARED.then(Spans.of(2, 8)), 1, arrival_ns=400 * MILLISECOND),
    ]
    own = {"pool_tokens": 84, "chunked_prefill_tokens": 80, "host_cache": "1 GB"}
    own |= {"host_cache_connector": "lmcache", "host_cache_chunk_tokens": CHUNK}
    return specs, {"engine": "vllm", "page_size": PAGE, **{f"{role}__{name}": own[name] for name in own}, **changes}


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_the_step_waits_for_its_load_and_ends_behind_its_saves(role):
    """Prefill takes 1 ms a token. The first prompt saves 4 chunks behind its forward, the last loads what lacks."""
    specs, changes = evicted_and_asked_again(role)
    traced = run((small if role == "prefill" else small_aggregated)(*specs, **changes), checked=True)
    first, _, last = [step for step in traced.records.steps if step.kind == "prefill"]
    save = traced.records.host_copies[0]
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    assert (save.kind, save.num_pages, save.start_ns) == ("write", 16, first.start_ns + 64 * MILLISECOND)
    assert first.start_ns + first.duration_ns == save.end_ns
    assert load.num_pages == len(SHARED) // PAGE - 2
    assert (last.start_ns, last.duration_ns) == (load.end_ns, 8 * MILLISECOND)
    assert traced.records.requests[2].num_prefill_cached_tokens == len(SHARED)


@given(st.integers(1, 12), *[st.integers(0, 20)] * 4)
def test_layers_that_are_loaded_computed_and_saved_one_after_another(num_layers, compute_ns, load_ns, save_ns, late_ns):
    """Twin: the layers one by one. The host begins a layer when the save of the layer before the last has ended."""
    computed = saved = save_before = 0
    for layer in range(num_layers):
        here_ns = late_ns + (layer + 1) * load_ns
        computed = max(computed, here_ns, save_before) + compute_ns
        save_before, saved = saved, max(computed, saved) + save_ns
    load = late_ns, late_ns + num_layers * load_ns
    end_ns = end_behind_load(0, num_layers * compute_ns, load, num_layers)
    first_ns = late_ns + load_ns + compute_ns
    assert end_of_saves(end_ns, (first_ns, first_ns + num_layers * save_ns), num_layers) == saved


@pytest.mark.parametrize("role", ["prefill", "aggregated"])
def test_layer_by_layer_a_step_begins_with_its_load_and_saves_within_the_forward(role):
    specs, changes = evicted_and_asked_again(role, **{f"{role}__host_cache_layerwise": True})
    traced = run((small if role == "prefill" else small_aggregated)(*specs, **changes), checked=True)
    first, _, last = [step for step in traced.records.steps if step.kind == "prefill"]
    save, (load,) = traced.records.host_copies[0], [one for one in traced.records.host_copies if one.kind == "load"]
    num_layers = traced.cluster.num_layers
    assert save.start_ns == first.start_ns + 64 * MILLISECOND // num_layers
    saves_ns = save.end_ns - save.start_ns
    assert first.duration_ns == max(64 * MILLISECOND + saves_ns // num_layers, save.end_ns - first.start_ns)
    assert last.start_ns == load.start_ns
    span = load.start_ns, load.end_ns
    assert last.start_ns + last.duration_ns == end_behind_load(last.start_ns, 8 * MILLISECOND, span, num_layers)


def test_a_prompt_that_is_wholly_in_host_memory_computes_its_last_token():
    specs, changes = evicted_and_asked_again("aggregated")
    specs[2] = request(2, SHARED, 1, arrival_ns=400 * MILLISECOND)
    last = [step for step in run(small_aggregated(*specs, **changes)).records.steps if step.kind == "prefill"][-1]
    assert (last.num_tokens, last.num_context_tokens) == (1, len(SHARED) - 1)


def test_requests_that_decode_wait_for_the_copies_of_a_prompt_in_their_step():
    """The token of request 3 that is computed beside request 2 comes later by the load."""
    specs, changes = evicted_and_asked_again("aggregated", aggregated__pool_tokens=112)
    specs[1] = request(1, 104, 1, arrival_ns=200 * MILLISECOND)
    specs.append(request(3, 8, 20, arrival_ns=380 * MILLISECOND))
    traced = run(small_aggregated(*specs, **changes), checked=True)
    (mixed,) = [step for step in traced.records.steps if step.kind == "prefill" and step.num_tokens == 8][1:]
    (load,) = [copy for copy in traced.records.host_copies if copy.kind == "load"]
    assert mixed.start_ns == load.end_ns > load.start_ns


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
        ({"engine": "vllm", "prefill__host_cache_layerwise": True}, "a setting of LMCache"),
        ({"prefill__host_cache_connector": "lmcache"}, "SGLang's LMCache"),
        ({"engine": "vllm", "prefill__host_cache_connector": "lmcache", "page_size": 512}, "no multiple of page_size"),
    ],
)
def test_what_pdsim_does_not_model_of_lmcache_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        small(request(0, 4, 4), decode__admission="free_pages", prefill__host_cache="1 GB", **changes)
