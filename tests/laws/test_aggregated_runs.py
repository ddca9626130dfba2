"""Laws of whole aggregated runs, on random clusters and loads. docs/invariants.md lists them."""

from dataclasses import dataclass

import pytest
from hypothesis import given

from pdsim.core.invariants import check
from pdsim.core.journal.lines import from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.core.messages import PrefillChunk, Retracted
from pdsim.policy.protocols import HoldUntil, Pick
from pdsim.scenario.building.machines import state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from tests.strategies import aggregated_scenarios
from tests.support import Traced, chunks, decisions, examples, require_whole_gaps, run, run_both_ways


@given(aggregated_scenarios())
@examples(120)
def test_every_aggregated_request_ends_and_nothing_is_left_behind(scenario: Scenario):
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert [r.outcome for r in traced.records.requests] == ["finished"] * len(traced.cluster.requests)
    for instance in traced.cluster.instances:
        check(instance)
        assert instance.num_available_pages == instance.cache.pool.num_pages
        assert instance.waiting_for() == []


@given(aggregated_scenarios())
@examples(60)
def test_aggregated_stages_follow_each_other(scenario: Scenario):
    for r in run(scenario).records.requests:
        times = [
            r.arrival_ns,
            r.routed_ns,
            r.prefill_start_ns,
            r.prefill_end_ns,
            r.streamed_ns,
            r.first_token_ns,
            r.end_ns,
        ]
        assert times == sorted(times)
        assert r.prefill_start_ns < r.prefill_end_ns == r.streamed_ns == r.first_token_ns


def passes(traced: Traced) -> dict[int, list[list[PrefillChunk]]]:
    """The chunks of each request: once, and once more for each retraction."""
    found: dict[int, list[list[PrefillChunk]]] = {}
    for entry in traced.journal:
        if entry.call != "next_step":
            continue
        step, commands = entry.returned
        for command in commands:
            if isinstance(command, Retracted):
                found[command.request_id].append([])
        for chunk in chunks(step):
            found.setdefault(chunk.request_id, [[]])[-1].append(chunk)
    return found


@given(aggregated_scenarios())
@examples(60)
def test_each_token_is_computed_once_or_cached_but_after_a_retraction(scenario: Scenario):
    traced = run(scenario)
    computed = passes(traced)
    for r in traced.records.requests:
        assert len(computed[r.request_id]) == 1 + r.num_retractions
        lengths = []
        for taken in computed[r.request_id]:
            reached = taken[0].num_context_tokens
            for chunk in taken:
                assert chunk.num_context_tokens == reached
                reached += chunk.num_tokens
            assert [chunk.is_last for chunk in taken] == [False] * (len(taken) - 1) + [True]
            lengths.append(reached)
        assert lengths[0] == r.num_prompt_tokens
        assert lengths == sorted(set(lengths))
        assert lengths[-1] < r.num_prompt_tokens + r.num_output_tokens


@given(aggregated_scenarios())
@examples(60)
def test_each_output_token_takes_a_decode_step_or_ends_a_prompt(scenario: Scenario):
    records = run(scenario).records
    decoded = sum(step.num_tokens for step in records.steps if step.kind == "decode")
    prompts = sum(1 + r.num_retractions for r in records.requests)
    assert decoded + prompts == sum(r.num_output_tokens for r in records.requests)


@given(aggregated_scenarios())
@examples(60)
def test_gaps_between_tokens_add_up_to_the_time_after_the_first(scenario: Scenario):
    records = run(scenario).records
    require_whole_gaps(records)


@given(aggregated_scenarios())
@examples(150)
def test_many_aggregated_steps_at_once_are_single_steps(scenario: Scenario):
    many, single = run_both_ways(scenario)
    a, b = many.result.summary(), single.result.summary()
    for field in ("mean_itl_ms", "median_itl_ms", "p99_itl_ms", "std_itl_ms", "max_output_tokens_per_s"):
        assert a[field] == pytest.approx(b[field], abs=2e-6)


@dataclass
class OnTheBeat:
    """Begins prompts at whole multiples of a time only."""

    beat_ns: int

    def select(self, view):
        if view.now_ns % self.beat_ns:
            return HoldUntil(view.now_ns - view.now_ns % self.beat_ns + self.beat_ns)
        return [Pick(request.request_id) for request in view.waiting]


@given(aggregated_scenarios())
@examples(40)
def test_many_steps_are_single_steps_under_a_policy_that_holds_back(scenario: Scenario):
    aggregated = scenario.aggregated.model_copy(update={"policy": OnTheBeat(30_000_000)})
    scenario = scenario.model_copy(update={"aggregated": aggregated})
    many, single = run(scenario), run(scenario, single_steps=True)
    assert many.result.stall == []
    assert decisions(many.journal) == decisions(single.journal)
    assert many.records.requests == single.records.requests


@given(aggregated_scenarios())
@examples(60)
def test_an_aggregated_journal_replays_to_the_same_decisions(scenario: Scenario):
    traced = run(scenario)
    written = [to_line(entry) for entry in traced.journal]
    assert replay(from_lines(written), state_machines(resolve(scenario))) == len(traced.journal)


@given(aggregated_scenarios())
@examples(40)
def test_an_aggregated_instance_never_idles_while_a_request_waits(scenario: Scenario):
    for row in run(scenario, levels=True).records.levels:
        assert row.levels.num_running or not row.levels.num_queued
