"""Fit this study to its main arm, and to nothing else: python experiments/incremental-h20/fit.py

Two numbers are fitted: how much of the memory bandwidth decode attention reaches, and how many tokens of KV a decode
instance holds, which the pull request does not state, nor the variant of the GPU. The rest are the roofline's defaults.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.validate.case import fit_arm, fitted_profile, load_case
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"kv_bandwidth": 0.36, "pool_tokens": 580_000.0}
LEFT_OUT = ("output_throughput", "duration", "concurrency", "p99_ttft_ms", "p99_itl_ms")
"""Follow from others, or are tails."""


def cost(values: Mapping[str, float]) -> dict[str, object]:
    return {"use": "roofline", "kv_bandwidth": round(values["kv_bandwidth"], 4)}


def settings(values: Mapping[str, float]) -> tuple[str, ...]:
    return (f"cost={to_yaml(cost(values))}", f"decode.pool_tokens={round(values['pool_tokens'])}")


def main() -> None:
    case = load_case(HERE)
    arm = next(arm for arm in case.arms if arm.fitted)
    fit = fit_arm(case, arm, START, settings, lambda scenario: simulate(scenario).summary(), skip=LEFT_OUT)
    command = "python experiments/incremental-h20/fit.py"
    profile = fitted_profile("minimax-m2.5-h20-tp4", case, arm, fit, cost(fit.values), command, run=simulate)
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))
    print(f"for scenario.yaml: decode.pool_tokens {round(fit.values['pool_tokens'])}")


if __name__ == "__main__":
    main()
