"""Fit this study to one row, and to nothing else: python experiments/inferencex-tp/fit.py

Two numbers: what a layer of a decode step takes beyond its bytes, and what a request takes outside the GPU. A row has
two numbers too, so that the fitted arm is met by construction. The rest are the roofline's defaults.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.case import load_case
from pdsim.calibration.fit import fit_arm, fitted_profile
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"decode_layer_us": 60.0, "latency_in_ms": 200.0}


def cost(values: Mapping[str, float]) -> dict[str, object]:
    return {"use": "roofline", "decode_layer": f"{values['decode_layer_us']:.1f} us"}


def settings(values: Mapping[str, float]) -> tuple[str, ...]:
    return (f"cost={to_yaml(cost(values))}", f"front_end.latency_in={values['latency_in_ms']:.0f} ms")


def main() -> None:
    case = load_case(HERE)
    arm = next(arm for arm in case.arms if arm.fitted)
    fit = fit_arm(case, arm, START, settings, lambda scenario: simulate(scenario).summary())
    command = "python experiments/inferencex-tp/fit.py"
    profile = fitted_profile("deepseek-r1-gb200-tp4", case, arm, fit, cost(fit.values), command)
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))
    print(f"for scenario.yaml: front_end.latency_in {fit.values['latency_in_ms']:.0f} ms")


if __name__ == "__main__":
    main()
