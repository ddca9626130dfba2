"""Fit the profile of this study to its baseline arm, and to nothing else: python experiments/decode-radix-b200/fit.py

Two numbers are fitted: how much of the nominal prefill compute is reached, and how much of the memory bandwidth decode
attention reaches with fp8 KV. All other settings are the roofline's defaults. The two prefill efficiencies keep the
ratio that kernel tables give for B200 (attention 0.40, matrices 0.71), for one measured arm cannot tell them apart.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.validate.case import fit_arm, fitted_profile, load_case
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"matrix_efficiency": 0.71, "fp8_kv_bandwidth": 0.45}
ATTENTION_TO_MATRIX = 0.40 / 0.71


def cost(values: Mapping[str, float]) -> dict[str, object]:
    matrix = round(values["matrix_efficiency"], 4)
    return {
        "use": "roofline",
        "matrix_efficiency": matrix,
        "attention_efficiency": round(matrix * ATTENTION_TO_MATRIX, 4),
        "fp8_kv_bandwidth": round(values["fp8_kv_bandwidth"], 4),
    }


def main() -> None:
    case = load_case(HERE)
    baseline = next(arm for arm in case.arms if arm.fitted)
    fit = fit_arm(
        case,
        baseline,
        START,
        lambda values: (f"cost={to_yaml(cost(values))}",),
        lambda scenario: simulate(scenario).summary(),
        skip=("output_throughput", "duration"),
    )
    command = "python experiments/decode-radix-b200/fit.py"
    profile = fitted_profile("qwen3-32b-b200-tp2", case, baseline, fit, cost(fit.values), command, run=simulate)
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))


if __name__ == "__main__":
    main()
