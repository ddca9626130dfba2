"""Fit this study to one deployment, and to nothing else: python experiments/vllm-rtx/fit.py

Two numbers: how much of the nominal rates matrix products reach, and decode attention. What is not fitted is the
roofline's default, but for the host: vLLM's schedule overlaps and its graphs span prefill, so no forward waits for it.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.case import load_case
from pdsim.calibration.fit import fit_arm, fitted_profile
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"matrix_efficiency": 0.7, "kv_bandwidth": 0.85}
LEFT_OUT = ("output_throughput", "p99_ttft_ms", "p99_tpot_ms")
"""Follow from others, or are tails."""


def cost(values: Mapping[str, float]) -> dict[str, object]:
    fitted = {name: round(value, 3) for name, value in values.items()}
    return {"use": "roofline", **fitted, "prompt_overhead": "0 ns", "prefill_layer": "32 us"}


def settings(values: Mapping[str, float]) -> tuple[str, ...]:
    return (f"cost={to_yaml(cost(values))}",)


def main() -> None:
    case = load_case(HERE)
    arm = next(arm for arm in case.arms if arm.fitted)
    fit = fit_arm(case, arm, START, settings, lambda scenario: simulate(scenario).summary(), skip=LEFT_OUT)
    command = "python experiments/vllm-rtx/fit.py"
    profile = fitted_profile("llama-3.1-8b-rtx-pro-6000", case, arm, fit, cost(fit.values), command)
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))


if __name__ == "__main__":
    main()
