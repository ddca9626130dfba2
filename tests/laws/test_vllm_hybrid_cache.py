"""Laws of vLLM's prefix caches whose models have layers of linear attention, beside a naive twin that lists them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core import messages as m
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.engine_rules import VLLM_0_33
from pdsim.core.invariants import check
from pdsim.core.memory.block_cache import BlockCache
from pdsim.core.memory.radix_cache import PagePool
from pdsim.core.memory.vllm_hybrid_cache import HybridBlocksLease, VllmHybridCache
from pdsim.core.sequence import Spans, TokenIds
from pdsim.core.vllm.vllm_decode_instance import VllmDecodeInstance
from pdsim.core.vllm.vllm_forward_builder import TokenBudget
from pdsim.policy.pages import FreePages, LastAdmittedFirst, LeastRecentlyUsed
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.states import block_tokens, state_blocks
from tests.support import examples, request, run, run_both_ways, small_aggregated

PAGE, BLOCK, SECOND = 4, 576, 10**9
branching = st.builds(lambda same, other: [0] * same + [1] * other, st.integers(1, 14), st.integers(0, 14))
prompts = st.lists(branching | st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8)


def instance(num_pages, *, step_tokens=1000, pages_per_state=3, has_tree=True):
    pool = PagePool(num_pages)
    tree = BlockCache(pool, PAGE, LeastRecentlyUsed()) if has_tree else None
    return VllmDecodeInstance(
        "aggregated-0",
        cache=VllmHybridCache(pool, PAGE, tree, pages_per_state, computes=True),
        limits=DecodeLimits(rules=VLLM_0_33, max_running_requests=8),
        budget=TokenBudget(step_tokens=step_tokens),
        admission_policy=FreePages(),
        preemption_policy=LastAdmittedFirst(),
    )


def chunks_of(step):
    part = step.prefill if isinstance(step, m.MixedStep) else step
    return list(part.chunks) if isinstance(part, m.PrefillStep) else []


def send(server, i, prompt, num_output_tokens=1):
    server.on_message(m.NewRequest(i, i, TokenIds(tuple(prompt)), num_output_tokens, *[server.instance_id] * 2), 0)


def run_alone(server, i, prompt):
    """The chunks of a prompt that is alone, each as its beginning and end."""
    send(server, i, prompt)
    chunks = []
    while not chunks or chunks[-1][1] < len(prompt):
        step, _ = server.next_step(0)
        (chunk,) = chunks_of(step)
        chunks.append((chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens))
        ended = ((i, TokenIds((9,))),) if chunk.is_last else ()
        server.on_step_done(step, m.StepResult(1, ended), 0)
        check(server)
    return chunks


class Twin:
    """Cached prefixes, and those with a state. Nothing is evicted."""

    def __init__(self):
        self.cached, self.states = set(), set()

    def chunks(self, prompt):
        whole = [tuple(prompt[:n]) for n in range(PAGE, len(prompt), PAGE)]
        parting = max([len(prefix) for prefix in whole if prefix in self.cached], default=0)
        start = max([len(prefix) for prefix in whole if prefix in self.states], default=0)
        self.cached |= {*whole, tuple(prompt[: len(prompt) // PAGE * PAGE])}
        stops = [parting] if start < parting else []
        self.states |= {tuple(prompt[:n]) for n in (*stops, (len(prompt) - 1) // PAGE * PAGE) if n}
        ends = [*stops, len(prompt)]
        return list(zip([start, *ends], ends, strict=False))


@examples(60)
@given(prompts)
def test_prompts_continue_from_states_and_stop_where_they_part(drawn):
    server, twin = instance(2000), Twin()
    for i, prompt in enumerate(drawn):
        assert run_alone(server, i, prompt) == twin.chunks(prompt), prompt


@examples(60)
@given(prompts, st.integers(20, 60), st.sampled_from([PAGE, 2 * PAGE, 1000]), st.integers(1, 9), st.booleans())
def test_pages_have_one_owner_and_all_requests_end_in_tight_pools(drawn, num_pages, step_tokens, num_outputs, has_tree):
    server = instance(num_pages, step_tokens=step_tokens, has_tree=has_tree)
    left = dict.fromkeys(range(len(drawn)), num_outputs)
    for i, prompt in enumerate(drawn):
        send(server, i, prompt, num_outputs)
    for _ in range(2000):
        step, _ = server.next_step(0)
        check(server)
        if isinstance(step, m.Wait):
            break
        chunks = chunks_of(step)
        ends = [(chunk.num_context_tokens + chunk.num_tokens, len(drawn[chunk.request_id])) for chunk in chunks]
        assert not has_tree or all(end >= num_prompt or end % PAGE == 0 for end, num_prompt in ends)
        decoded = [] if isinstance(step, m.PrefillStep) else [one.request_id for one in server.batch.requests()]
        for i in (computed := [chunk.request_id for chunk in chunks if chunk.is_last]) + decoded:
            left[i] -= 1
        ended = tuple((i, TokenIds((9,) * num_outputs)) for i in [*decoded, *computed] if not left[i])
        server.on_step_done(step, m.StepResult(1, ended), 0)
        check(server)
    assert not any(left.values())
    server.cache.flush()
    assert server.cache.pool.num_free == num_pages


def test_a_chunk_that_begins_and_ends_in_one_block_has_no_token():
    """Not less: the boundary before its end lies before its beginning."""
    cache = VllmHybridCache(pool := PagePool(9), 16, BlockCache(pool, 16, LeastRecentlyUsed()), 3, computes=True)
    lease = HybridBlocksLease(None, [])
    assert [cache.chunk_tokens(lease, 20, n, prefill_end=100, limit=64) for n in (4, 11, 12, 40)] == [0, 0, 12, 12]


def test_a_prompt_waits_for_a_state_that_its_step_computes():
    """Both prompts continue at 8 tokens: the second in the next step, for its state is computed in this one."""
    server = instance(200)
    for i, prompt in enumerate([[0] * 12, [0] * 9 + [1]]):
        send(server, i, prompt, 2)
    steps = []
    for _ in range(2):
        step, _ = server.next_step(0)
        steps.append([(chunk.request_id, chunk.num_context_tokens, chunk.num_tokens) for chunk in chunks_of(step)])
        server.on_step_done(step, m.StepResult(1, ()), 0)
    assert steps == [[(0, 0, 12)], [(1, 8, 2)]]


def test_blocks_hold_a_state_and_are_shared_by_groups_of_layers():
    """Qwen3-Next on 4 GPUs: a state of 536,576 bytes, KV of 1,024 bytes a token; 12 layers of attention, 36 without."""
    assert block_tokens(536_576, 1024, 16) == 528
    assert block_tokens(536_576, 1024, 64) == 576
    assert state_blocks(12, 36) == (3, 1)
    assert state_blocks(10, 12) == (1, 1.2)
    assert state_blocks(8, 2) == (1, 1)


def with_host(*, gpu_pages, host_pages):
    """Three prompts that share 8 of 10 pages, and before the last one of 14 pages that shares nothing."""
    prompts = [Spans([(1, 0, 8 * BLOCK), (10 + i, 0, 2 * BLOCK)]) for i in range(3)]
    prompts.insert(2, Spans([(2, 0, 14 * BLOCK)]))
    requests = [request(i, prompt, 2, arrival_ns=i * SECOND) for i, prompt in enumerate(prompts)]
    settings = {"gpu": "h100", "tp": 4, "pool_tokens": gpu_pages * BLOCK, "chunked_prefill_tokens": 20 * BLOCK}
    host_cache = f"{host_pages * BLOCK * 12} KiB"  # 12 layers of attention, 1,024 bytes a token
    return small_aggregated(
        *requests, engine="vllm", model="qwen3-next-80b-a3b", aggregated={**settings, "host_cache": host_cache}
    )


def test_a_load_ends_at_a_state_in_host_memory():
    """The second prompt leaves a state where it parts from the first, and the last loads it with 8 pages of KV."""
    many, _ = run_both_ways(with_host(gpu_pages=24, host_pages=200))
    begun = [chunk.num_context_tokens for step in steps_of(many) for chunk in chunks_of(step)]
    assert begun == [0, 0, 8 * BLOCK, 0, 8 * BLOCK]
    assert [len(load.host_pages) for load in loads_of(many)] == [8 + 3]


@examples(20)
@given(st.integers(24, 40), st.integers(1, 40))
def test_host_pages_have_one_owner(gpu_pages, host_pages):
    traced = run(with_host(gpu_pages=gpu_pages, host_pages=host_pages), checked=True)
    assert [one.outcome for one in traced.records.requests] == ["finished"] * 4


def crowd(draw, host_cache):
    """Prompts with one of two prefixes, and outputs of up to three blocks, in pools from tight to roomy."""
    requests = []
    for i in range(10):
        prompt = Spans([(draw.choice([1, 2]), 0, draw.choice([300, 900, 2000])), (100 + i, 0, draw.randint(1, 900))])
        requests.append(request(i, prompt, draw.choice([1, 5, 700, 1300]), arrival_ns=i * SECOND // 50))
    sizes = {
        "pool_tokens": BLOCK * draw.choice([24, 40, 400]),
        "chunked_prefill_tokens": draw.choice([576, 1024, 4096]),
    }
    settings = {"gpu": "h100", "tp": 4, "max_running_requests": 8, "host_cache": host_cache, **sizes}
    return small_aggregated(*requests, engine="vllm", model="qwen3-next-80b-a3b", aggregated=settings)


@examples(4)
@given(st.randoms(use_true_random=False), st.sampled_from([None, "2 GiB"]))
def test_many_steps_at_once_are_single_steps(draw, host_cache):
    many, _ = run_both_ways(crowd(draw, host_cache))
    assert {one.outcome for one in many.records.requests} == {"finished"}


def steps_of(traced):
    return [entry.returned[0] for entry in traced.journal if entry.call == "next_step"]


def loads_of(traced):
    all_commands = [entry.returned[1] for entry in traced.journal if entry.call == "next_step"]
    return [one for commands in all_commands for one in commands if isinstance(one, m.LoadBack)]


@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_a_pool_without_room_for_a_requests_states_is_refused_before_the_run(num_blocks):
    """The states of a request, and of its last forward, take three blocks each, and room for a step stays free."""
    settings = {"gpu": "h100", "tp": 4, "pool_tokens": num_blocks * BLOCK}
    one = small_aggregated(request(0, 500, 5), model="qwen3-next-80b-a3b", engine="vllm", aggregated=settings)
    if num_blocks == 9:
        assert [found.outcome for found in run(one).records.requests] == ["finished"]
        return
    room = f"{num_blocks * BLOCK} an instance has room for 0 beside its states, which take pages of {6 * BLOCK} tokens"
    with pytest.raises(ConfigError, match=room):
        run(one)
