"""Percentiles and means against numpy on everything written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.metrics.distribution import RunSamples, Samples

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)
runs = st.lists(
    st.tuples(st.floats(0, 1000), st.sampled_from([0.0, 0.25, 3.0]), st.integers(1, 30), st.integers(0, 5)),
    min_size=1,
    max_size=12,
).filter(lambda found: any(weight for *_, weight in found))
PERCENTS = (0, 1, 50, 90, 99, 100)


@given(values)
def test_samples_are_numpys(values):
    samples = Samples(values)
    assert samples.mean() == pytest.approx(np.mean(values), abs=1e-6)
    assert samples.std() == pytest.approx(np.std(values), abs=1e-3)
    for percent in PERCENTS:
        assert samples.percentile(percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


@given(runs)
def test_runs_are_what_they_stand_for(runs):
    written_out = [first + growth * i for first, growth, n, weight in runs for i in range(n) for _ in range(weight)]
    samples = RunSamples(runs)
    assert samples.count == len(written_out)
    assert samples.mean() == pytest.approx(np.mean(written_out))
    assert samples.std() == pytest.approx(np.std(written_out), abs=1e-6)
    assert samples.max() == pytest.approx(max(written_out))
    for percent in PERCENTS:
        assert samples.percentile(percent) == pytest.approx(np.percentile(written_out, percent))


def test_nothing_is_zero():
    assert Samples([]).percentile(50) == RunSamples([]).percentile(50) == Samples([]).std() == RunSamples([]).std() == 0
