"""Whatever the cluster and the load, the timeline is one that Perfetto draws as it was meant."""

from hypothesis import given, settings

from pdsim.metrics.timeline import trace_events
from tests.strategies import any_scenarios
from tests.support import run
from tests.trace_check import problems


@settings(max_examples=60)
@given(any_scenarios())
def test_timelines_are_well_formed(scenario):
    assert problems(trace_events(run(scenario, levels=True).records)) == []
