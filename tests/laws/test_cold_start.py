"""Each shape stalls once in each life of an instance, and many steps at once are single steps with stalls, too."""

from collections import defaultdict

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
shapes = st.sets(st.integers(1, 8), max_size=4)


def cold(scenario: Scenario, cold_start: dict[int, int]) -> Scenario:
    return scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"cold_start": cold_start})})


@given(clusters, shapes)
@examples(60)
def test_each_shape_stalls_once(scenario: Scenario, sizes: set[int]):
    traced = run(cold(scenario, dict.fromkeys(sizes, STALL_NS)))
    met = defaultdict(set)
    for step in traced.records.steps:
        if step.kind == "decode":
            shape = max((size for size in sizes if size <= step.num_requests), default=None)
            is_first = shape is not None and shape not in met[step.instance_id]
            assert (step.duration_ns > STALL_NS) == is_first
            met[step.instance_id].add(shape)


@given(clusters, shapes)
@examples(30)
def test_many_steps_at_once_are_single_steps_with_stalls(scenario: Scenario, sizes: set[int]):
    stalled = cold(scenario, dict.fromkeys(sizes, STALL_NS // 1_000_000))
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
    model = AffineModel(Affine())
    times = StepTimes(prefill=model, decode=model, cold_start={2: 7, 4: 9})
    assert [times.cold_ns(n) for n in (1, 3, 2, 8, 4)] == [0, 7, 0, 9, 0]
    times.restart()
    assert times.cold_ns(2) == 7
