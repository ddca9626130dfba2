"""Whatever the cluster and the load, the timeline is one that Perfetto draws as it was meant."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.metrics.timeline import trace_events
from tests.strategies import (
    aggregated_scenarios,
    fault_schedules,
    optimistic_scenarios,
    scenarios,
    speculative_scenarios,
)
from tests.support import run
from tests.trace_check import problems

ANY = st.one_of(
    scenarios(),
    optimistic_scenarios(),
    aggregated_scenarios(),
    speculative_scenarios(),
    fault_schedules(st.one_of(scenarios(), aggregated_scenarios())),
)


@settings(max_examples=60)
@given(ANY)
def test_timelines_are_well_formed(scenario):
    assert problems(trace_events(run(scenario, levels=True).records)) == []
