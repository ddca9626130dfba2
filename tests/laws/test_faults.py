"""Laws of runs in which things go wrong: random clusters and loads, random faults. docs/invariants.md lists them.

PDSIM_EXAMPLES=100 runs 10,000 fault schedules.
"""

from functools import partial

from hypothesis import assume, given
from hypothesis import strategies as st

from pdsim.core.journal.lines import digest, from_lines, to_line
from pdsim.core.journal.replay import replay
from pdsim.scenario.building.machines import restarted, state_machines
from pdsim.scenario.building.sizing import resolve
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sections.faults import HealthSettings
from tests.strategies import aggregated_scenarios, fault_schedules, optimistic_scenarios, scenarios, vllm_scenarios
from tests.support import examples, run, run_both_ways

early = st.one_of(fault_schedules(scenarios()), fault_schedules(aggregated_scenarios()))
schedules = st.one_of(early, fault_schedules(optimistic_scenarios()), fault_schedules(vllm_scenarios()))


@given(schedules)
@examples(150)
def test_no_request_is_lost_and_nothing_leaks(scenario: Scenario):
    """At the end of every run the simulator checks LEAK-1 to LEAK-6 of all that live: see Simulation.result."""
    traced = run(scenario, checked=True)
    assert traced.result.stall == []
    assert len(traced.records.requests) == len(traced.cluster.requests)
    for r in traced.records.requests:
        assert r.outcome == "finished" or (r.outcome == "failed" and r.reason)
        assert r.num_retries <= scenario.health.max_retries


@given(schedules)
@examples(40)
def test_many_steps_at_once_are_single_steps_with_faults(scenario: Scenario):
    many, single = run_both_ways(scenario)
    tokens = [sum(step.num_tokens for step in traced.records.steps) for traced in (many, single)]
    assert tokens[0] == tokens[1]


@given(schedules)
@examples(30)
def test_a_journal_with_restarts_replays_to_the_same_decisions(scenario: Scenario):
    traced = run(scenario)
    again = [to_line(entry) for entry in traced.journal]
    resolved = resolve(scenario)
    killed = sum(entry.call == "killed" for entry in traced.journal)
    assert replay(from_lines(again), state_machines(resolved), partial(restarted, resolved)) == len(again) - killed


@given(schedules)
@examples(20)
def test_the_same_faults_give_the_same_journal(scenario: Scenario):
    assert digest(run(scenario).journal) == digest(run(scenario).journal)


@given(early)
@examples(30)
def test_stages_of_the_last_attempt_follow_each_other(scenario: Scenario):
    for r in run(scenario).records.requests:
        if r.outcome == "finished":
            times = [r.arrival_ns, r.routed_ns, r.admitted_ns, r.prefill_start_ns, r.prefill_end_ns]
            times += [r.transfer_end_ns, r.streamed_ns, r.first_token_ns, r.end_ns]
            passed = [time for time in times if time is not None]
            assert passed == sorted(passed)
            assert len(passed) == len(times) - 2 * r.is_aggregated  # it admits and sends nothing


@given(st.one_of(scenarios(), aggregated_scenarios(), optimistic_scenarios(), vllm_scenarios()))
@examples(30)
def test_watching_changes_nothing_where_nothing_goes_wrong(scenario: Scenario):
    watched = run(scenario.model_copy(update={"health": HealthSettings(waiting_timeout="1 h", transfer_timeout="1 h")}))
    alone = run(scenario)
    assume(not alone.result.stall)  # parked optimistic prompts may hold the pages that a granted prompt lacks
    assert watched.records.requests == alone.records.requests
    assert watched.records.transfers == alone.records.transfers
    assert watched.records.steps == alone.records.steps
