"""Laws of whole runs, on random clusters and loads. docs/invariants.md lists them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdsim.core.invariants import check
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import PrefillStep
from pdsim.core.transfer.receiver import Receiver
from pdsim.metrics.explanation.stages import stage_ms
from pdsim.metrics.journal_blocks import entries_in, to_block
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.strategies import optimistic_scenarios, scenarios, vllm_scenarios
from tests.support import Traced, examples, run, run_both_ways

clusters = st.one_of(scenarios(), optimistic_scenarios(), vllm_scenarios())


def finished(traced: Traced):
    return [r for r in traced.records.requests if r.outcome == "finished"]


@given(clusters)
@examples(120)
def test_every_request_ends_and_nothing_is_left_behind(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)
    for r in traced.records.requests:
        assert r.outcome == "finished" or (r.outcome == "failed" and "not fit" in r.reason)
    for agent in traced.cluster.agents:
        assert not isinstance(agent, Receiver) or agent.ring.num_live_bytes == 0
    for instance in traced.cluster.instances:
        check(instance)
        assert instance.num_available_pages == instance.cache.pool.num_pages
        assert instance.waiting_for() == []


@given(scenarios())
@examples(60)
def test_stages_follow_each_other(scenario: Scenario):
    for r in finished(run(scenario)):
        times = [
            r.arrival_ns,
            r.admitted_ns,
            r.prefill_start_ns,
            r.prefill_end_ns,
            r.transfer_end_ns,
            r.first_token_ns,
            r.end_ns,
        ]
        assert times == sorted(times)
        assert r.admitted_ns < r.transfer_start_ns < r.transfer_end_ns


@given(optimistic_scenarios())
@examples(60)
def test_optimistic_stages_follow_each_other_and_are_the_latency(scenario: Scenario):
    for r in finished(run(scenario)):
        assert r.routed_ns <= r.prefill_start_ns <= r.prefill_end_ns <= r.transfer_end_ns <= r.first_token_ns
        assert r.routed_ns <= r.admitted_ns < r.transfer_start_ns
        if scenario.decode.allocation == "prefill_complete":
            assert r.admitted_ns > r.prefill_end_ns
        stages = stage_ms(r)
        assert min(stages.values()) >= 0
        assert sum(stages.values()) == pytest.approx((r.end_ns - r.arrival_ns) / 1e6)


@given(clusters)
@examples(60)
def test_what_is_sent_is_what_decode_lacks(scenario: Scenario):
    traced = run(scenario)
    page = scenario.page_size
    page_bytes = 57_344 * 2 * page  # qwen3-0.6b: 28 layers, 8 KV heads of 128, keys and values in bf16
    for r in finished(traced):
        num_pages = -(-r.num_prompt_tokens // page) - r.num_decode_cached_tokens // page
        assert r.transfer_bytes == num_pages * page_bytes
        units = [t for t in traced.records.transfers if t.request_id == r.request_id]
        assert [t.is_last for t in units] == [False] * (len(units) - 1) + [True]
        assert all(t.num_pages for t in units[:-1])


@given(scenarios())
@examples(60)
def test_each_prompt_token_is_computed_once_or_cached(scenario: Scenario):
    traced = run(scenario)
    computed: dict[int, list[tuple[int, int]]] = {}
    for entry in traced.journal:
        if entry.call == "next_step" and isinstance(entry.returned[0], PrefillStep):
            for chunk in entry.returned[0].chunks:
                computed.setdefault(chunk.request_id, []).append((chunk.num_context_tokens, chunk.num_tokens))
    for r in finished(traced):
        reached = r.num_prefill_cached_tokens
        for context, num_tokens in computed[r.request_id]:
            assert context == reached
            assert num_tokens > 0
            reached += num_tokens
        assert reached == r.num_prompt_tokens


@given(clusters)
@examples(60)
def test_each_output_token_takes_one_decode_step(scenario: Scenario):
    traced = run(scenario)
    assume(len(finished(traced)) == len(traced.records.requests))
    tokens = sum(step.num_tokens for step in traced.records.steps if step.kind == "decode")
    if scenario.engine == "vllm":  # the forward that computes a preempted request again gives a token
        tokens += sum(r.num_retractions for r in traced.records.requests)
    assert tokens == sum(r.num_output_tokens - 1 for r in traced.records.requests)


@given(clusters)
@examples(150)
def test_many_steps_at_once_are_single_steps(scenario: Scenario):
    many, single = run_both_ways(scenario)
    a, b = many.result.summary(), single.result.summary()
    for field in ("mean_itl_ms", "median_itl_ms", "p99_itl_ms", "std_itl_ms", "max_output_tokens_per_s"):
        assert a[field] == pytest.approx(b[field], abs=2e-6)


@given(clusters)
@examples(60)
def test_a_journal_replays_to_the_same_decisions(scenario: Scenario):
    traced = run(scenario)
    written = [to_line(entry) for entry in traced.journal]
    assert replay(from_lines(written), state_machines(resolve(scenario))) == len(traced.journal)
    assert [to_line(entry) for entry in entries_in(to_block(traced.journal))] == written


@given(clusters)
@examples(40)
def test_work_is_conserved(scenario: Scenario):
    """An instance waits only if nothing can start: no batch, and the head of its queue lacks pages or slots."""
    traced = run(scenario, levels=True)
    for row in traced.records.levels:
        idle = row.levels.num_running == 0
        if idle and row.levels.num_queued and row.instance_id.startswith("decode"):
            assert row.levels.blocked_by in {"pages", "slots"}
