"""Laws of prompts that the decode instance computes itself."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import Arrival, DecodeStep, FirstToken, NewRequest
from pdsim.core.sequence import Spans
from pdsim.metrics.summary import itl_samples
from pdsim.policy.routing import LengthAndQueue, PrefixBased
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.strategies import fault_schedules, vllm_scenarios
from tests.support import MILLISECOND, chunks, decisions, examples, request, run, small

VLLM = {"engine": "vllm"}


@st.composite
def hybrid(draw: st.DrawFn) -> Scenario:
    scenario = draw(vllm_scenarios())
    policy = draw(
        st.one_of(
            st.builds(PrefixBased, non_cached_tokens=st.sampled_from([0, 10, 30, 60])),
            st.builds(
                LengthAndQueue,
                max_local_prefill_length=st.sampled_from([0, 20, 50]),
                max_prefill_queue_size=st.integers(1, 3),
            ),
        )
    )
    router = scenario.router.model_copy(update={"disaggregation": policy})
    return scenario.model_copy(update={"router": router})


@given(hybrid())
@examples(100)
def test_every_prompt_is_computed_once_by_prefill_or_by_decode(scenario: Scenario):
    """A preempted request is computed again; nothing is lost, and nobody has a token twice."""
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    requests = {r.request_id: r for r in traced.records.requests}
    computed: Counter[tuple[int, bool]] = Counter()
    first_tokens: Counter[int] = Counter()
    for entry in traced.journal:
        if entry.call == "on_step_done":
            on_decode = entry.instance_id.startswith("decode")
            computed.update((chunk.request_id, on_decode) for chunk in chunks(entry.args[0]) if chunk.is_last)
        if entry.call in ("on_step_done", "next_step"):
            commands = entry.returned[1] if entry.call == "next_step" else entry.returned
            first_tokens.update(c.request_id for c in commands if isinstance(c, FirstToken))
    for r in requests.values():
        if r.outcome != "finished":
            assert "not fit" in r.reason
            continue
        is_local = r.prefill_id == r.decode_id
        assert computed[r.request_id, False] == (not is_local)
        assert computed[r.request_id, True] == is_local + r.num_retractions
        assert first_tokens[r.request_id] == 1
        assert (r.transfer_bytes == 0) if is_local else r.transfer_end_ns is not None
    for instance in traced.cluster.instances:
        assert instance.num_available_pages == instance.cache.pool.num_pages


@given(hybrid())
@examples(60)
def test_every_output_has_all_its_tokens_and_gaps_add_up(scenario: Scenario):
    traced = run(scenario)
    if any(r.outcome != "finished" for r in traced.records.requests):
        return
    gaps = itl_samples(traced.records)
    assert gaps.count == sum(r.num_output_tokens - 1 for r in traced.records.requests)
    whole_ms = sum(r.end_ns - r.first_token_ns for r in traced.records.requests) / 1e6
    assert gaps.mean() * gaps.count == pytest.approx(whole_ms)


@given(hybrid())
@examples(60)
def test_many_steps_at_once_are_single_steps_and_runs_replay(scenario: Scenario):
    many, single = run(scenario), run(scenario, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    entries = list(from_lines(map(to_line, many.journal)))
    assert replay(entries, state_machines(resolve(scenario))) == len(entries)


@given(fault_schedules(hybrid()))
@examples(60)
def test_nothing_leaks_when_things_go_wrong(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)


def where(traced) -> list[bool]:
    """Whether each request was sent to prefill."""
    sent = {
        e.args[0].request_id: command.message
        for e in traced.journal
        if e.instance_id == "router" and isinstance(e.args[0], Arrival)
        for command in e.returned
        if isinstance(command.message, NewRequest)
    }
    return [new.prefill_id.startswith("prefill") for new in sent.values()]


def test_llm_ds_rule_counts_what_decode_has_not_seen():
    """The second prompt goes on from the first; the third has as many tokens, and shares none."""
    first = request(0, 128, 2)  # remembered in pages of 64
    second = request(1, first.prompt.then(Spans.of(7, 40)), 2, arrival_ns=1000 * MILLISECOND)
    third = request(2, 168, 2, arrival_ns=2000 * MILLISECOND)
    at = {"router": {"disaggregation": {"use": "prefix_based", "non_cached_tokens": 41}}}
    assert where(run(small(first, second, third, **at, **VLLM))) == [True, False, True]
    at["router"]["disaggregation"]["non_cached_tokens"] = 40
    assert where(run(small(first, second, third, **at, **VLLM))) == [True, True, True]


def test_dynamos_rule_keeps_short_prompts_and_all_while_prefill_is_behind():
    load = [request(i, tokens, 2, arrival_ns=i * MILLISECOND) for i, tokens in enumerate([50, 200, 200, 200, 200])]
    at = {"use": "length_and_queue", "max_local_prefill_length": 50, "max_prefill_queue_size": 2}
    assert where(run(small(*load, router={"disaggregation": at}, **VLLM))) == [False, True, True, True, False]


def test_a_prompt_that_stays_on_decode_takes_its_forward_and_two_messages():
    traced = run(
        small(request(0, 50, 3), router={"disaggregation": {"use": "prefix_based", "non_cached_tokens": 51}}, **VLLM)
    )
    (r,) = traced.records.requests
    assert r.first_token_ns == (1 + 50) * MILLISECOND  # 1 ms from the router, 1 ms a token
    assert r.end_ns == r.first_token_ns + 2 * 10 * MILLISECOND
    assert [e.args[0].step_id for e in traced.journal if e.call == "on_step_done" and isinstance(e.args[0], DecodeStep)]
