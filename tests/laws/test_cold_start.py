"""Steps of several requests stall by their number in an instance's life, and many steps at once are single steps."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdsim.cost.affine import AffineModel
from pdsim.cost.settings import Affine
from pdsim.cost.step_times import StepTimes
from pdsim.scenario.schema import Scenario
from tests.strategies import aggregated_scenarios, scenarios
from tests.support import decisions, examples, run

STALL_NS = 1_000_000_000_000
"""Longer than any step."""
clusters = st.one_of(scenarios(), aggregated_scenarios())
ordinals = st.sets(st.integers(1, 30), max_size=4)


def cold(scenario: Scenario, cold_start: dict[int, int]) -> Scenario:
    return scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"cold_start": cold_start})})


@given(clusters, ordinals)
@examples(60)
def test_each_ordinal_stalls_once(scenario: Scenario, chosen: set[int]):
    traced = run(cold(scenario, dict.fromkeys(chosen, STALL_NS)))
    with_prompts = {(step.instance_id, step.start_ns) for step in traced.records.steps if step.kind != "decode"}
    before = Counter()
    for step in traced.records.steps:
        is_mixed = (step.instance_id, step.start_ns) in with_prompts
        if step.kind == "decode" and step.num_requests > 1 and not is_mixed:
            numbers = range(before[step.instance_id] + 1, before[step.instance_id] + step.num_steps + 1)
            stalled = [number for number in numbers if number in chosen]
            assert len(stalled) == step.duration_ns // STALL_NS
            assert not stalled or step.num_steps == 1
            before[step.instance_id] += step.num_steps
        else:
            assert step.duration_ns < STALL_NS


@given(clusters, ordinals)
@examples(30)
def test_many_steps_at_once_are_single_steps_with_stalls(scenario: Scenario, chosen: set[int]):
    stalled = cold(scenario, dict.fromkeys(chosen, STALL_NS // 1_000_000))
    many, single = run(stalled), run(stalled, single_steps=True)
    assert decisions(many.journal) == decisions(single.journal)
    assert many.records.requests == single.records.requests


@given(clusters)
@examples(30)
def test_what_no_step_reaches_changes_nothing(scenario: Scenario):
    warm, unmet = run(scenario), run(cold(scenario, {1_000_000: STALL_NS}))
    assert warm.journal == unmet.journal
    assert warm.records.requests == unmet.records.requests


def test_an_instance_that_is_restarted_is_cold_again():
    model = AffineModel(Affine(decode_base_ns=1e-9))
    times = StepTimes(prefill=model, decode=model, cold_start={1: 7, 4: 9})
    assert times.next_stall(2) == (0, 7)
    times.count_steps(2, 1)
    times.count_steps(1, 5)
    assert times.next_stall(8) == (2, 9)
    times.restart()
    assert times.next_stall(3) == (0, 7)
