"""Fits cost settings to the measured metrics of one arm of a case. Needs the `calibrate` extra (scipy)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import exp, log
from typing import Any

from pdsim.calibration.validate.case import MeasuredArm, MeasuredCase, Simulate, simulated_metrics
from pdsim.scenario.profile import reached
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import to_yaml

DEFAULT_WITHIN = 0.1

Settings = Callable[[Mapping[str, float]], tuple[str, ...]]
"""A function from parameter values to changes of the scenario, as --set takes them."""


@dataclass(frozen=True)
class Fit:
    values: dict[str, float]
    cost: float
    """Half the sum of squared errors, each divided by what the study asks for."""
    num_simulations: int
    metrics: tuple[str, ...]


def fit_arm(
    case: MeasuredCase,
    arm: MeasuredArm,
    start: Mapping[str, float],
    settings: Settings,
    simulate: Simulate,
    *,
    skip: tuple[str, ...] = (),
) -> Fit:
    """Least squares over relative errors, in the logarithms of the parameters: they stay positive, and steps are
    relative. Metrics in `skip` follow from others and would count twice.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415  an extra

    measured = {name: value for name, value in arm.measured.items() if name not in skip}

    def values(logs: Any) -> dict[str, float]:
        return {name: exp(x) for name, x in zip(start, logs, strict=True)}

    def residuals(logs: Any) -> list[float]:
        simulated = simulated_metrics(case, arm, simulate, settings(values(logs)))
        return [(simulated[n] / v - 1) / arm.within.get(n, DEFAULT_WITHIN) for n, v in measured.items()]

    # A run is a step function of its parameters: differences are taken over steps wide enough to see a slope.
    found = least_squares(residuals, [log(x) for x in start.values()], diff_step=0.06, xtol=1e-3, max_nfev=20)
    return Fit(
        values(found.x), float(found.cost), int(found.nfev) * (len(start) + 1) * len(case.seeds), tuple(measured)
    )


def fitted_profile(
    name: str,
    case: MeasuredCase,
    arm: MeasuredArm,
    fit: Fit,
    cost: Mapping[str, Any],
    command: str,
    *,
    run: Callable[[Scenario], Any],
) -> dict[str, Any]:
    """A profile file's content: the cost settings, what they were fitted on, and where they come from.

    run: simulates, the driver's part. Sizes of its steps stand for those of the measured run, which tells means alone.
    """
    scenarios = [case.scenario(arm, seed, (f"cost={to_yaml(cost)}",)) for seed in case.seeds]
    sizes = reached(step for scenario in scenarios for step in run(scenario).records.steps)
    ranges = {name: list(extremes) for name, extremes in sizes.items()}
    measured = {**scenarios[0].setup.model_dump(mode="json"), **ranges, "outside": "extend"}
    return {
        "name": name,
        "cost": {**cost, "measured": measured},
        "provenance": {
            "fitted_on": f"{case.name}, arm {arm.name}: {', '.join(fit.metrics)}",
            "seeds": list(case.seeds),
            "cost_of_fit": round(fit.cost, 4),
            "simulations": fit.num_simulations,
            "command": command,
            "date": datetime.now(UTC).date().isoformat(),
            "pdsim": version("pdsim"),
        },
    }
