"""A request's own gaps between tokens: those of all requests together are the gaps that a run counts."""

import pytest
from hypothesis import given

from pdsim.metrics.own_gaps import OwnGaps
from pdsim.metrics.summary import itl_samples
from pdsim.scenario.building.cluster import build
from pdsim.sim.simulation import Observation, Simulation
from tests.strategies import any_scenarios

NS_MS = 1.01e-6
"""A gap of a row of many steps is rounded to a ns."""


class Kept(OwnGaps):
    """Keeps the number of gaps of each finished request, and their sum."""

    def __init__(self):
        super().__init__()
        self.found = []

    def finished_ms(self, attempt, num_output_tokens):
        self._close(attempt)
        runs = self._gaps[attempt]
        gaps = [first + i * growth for first, growth, n, weight in runs for i in range(n) for _ in range(weight)]
        self.found.append(gaps[: num_output_tokens - 1])
        return super().finished_ms(attempt, num_output_tokens)


@given(any_scenarios())
def test_own_gaps_together_are_those_of_the_run(scenario):
    simulation = Simulation(build(scenario), Observation(own_itl=True))
    kept = simulation.recorder._own_gaps = Kept()
    result = simulation.run()
    requests = result.records.requests
    for one in requests:
        assert (one.outcome == "finished") == (len(one.own_itl_ms) > 0)
        assert list(one.own_itl_ms) == sorted(one.own_itl_ms)
    if all(one.outcome == "finished" and not one.num_retries for one in requests):
        gaps = itl_samples(result.records)
        assert sum(map(len, kept.found)) == gaps.count
        assert sum(map(sum, kept.found)) / 1e6 == pytest.approx(
            gaps.mean() * gaps.count, abs=NS_MS * max(1, gaps.count)
        )
        assert max((one.own_itl_ms[-1] for one in requests), default=0.0) == pytest.approx(gaps.max(), abs=NS_MS)
