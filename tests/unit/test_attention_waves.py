"""Decode attention in waves, beside a queue of thread blocks; and prefixes that are shared within a wave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.decode.running_batch import RunningBatch, RunningRequest
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.memory.radix_cache import PagePool, RadixCache
from pdsim.core.messages import DecodeStep
from pdsim.core.sequence import Spans
from pdsim.cost.model import FRACTION_BITS, DecodeLine
from pdsim.cost.step_times import AttentionWaves
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.scenario.building.cluster import build
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from tests.support import decisions, request, run, small

READ_NS = 33.9
H200 = AttentionWaves(num_sms=132, num_heads=8, token_ns=297, merge_ns=95_000)
ANY = st.builds(AttentionWaves, st.integers(1, 200), st.integers(1, 16), st.floats(1, 1000), st.floats(0, 1e5))


def step_ns(waves: AttentionWaves, batch: int, length: int, distinct: float = 1) -> float:
    line = waves.line(batch, DecodeLine.of_ns(0, 0, READ_NS))
    tokens = batch * length
    return (line.base + line.per_context_token * tokens + line.per_distinct_token * distinct * tokens) / (
        1 << FRACTION_BITS
    )


@given(ANY, st.integers(1, 80), st.integers(1, 10**6))
def test_steps_take_what_their_waves_take_one_after_another(waves, batch, length):
    num_splits = waves.num_splits(batch)
    blocks = [length / num_splits] * (batch * waves.num_heads * num_splits)
    taken_ns = waves.merging_ns(batch)
    while blocks:
        wave, blocks = blocks[: waves.num_sms], blocks[waves.num_sms :]
        taken_ns += max(sum(wave) * READ_NS / waves.num_heads, wave[0] * waves.token_ns)
    assert step_ns(waves, batch, length) == pytest.approx(taken_ns, rel=1e-5, abs=1)


@given(ANY, st.integers(1, 80), st.floats(0, 1))
def test_sharing_saves_reading_and_no_time_of_sms(waves, batch, distinct):
    alone, shared, least = (step_ns(waves, batch, 1000, share) for share in (1, distinct, 0))
    num_splits = waves.num_splits(batch)
    num_waves = -(-batch * waves.num_heads * num_splits // waves.num_sms)
    assert least == pytest.approx(waves.merging_ns(batch) + num_waves * waves.token_ns * 1000 / num_splits, rel=1e-4)
    assert shared == pytest.approx(least + distinct * (alone - least), rel=1e-4, abs=1)


def test_a_step_jumps_where_heads_pass_a_multiple_of_the_sms():
    """Batches of the H200 study at which measured steps jump: 16.5 requests are a wave."""
    times = [step_ns(H200, batch, 13_000) for batch in range(16, 70)]
    growths = {batch: after - before for batch, before, after in zip(range(16, 69), times, times[1:], strict=False)}
    jumps = [batch for batch, growth in growths.items() if growth > 2e6]
    assert jumps == [16, 33, 49, 66]


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 80))
def test_contexts_are_split_until_blocks_and_a_tenth_more_fill_the_sms(num_sms, num_heads, batch):
    """FlashAttention-3's heuristic, with its margin of a tenth."""
    filled = [splits for splits in range(1, 1000) if 11 * batch * num_heads * splits >= 10 * num_sms]
    assert AttentionWaves(num_sms, num_heads, 1).num_splits(batch) == filled[0]


prompts = st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 9))
"""Whose prefix, how much of it, and how much of their own."""


def join(batch: RunningBatch[RunningRequest], cache: KvCache, prompts: list[tuple[int, int, int]]) -> dict[int, int]:
    """Tokens of each prompt."""
    running = {}
    for i, (prefix, num_shared, num_own) in enumerate(prompts):
        prompt = Spans([(prefix, 0, num_shared), (100 + i, 0, num_own)] if num_shared else [(100 + i, 0, num_own)])
        request = RunningRequest(i, 0, prompt, len(prompt), max_output_tokens=1000, num_output_tokens=1)
        request.lease = cache.open(prompt, len(prompt))
        cache.grow(request.lease, -(-(len(prompt) + 1) // cache.page_size) - len(request.lease.table))
        cache.checkpoint(request.lease, prompt, len(prompt))
        batch.join(request)
        running[i] = len(prompt)
    return running


def num_distinct_tokens(batch, page_size: int, running: dict[int, int], gpu: tuple[int, int]) -> int:
    """Tokens that a step reads: each page once in every wave, and what lies behind the last whole page."""
    num_sms, num_heads = gpu
    tables = [batch.lease(i).table[: num_tokens // page_size] for i, num_tokens in running.items()]
    waves: dict[int, set[int]] = {}
    for at, table in enumerate(tables):
        waves.setdefault(at * num_heads // num_sms, set()).update(table)
    num_own_tokens = sum(n + 1 - page_size * len(table) for n, table in zip(running.values(), tables, strict=True))
    return num_own_tokens + page_size * sum(map(len, waves.values()))


@given(
    st.integers(1, 3),
    st.lists(prompts, min_size=1, max_size=20),
    st.tuples(st.integers(16, 150), st.integers(1, 16)),
    st.data(),
)
def test_a_prefix_is_read_once_in_each_wave(page_size, prompts, gpu, data):
    pool = PagePool(1000)
    cache = KvCache(pool, page_size, RadixCache(pool, page_size, LeastRecentlyUsed()))
    batch: RunningBatch[RunningRequest] = RunningBatch(cache, gpu[0] / gpu[1])
    running = join(batch, cache, prompts)
    gone = data.draw(st.sets(st.sampled_from(sorted(running)), max_size=len(running) - 1))
    batch.step(1)
    for i in gone:
        batch.end(i, Spans.of(500 + i, 1))
        del running[i]
    assert batch.step(1).num_distinct_tokens == num_distinct_tokens(batch, page_size, running, gpu)


@given(st.lists(st.integers(0, 3), min_size=64, max_size=80), st.sampled_from([(7, 3), (46, 21), (58, 14), (72, 28)]))
def test_waves_end_at_whole_requests_where_floats_do_not(prefixes, gpu):
    """27 waves of 7 / 3 requests are 63; in floats they are a little more."""
    pool = PagePool(1000)
    cache = KvCache(pool, 1, RadixCache(pool, 1, LeastRecentlyUsed()))
    batch: RunningBatch[RunningRequest] = RunningBatch(cache, gpu[0] / gpu[1])
    running = join(batch, cache, [(prefix, 5, 1) for prefix in prefixes])
    assert batch.step(1).num_distinct_tokens == num_distinct_tokens(batch, 1, running, gpu)


def scenario(**changes: object) -> Scenario:
    waves = {"prefill": "roofline", "decode": LINES, "attention_sm_bandwidth": "64 GB/s", "attention_merge": "2.5 us"}
    return small(request(0, 10, 10), cost=waves, **changes)


LINES = {"use": "affine", "decode_base": "1 ms", "decode_per_distinct_token": "34 ns"}


def test_waves_follow_from_model_and_gpu():
    cluster = build(scenario(model="qwen3-8b", decode__gpu="h200", decode__tp=2))
    waves = AttentionWaves(132, 4, 1e9 * 36 * 512 / 64e9, 36 * 2500)
    assert cluster.costs["decode-0"].waves == waves
    decode = next(instance for instance in cluster.instances if instance.instance_id == "decode-0")
    assert decode.batch._wave_requests == waves.num_requests == 33
    times = cluster.costs["decode-0"]
    line = times.decode_line(40)
    total_ns = (line.base + (line.per_context_token + line.per_distinct_token) * 9000) / (1 << FRACTION_BITS)
    assert sum(times.decode_terms(40, 9000, 9000).values()) == pytest.approx(total_ns)


def test_many_steps_at_once_are_the_same_steps_one_by_one():
    """With prefixes that are shared in waves of 16.5 requests, of which 40 run."""
    requests = [request(i, Spans([(i % 3, 0, 32), (100 + i, 0, 8)]), 20 + i % 30) for i in range(60)]
    costs = {
        "prefill": {"use": "affine", "prefill_per_token": "1 us"},
        "decode": LINES,
        "attention_sm_bandwidth": "1 GB/s",
    }
    shared = small(*requests, model="qwen3-8b", cost=costs, decode__gpu="h200", decode__radix_cache=True)
    many, single = run(shared), run(shared, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    steps = [step for entry in many.journal if entry.call == "next_step" for step in [entry.returned[0]]]
    decoded = [step for step in steps if isinstance(step, DecodeStep) and step.num_requests > 33]
    assert decoded
    once = [step.num_context_tokens - 32 * (step.num_requests - 3) for step in decoded]
    assert any(step.num_distinct_tokens > tokens for step, tokens in zip(decoded, once, strict=True))


@pytest.mark.parametrize(
    ("model", "gpu", "wrong"),
    [
        ("deepseek-v3", "b200", "deepseek-v3 has latent KV"),
        ("qwen3-8b", "rtx-4090", "has no num_sms of rtx-4090"),
    ],
)
def test_waves_need_heads_and_sms(model, gpu, wrong):
    with pytest.raises(ConfigError, match=wrong):
        build(scenario(model=model, prefill__gpu=gpu, decode__gpu=gpu, prefill__tp=8, decode__tp=8))
