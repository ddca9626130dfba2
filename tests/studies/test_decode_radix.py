"""Published measurements against simulation, through the command that prints them."""

from pathlib import Path

import pytest

from pdsim.calibration.validate.case import load_case
from tests.studies.reports import report

CASE = load_case(Path("experiments/decode-radix-b200"))

FITTED = {"request_throughput": 0.03, "output_throughput": 0.03, "duration": 0.03}
"""Largest relative error of the arm that the profile was fitted to; 0.10 for every other metric."""

PREDICTED = {"request_throughput": 0.08, "mean_itl_ms": 0.15, "median_e2e_latency_ms": 0.15, "median_ttft_ms": 0.30}
"""Of the arms that nothing was fitted to."""

BOUNDS = {
    (arm.name, metric): within
    for arm in CASE.arms
    for metric, within in (dict.fromkeys(arm.measured, 0.10) | FITTED if arm.fitted else PREDICTED).items()
}

MISSED = {
    ("radix", "median_ttft_ms"): "with pages to spare, a simulated prompt waits for little but its own forward; "
    "no stage of the model has the other seconds"
}


def with_reason(arm, metric):
    why = MISSED.get((arm, metric))
    return pytest.param(arm, metric, marks=pytest.mark.xfail(reason=why, raises=AssertionError) if why else ())


@pytest.mark.parametrize(("arm", "metric"), [with_reason(*key) for key in BOUNDS])
def test_an_error_is_within_its_bound(arm, metric):
    found = report(CASE.name)[arm]["metrics"][metric]
    assert abs(found["error"]) <= BOUNDS[arm, metric], f"{found['simulated']:g}, measured {found['measured']:g}"


def test_the_report_has_every_measured_metric():
    found = report(CASE.name)
    assert [(name, arm["case"], arm["fitted"]) for name, arm in found.items()] == [
        ("baseline", CASE.name, True),
        ("radix", CASE.name, False),
        ("radix-64", CASE.name, False),
    ]
    for arm in CASE.arms:
        metrics = found[arm.name]["metrics"]
        assert {name: metric["measured"] for name, metric in metrics.items()} == arm.measured
        for metric in metrics.values():
            assert metric["error"] == pytest.approx(metric["simulated"] / metric["measured"] - 1)


def test_the_case_asks_for_no_less_than_the_bounds():
    """What `pdsim validate` prints as met or missed."""
    asked = {(arm.name, metric): within for arm in CASE.arms for metric, within in arm.within.items()}
    assert all(asked[key] <= within for key, within in BOUNDS.items())
