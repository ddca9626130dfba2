"""Laws of distributions of lengths: their moments, their bounds, and a scenario that gives them back."""

from random import Random
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdsim.scenario.sections.component import build_component, describe_component
from pdsim.workload.histogram import Empirical
from pdsim.workload.lengths import Exponential, Fixed, GammaLengths, Lengths, Lognormal, Mixed
from pdsim.workload.trace_file import TraceError

NUM = 20_000


def drawn(lengths, seed=0, num=NUM):
    sample = lengths.sampler(Random(seed))
    return [sample() for _ in range(num)]


@pytest.mark.parametrize("kind", [Lognormal, GammaLengths])
@pytest.mark.parametrize(("mean", "spread"), [(6000, 3000), (250, 250), (900, 90)])
def test_mean_and_deviation_are_those_asked_for(kind, mean, spread):
    found = drawn(kind(mean, spread))
    assert fmean(found) == pytest.approx(mean, rel=0.03)
    assert stdev(found) == pytest.approx(spread, rel=0.06)


def test_exponential_lengths_deviate_by_their_mean():
    found = drawn(Exponential(400))
    assert fmean(found) == pytest.approx(400, rel=0.03)
    assert stdev(found) == pytest.approx(400, rel=0.03)


@given(
    st.sampled_from([Lognormal(50, 80, 60), GammaLengths(50, 80, 60), Exponential(50, 60), Exponential(0.1)]),
    st.integers(0, 99),
)
def test_lengths_lie_between_one_and_the_most(lengths, seed):
    found = drawn(lengths, seed, 50)
    assert min(found) >= 1
    assert lengths.most is None or max(found) <= lengths.most


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any))
def test_mixed_lengths_have_their_shares(shares):
    found = drawn(Mixed(tuple(Fixed(10**i) for i in range(len(shares))), tuple(shares)), num=3000)
    for i, share in enumerate(shares):
        assert found.count(10**i) / len(found) == pytest.approx(share / sum(shares), abs=0.05)


def test_empirical_lengths_are_as_frequent_as_in_the_file(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens,count\n100,3\n4000,1\n9,0\n")
    found = drawn(Empirical(file))
    assert set(found) == {100, 4000}
    assert found.count(100) / NUM == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens,count\n1,-1\n", "count is '-1'"),
        ("tokens,count\n0,1\n", "at least 1"),
        ("tokens,count\n4,0\n", "no requests in this histogram"),
        ("length\n4\n", "no field 'tokens'"),
    ],
)
def test_a_wrong_histogram_is_named_with_its_line(tmp_path, text, says):
    file = tmp_path / "lengths.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=says):
        Empirical(file).sampler(Random(0))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"use": "mixed", "parts": [10], "shares": [1, 2]}, "a share for each part"),
        ({"use": "lognormal", "mean": 0, "stddev": 1}, "mean > 0"),
        ({"use": "gamma_lengths", "mean": 5, "stddev": 0}, "stddev > 0"),
        ({"use": "exponential", "mean": 5, "most": 0}, "most >= 1"),
    ],
)
def test_impossible_lengths_are_refused(tmp_path, spec, says):
    with pytest.raises(ValueError, match=says):
        build_component(Lengths, spec, tmp_path)


def test_a_scenario_gives_back_the_lengths_that_it_was_given(tmp_path):
    part = {"use": "lognormal", "mean": 6000.0, "stddev": 3000.0, "most": 20000}
    spec = {"use": "mixed", "parts": [part, {"use": "exponential", "mean": 40.0, "most": None}], "shares": [3.0, 1.0]}
    made = build_component(Lengths, spec, tmp_path)
    assert made == Mixed((Lognormal(6000, 3000, 20_000), Exponential(40)), (3, 1))
    assert build_component(Lengths, describe_component(made), tmp_path) == made
