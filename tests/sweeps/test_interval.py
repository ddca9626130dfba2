"""Confidence intervals against SciPy."""

import pytest

from pdsim.study.points.estimate import Estimate, estimate, quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 29, 120])
def test_quantiles_are_those_of_student(degrees):
    stats = pytest.importorskip("scipy.stats")
    assert quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-7)


def test_an_interval_is_that_of_a_t_test():
    stats = pytest.importorskip("scipy.stats")
    values = [3.0, 4.5, 5.0, 3.5]
    low, high = stats.t.interval(0.95, 3, loc=4.0, scale=stats.sem(values))
    assert estimate(values) == pytest.approx((4.0, (high - low) / 2))


def test_one_replication_has_no_interval():
    assert estimate([3.0]) == (3.0, None)


@pytest.mark.parametrize(
    ("mean", "half_width", "is_told_apart"),
    [
        (1.1, 0.2, False),
        (0.9, 0.2, False),
        (1.1, 0.05, True),
        (1.03, None, True),
        (0.99, None, False),
        (1.01, 0.0, False),
    ],
)
def test_a_ratio_is_told_apart_from_1_by_its_interval_or_by_2_percent(mean, half_width, is_told_apart):
    assert Estimate(mean, half_width).is_told_apart == is_told_apart
