"""No change within a run's band is called a cause, whatever the numbers are."""

from hypothesis import given
from hypothesis import strategies as st

from pdsim.sim.uncertainty.noise import JITTERS, Band, bands
from pdsim.sim.uncertainty.sensitivity import Sensitivity, limits, sensitivities
from tests.support import small

METRIC = "p99_ttft_ms"
TIMES = st.floats(1, 1e4)


@given(TIMES, st.lists(TIMES, min_size=1, max_size=5))
def test_a_band_holds_the_run_and_each_repetition(base, repeated):
    band = bands({METRIC: base}, [{METRIC: value} for value in repeated])[METRIC]
    assert band.least == min(base, *repeated)
    assert band.most == max(base, *repeated)


@given(TIMES, st.lists(TIMES, min_size=4, max_size=4), st.lists(TIMES, min_size=1, max_size=6))
def test_a_limit_is_never_within_the_band(base, repeated, changed):
    noise = bands({METRIC: base}, [{METRIC: value} for value in repeated])
    found = [Sensitivity(f"resource {i}", {METRIC: value / base - 1}, "", noise) for i, value in enumerate(changed)]
    (limit,) = limits(found)
    if limit.resource:
        assert abs(limit.change) > noise[METRIC].width
    if noise[METRIC].is_unstable:
        assert str(noise[METRIC]) in limit.unstable
        assert limit.resource or "unstable" in str(limit)


def test_one_lucky_run_has_no_cause_and_is_told():
    """2,101 ms, where messages that take 1 % more or less give 2,610."""
    noise = {METRIC: Band(2101, 2101, 2634)}
    (limit,) = limits([Sensitivity("messages", {METRIC: -0.05}, "network.message_latency", noise)])
    assert not limit.resource
    assert "unstable: 2,101 to 2,634 ms" in str(limit)


def test_each_sensitivity_has_the_noise_of_its_run():
    load = {"use": "random_lengths", "num_requests": 30, "input_tokens": 200, "output_tokens": 2}
    found = sensitivities(small(workload=load, client={"use": "closed_loop", "concurrency": 3}))
    assert len(JITTERS) > 1
    assert all(one.noise.keys() == one.changes.keys() for one in found)
    assert not any(band.is_unstable for band in found[0].noise.values()), "one instance of each role is steady"
