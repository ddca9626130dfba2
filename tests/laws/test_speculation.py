"""Laws of speculative decoding, on random clusters of both kinds. docs/invariants.md lists them."""

from itertools import islice
from math import ceil
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdsim.core.invariants import check
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import Verified
from pdsim.core.sequence import Spans
from pdsim.scenario.building.caches import kv_cache
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import layout_of, resolve, slots_of_request
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.speculation import DEFAULT_RUNNING
from pdsim.scenario.yaml_file import ConfigError
from pdsim.system.states import StateRule
from pdsim.workload.lengths import Acceptance, chain_probability
from tests.strategies import speculative_scenarios
from tests.support import decisions, examples, request, require_whole_gaps, run, small, small_aggregated


@given(speculative_scenarios())
@examples(100)
def test_every_speculative_request_ends_and_nothing_is_left_behind(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    for r in traced.records.requests:
        assert r.outcome == "finished" or "not fit" in r.reason
    for instance in traced.cluster.instances:
        check(instance)
        assert instance.num_available_pages == instance.cache.pool.num_pages


@given(speculative_scenarios())
@examples(60)
def test_a_step_gives_each_request_from_one_token_to_all_that_were_drafted(scenario: Scenario):
    traced = run(scenario)
    gained = [entry.args[1] for entry in traced.journal if entry.call == "on_step_done"]
    for result in gained:
        if isinstance(result, Verified):
            assert all(1 <= n <= scenario.acceptance.draft_tokens for n in result.num_tokens)
    finished = [r for r in traced.records.requests if r.outcome == "finished"]
    assume(len(finished) == len(traced.records.requests))
    by_prompts = sum(1 + (r.num_retractions if r.is_aggregated else 0) for r in finished)
    decoded = sum(step.num_tokens for step in traced.records.steps if step.kind == "decode")
    assert decoded + by_prompts == sum(r.num_output_tokens for r in finished)


@given(speculative_scenarios())
@examples(60)
def test_speculative_gaps_between_tokens_add_up_to_the_time_after_the_first(scenario: Scenario):
    records = run(scenario).records
    finished = [r for r in records.requests if r.outcome == "finished"]
    assume(len(finished) == len(records.requests))
    require_whole_gaps(records)


@given(speculative_scenarios())
@examples(40)
def test_a_speculative_journal_replays_and_does_not_depend_on_how_steps_are_run(scenario: Scenario):
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    written = [to_line(entry) for entry in many.journal]
    assert replay(from_lines(written), state_machines(resolve(scenario))) == len(many.journal)


def test_a_request_that_is_retracted_before_its_first_step_makes_no_token_more():
    """Requests fill the pool with prompts; there is no page for the drafts of all of them."""
    specs = [request(i, 4, 8) for i in range(6)]
    scenario = small_aggregated(
        *specs,
        page_size=1,
        aggregated__pool_tokens=40,
        aggregated__schedule_conservativeness=0.01,
        aggregated__radix_cache=False,
        aggregated__speculative_draft_tokens=4,
        aggregated__speculative_accept_length=1,
    )
    records = run(scenario).records
    assert any(r.num_retractions for r in records.requests)
    decoded = sum(step.num_tokens for step in records.steps if step.kind == "decode")
    assert decoded + sum(1 + r.num_retractions for r in records.requests) == 6 * 8


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8))
@examples(30)
def test_what_accepts_no_draft_is_decoding_without_drafts(sizes: list[tuple[int, int]]):
    """Where pages are plenty and a step costs the same."""
    specs = [request(i, prompt, output) for i, (prompt, output) in enumerate(sizes)]
    none = {"decode__speculative_draft_tokens": 3, "decode__speculative_accept_length": 1}
    none |= {"decode__speculative_draft_layers": 0}
    assert run(small(*specs, **none)).records.requests == run(small(*specs)).records.requests


LAYERS = 28
"""Those of the model of `small`."""
drafting = {"decode__speculative_draft_tokens": 4, "decode__speculative_accept_length": 2}


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 3))
@examples(30)
def test_kv_of_drafts_is_sent_beside_the_models(prompts: list[int], num_draft_layers: int):
    """For each layer as many bytes, in as many descriptors."""
    specs = [request(i, prompt, 9) for i, prompt in enumerate(prompts)]
    plain = run(small(*specs)).records.requests
    drafts = run(small(*specs, **drafting, decode__speculative_draft_layers=num_draft_layers)).records.requests
    for one, other in zip(plain, drafts, strict=True):
        assert other.transfer_bytes * LAYERS == one.transfer_bytes * (LAYERS + num_draft_layers)


ALGORITHMS = ["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DSPARK", "NGRAM"]
MODELS = ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen3.5-35b-a3b", "llama-3.1-70b", "gpt-oss-120b"]


@given(
    st.sampled_from(MODELS),
    st.sampled_from(["h100", "b200", "h20"]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, *ALGORITHMS]),
    st.sampled_from([None, 16, 200]),
    st.booleans(),
)
@examples(150)
def test_weights_states_and_kv_of_model_and_draft_fit_the_gpu(model, gpu, tp, algorithm, running, radix_cache):
    settings = {"speculative_draft_tokens": 4, "speculative_accept_length": 2, "speculative_algorithm": algorithm}
    settings |= {"STANDALONE": {"speculative_draft_model": "qwen3-0.6b"}}.get(algorithm, {})
    settings |= {"DSPARK": {"speculative_draft_layers": 5}}.get(algorithm, {})
    settings |= {"gpu": gpu, "tp": tp, "pool_tokens": None, "max_running_requests": running}
    sides = {"prefill": {"gpu": gpu, "tp": tp, "radix_cache": radix_cache}, "decode": settings}
    try:
        plain = resolve(small(request(0, 9, 9), model=model, **sides | {"decode": {"gpu": gpu, "tp": tp}}))
        drafts = resolve(small(request(0, 9, 9), model=model, **sides))
    except ConfigError:
        return
    for role, one, other in zip(("prefill", "decode"), plain.pair, drafts.pair, strict=True):
        layout = layout_of(drafts, role)
        slots = slots_of_request(drafts, other)
        verified = 4 if role == "decode" else 0
        states = other.max_running_requests * (slots + verified) * layout.state_bytes
        whole, window = layout.token_bytes("sglang")
        kept_bytes = whole + 0.8 * window
        used = other.pool_tokens * kept_bytes + layout.weight_bytes_per_rank + states
        assert used <= layout.gpu.memory_bytes * other.mem_fraction
        if layout.draft is not None and one.mem_fraction == other.mem_fraction and not layout.state_bytes:
            spared = (one.pool_tokens - other.pool_tokens) * kept_bytes
            assert spared >= layout.draft.own_bytes / tp - layout.kv_token_bytes
        assert other.max_running_requests <= (running if running and role == "decode" else DEFAULT_RUNNING)


@given(
    st.sampled_from(MODELS[:4]),
    st.sampled_from([None, *ALGORITHMS[:3]]),
    st.integers(2, 7),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
@examples(150)
def test_more_draft_steps_never_make_a_step_shorter(model, algorithm, num_tokens, batch, num_kv_tokens):
    def step_ns(tokens: int | None) -> int:
        drafts = {"speculative_accept_length": 1, "speculative_algorithm": algorithm} if tokens else {}
        decode = {"gpu": "h200", "tp": 8, "speculative_num_steps": tokens and tokens - 1, **drafts}
        sides = {"prefill": {"gpu": "h200", "tp": 8}, "decode": {**decode, "max_running_requests": 300}}
        line = build(small(request(0, 9, 9), model=model, cost="kernels", **sides)).costs["decode-0"].decode_line(batch)
        return line.base + (line.per_context_token + line.per_distinct_token) * num_kv_tokens

    if algorithm == "NEXTN" and "qwen3-" in model:
        return  # it has no such layers
    assert step_ns(None) < step_ns(num_tokens) < step_ns(num_tokens + 1)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
)
@examples(40)
def test_decodes_radix_cache_spares_the_drafts_kv_too(turns, page_size: int, num_draft_layers: int):
    """Prompts with common beginnings, one after another: what decode has of one is neither sent nor computed again.

    A token's key is the pair of it and the next, so the last common token is not found.
    """
    specs = [
        request(i, Spans([(stream, 0, shared), (100 + i, 0, 3)]), output, arrival_ns=i * 10**10)
        for i, (stream, shared, output) in enumerate(turns)
    ]
    changes = {"decode__radix_cache": True, "decode__speculative_draft_layers": num_draft_layers, **drafting}
    records = run(small(*specs, page_size=page_size, **changes)).records.requests
    token_bytes = 2 * 8 * 128 * 2 * (LAYERS + num_draft_layers)  # keys and values of 8 heads of 128 in bf16
    longest: dict[int, int] = {}
    for (stream, shared, _), found in zip(turns, records, strict=True):
        common = min(shared, longest.get(stream, 0))
        cached = max(0, common - 1) // page_size * page_size
        assert found.num_decode_cached_tokens == cached
        assert found.transfer_bytes == (ceil((shared + 3) / page_size) * page_size - cached) * token_bytes
        longest[stream] = max(shared, longest.get(stream, 0))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=6),
    st.sampled_from([1, 4, 16]),
)
@examples(20)
def test_a_hybrid_model_sends_the_state_and_the_suffix_of_model_and_draft(turns, page_size: int):
    """10 of the layers of Qwen3.5-35B-A3B, and one of the draft, have KV: 2 heads of 256 for keys and for values."""
    specs = [
        request(i, Spans([(stream, 0, shared), (100 + i, 0, 3)]), output, arrival_ns=i * 10**10)
        for i, (stream, shared, output) in enumerate(turns)
    ]
    changes = {"decode__radix_cache": True, "model": "qwen3.5-35b-a3b", "page_size": page_size, **drafting}
    scenario = small(*specs, **changes)
    token_bytes, state_bytes = 2 * 2 * 256 * 2 * (10 + 1), layout_of(scenario, "decode").state_bytes
    for (_, shared, _), found in zip(turns, run(scenario).records.requests, strict=True):
        suffix = ceil((shared + 3) / page_size) * page_size - found.num_decode_cached_tokens
        assert found.transfer_bytes == suffix * token_bytes + state_bytes
    tree = kv_cache(resolve(scenario), "prefill").prefix_cache
    assert tree is not None
    assert not tree.has_drafts  # a token's key is the token alone, where states decide


@pytest.mark.parametrize(
    ("version", "changes", "slots"),
    [
        ("0.5.23", {}, 5),
        ("0.5.23", {"mamba_radix_cache_strategy": "no_buffer"}, 3),
        ("0.5.12", {}, 3),
        ("0.5.12", {"mamba_radix_cache_strategy": "extra_buffer"}, 5),
        ("0.5.23", {"overlap": False}, 4),
        ("0.5.23", {"radix_cache": False}, 1),
    ],
)
def test_a_hybrid_request_has_the_slots_of_its_strategy(version, changes, slots):
    """MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO, and get_mamba_tracking_slots with and without overlap."""
    scenario = small_aggregated(request(0, 9, 9), model="qwen3.5-35b-a3b", engine_version=version)
    aggregated = scenario.aggregated.model_copy(update={"overlap": True, **changes})
    assert slots_of_request(scenario, aggregated) == slots


def test_each_verified_token_of_a_running_hybrid_request_has_a_state():
    """Of 100 states and 80 of KV as large: (47.4 - 1 - 4) // (1 + 4 / 5) slots, as many requests as a fifth of them."""
    rule = StateRule(slots_per_request=5, num_verified=4, max_running=48)
    assert rule.memory(room=100, state_bytes=1) == (23, 23 + 1 + (23 // 5 + 1) * 4)
    assert StateRule(slots_per_request=5).memory(room=100, state_bytes=1) == (46, 47)


def test_without_a_prefix_cache_there_are_as_many_states_as_requests_run():
    rule = StateRule(slots_per_request=1, num_verified=4, max_running=7, is_fixed=True)
    assert rule.memory(room=100, state_bytes=1) == (7, 8 + 8 * 4)


@given(st.integers(2, 200), st.integers(2, 6))
@examples(40)
def test_a_request_alone_takes_the_steps_that_its_acceptance_says(output: int, accepted: int):
    traced = run(
        small(
            request(0, 10, output),
            decode__speculative_draft_tokens=accepted,
            decode__speculative_accept_length=accepted,
            decode__speculative_drafting="2 ms",
        )
    )
    (r,), num_steps = traced.records.requests, ceil((output - 1) / accepted)
    assert r.end_ns - r.first_token_ns == num_steps * 12_000_000
    assert traced.result.summary()["accept_length"] == pytest.approx((output - 1) / num_steps)


@given(st.integers(2, 16), st.floats(0.01, 0.99))
def test_a_chain_accepts_its_length_in_the_mean(draft_tokens: int, share: float):
    length = 1 + share * (draft_tokens - 1)
    p = chain_probability(draft_tokens, length)
    assert sum(p**k for k in range(draft_tokens)) == pytest.approx(length)


def test_draws_have_the_mean_that_was_asked_for():
    drawn = list(islice(Acceptance(draft_tokens=4, accept_length=2.8).stream(Random(1)), 20_000))
    assert sum(drawn) / len(drawn) == pytest.approx(2.8, rel=0.02)
    assert set(drawn) == {1, 2, 3, 4}
