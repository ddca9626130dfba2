"""Fit this study to one row of each GPU, and to nothing else: python experiments/inferencex-tp/fit.py

Two numbers of each: what a layer of a decode step takes beyond its bytes; and, on GB200, what a request takes outside
the GPU, on B200, where that stays, what prefill reaches of nominal compute. A row has two numbers too, so that the
fitted arms are met by construction. The rest are the roofline's defaults.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.validate.case import MeasuredArm, MeasuredCase, fit_arm, fitted_profile, load_case
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {
    "gb200": {"decode_layer_us": 60.0, "latency_in_ms": 200.0},
    "b200": {"decode_layer_us": 60.0, "matrix_efficiency": 0.4},
}
PROFILES = {"gb200": "profile.yaml", "b200": "profile-b200.yaml"}


def cost(values: Mapping[str, float]) -> dict[str, object]:
    reached = {key: round(value, 3) for key, value in values.items() if key == "matrix_efficiency"}
    return {"use": "roofline", **reached, "decode_layer": f"{values['decode_layer_us']:.1f} us"}


def settings(values: Mapping[str, float]) -> tuple[str, ...]:
    outside = (f"front_end.latency_in={values['latency_in_ms']:.0f} ms",) if "latency_in_ms" in values else ()
    return (f"cost={to_yaml(cost(values))}", *outside)


def fit(case: MeasuredCase, arm: MeasuredArm) -> None:
    gpu = arm.name.split("-")[0]
    found = fit_arm(case, arm, START[gpu], settings, lambda scenario: simulate(scenario).summary())
    command = "python experiments/inferencex-tp/fit.py"
    profile = fitted_profile(f"deepseek-r1-{gpu}", case, arm, found, cost(found.values), command, run=simulate)
    write_yaml(profile, HERE / PROFILES[gpu])
    print(to_yaml(profile))
    if "latency_in_ms" in found.values:
        print(f"for scenario.yaml: front_end.latency_in {found.values['latency_in_ms']:.0f} ms")


def main() -> None:
    case = load_case(HERE)
    for arm in case.arms:
        if arm.fitted:
            fit(case, arm)


if __name__ == "__main__":
    main()
