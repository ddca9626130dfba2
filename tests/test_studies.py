"""Every study but decode-radix-b200, which test_cases.py has: each error that a study bounds is within its bound."""

from pathlib import Path

import pytest

from pdsim.calibration.case import find_cases
from pdsim.calibration.compare import compare_case
from pdsim.sim.simulation import simulate

STUDIES = [case for case in find_cases((), Path("experiments")) if case.name != "decode-radix-b200"]


@pytest.fixture(scope="module")
def report():
    known = {}

    def of(name):
        if name not in known:
            case = next(case for case in STUDIES if case.name == name)
            arms = compare_case(case, lambda scenario: simulate(scenario).summary())
            known[name] = {arm.arm: arm.metrics for arm in arms}
        return known[name]

    return of


@pytest.mark.parametrize("study", [case.name for case in STUDIES])
def test_every_bound_is_met(report, study):
    missed = {
        (arm, name): f"{metric.error:+.1%}, asked for {metric.within:.0%}"
        for arm, metrics in report(study).items()
        for name, metric in metrics.items()
        if not metric.is_met
    }
    assert not missed


LOADED = pytest.mark.xfail(
    reason="-12.0 % against -7.2 %: simulated transfers never slow a forward, and what does is not identifiable here",
    raises=AssertionError,
    strict=True,
)


@pytest.mark.parametrize(
    ("load", "measured"), [("3500-c1", -0.146), pytest.param("3500-rate", -0.072, marks=LOADED), ("16000-c1", -0.150)]
)
def test_what_sending_layer_by_layer_brings(report, load, measured):
    """Within 3 points of the published change of mean TTFT."""
    arms = report("layerwise-tcp")
    off, on = (arms[f"{way}-{load}"]["mean_ttft_ms"].simulated for way in ("off", "on"))
    assert on / off - 1 == pytest.approx(measured, abs=0.03)
