"""Laws of stream_interval: tokens reach a client in groups, and neither the first token nor the end waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.own_gaps import OwnGaps
from pdsim.scenario.building.cluster import build
from pdsim.sim.simulation import Observation, Simulation, simulate
from tests.strategies import any_scenarios
from tests.support import request, small, small_aggregated

NS = 1.01
"""A gap of a row of many steps is rounded to a ns."""


class Kept(OwnGaps):
    """Keeps the steps of each finished request: times in ns and numbers of tokens."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def finished_ms(self, attempt, num_output_tokens):
        self._close(attempt)
        runs, left = self._gaps[attempt], num_output_tokens - 1
        for first, growth, length, weight in runs:
            steps = [(weight * (first + i * growth), weight) for i in range(min(length, left // weight))]
            self.steps += steps
            left -= weight * len(steps)
        self.steps.append(None)
        return super().finished_ms(attempt, num_output_tokens)


def groups_of(steps, interval):
    """Groups of one request's steps, token by token: times and numbers of tokens."""
    groups, time_ns, unsent = [], 0.0, 0
    for step_ns, num_tokens in steps:
        time_ns, unsent = time_ns + step_ns, unsent + num_tokens
        if unsent >= interval:
            groups.append((time_ns, unsent))
            time_ns, unsent = 0.0, 0
    return [*groups, *([(time_ns, unsent)] if unsent else [])]


def with_interval(scenario, interval):
    role = "decode" if scenario.aggregated is None else "aggregated"
    servers = getattr(scenario, role).model_copy(update={"stream_interval": interval})
    return scenario.model_copy(update={role: servers})


@given(any_scenarios(), st.integers(2, 12))
def test_tokens_come_in_groups_and_nothing_else_changes(scenario, interval):
    simulation = Simulation(build(scenario), Observation(own_itl=True))
    kept = simulation.recorder._own_gaps = Kept()
    before, after = simulation.run().records, simulate(with_interval(scenario, interval)).records
    for request_before, request_after in zip(before.requests, after.requests, strict=True):
        request_before.own_itl_ms = ()
        assert request_before == request_after
    assert before.token_groups is None
    found = [(first + i * growth, n) for first, growth, length, n in after.token_groups for i in range(length)]
    expected, steps = [], []
    for step in kept.steps:
        if step is not None:
            steps.append(step)
            continue
        expected += groups_of(steps, interval)
        steps = []
    assert [n for _, n in found] == [n for _, n in expected]
    assert [time_ns for time_ns, _ in found] == pytest.approx([time_ns for time_ns, _ in expected], abs=NS * interval)


@pytest.mark.parametrize("cluster", [small, small_aggregated])
@pytest.mark.parametrize("num_tokens", [1, 2, 6, 8, 31])
def test_a_group_of_five_takes_five_steps_and_the_end_does_not_wait(cluster, num_tokens):
    """Steps take 10 ms. The first token is alone; of the others, the last (n - 1) mod 5 come at the end."""
    role = "decode" if cluster is small else "aggregated"
    plain, scenario = (cluster(request(0, 8, num_tokens), **{f"{role}__stream_interval": k}) for k in (1, 5))
    (whole,), result = simulate(plain).records.requests, simulate(scenario, Observation(own_itl=True))
    (found,), summary = result.records.requests, result.summary()
    assert (found.first_token_ns, found.end_ns) == (whole.first_token_ns, whole.end_ns)
    num_groups, rest = divmod(num_tokens - 1, 5)
    longest_ms = 50.0 if num_groups else 10.0 * rest
    assert found.own_itl_ms[-1] == pytest.approx(longest_ms)
    if num_tokens == 1:
        assert summary["pdsim"]["mean_inter_chunk_latency_ms"] is None
        return
    mean_ms = 10.0 * (num_tokens - 1) / (num_groups + (rest > 0))
    assert summary["pdsim"]["mean_inter_chunk_latency_ms"] == pytest.approx(mean_ms)
    assert (summary["mean_itl_ms"], summary["max_itl_ms"]) == (pytest.approx(10.0), pytest.approx(10.0))


def test_a_pause_is_spread_over_the_tokens_of_its_group():
    """A prompt of 64 tokens takes 64 ms beside a decoding request, whose other steps take 10 ms."""
    specs = request(0, 8, 21), request(1, 64, 1, arrival_ns=100_000_000)
    plain, scenario = (small_aggregated(*specs, aggregated__stream_interval=k) for k in (1, 5))
    longest_ms = simulate(plain).summary()["max_itl_ms"]
    assert longest_ms == pytest.approx(74.0)
    summary = simulate(scenario).summary()
    assert summary["max_itl_ms"] == pytest.approx((longest_ms + 4 * 10.0) / 5)
    assert summary["pdsim"]["p99_inter_chunk_latency_ms"] <= longest_ms + 4 * 10.0
    assert "p99_inter_chunk_latency_ms" not in simulate(plain).summary()["pdsim"]
