"""Fit this study to one deployment, and to nothing else: python experiments/vllm-rtx/fit.py

Two numbers: how much of the nominal rates matrix products reach, and decode attention. What is not fitted is the
roofline's default, but for the host: vLLM's schedule overlaps and its graphs span prefill, so no forward waits for it.
"""

from collections.abc import Mapping
from pathlib import Path

from pdsim import simulate
from pdsim.calibration.validate.case import fit_arm, fitted_profile, load_case
from pdsim.scenario.yaml_file import to_yaml, write_yaml

HERE = Path(__file__).parent
START = {"matrix_efficiency": 0.7, "kv_bandwidth": 0.85}
REDUCE = {
    "prefill": {"all_reduce": "17 us", "link_efficiency": 0.288},
    "decode": {"all_reduce": "19 us", "link_efficiency": 0.118},
}
"""Two RTX PRO 6000 over PCIe, by tables of aiconfigurator 0.12.0, not fitted here. Beyond 8 MiB, as in prefill, vLLM
takes NCCL: 17 us + bytes at 18.4 of 64 GB/s. Below it has its own, which in 0.19 takes 19 us + bytes at 7.5 GB/s."""
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
    profile = fitted_profile("llama-3.1-8b-rtx-pro-6000", case, arm, fit, cost(fit.values), command, run=simulate)
    write_yaml(profile, HERE / "profile.yaml")
    print(to_yaml(profile))
    two_gpus = {role: {**cost(fit.values), **reduce} for role, reduce in REDUCE.items()}
    source = "rtx_pro_6000_server of aiconfigurator 0.12.0 (Apache-2.0): nccl/2.29.2 and vllm/0.19.0, two GPUs"
    write_yaml(
        {
            "name": "qwen3-32b-rtx-pro-6000-tp2",
            "cost": {**two_gpus, "measured": profile["cost"]["measured"]},
            "provenance": {**profile["provenance"], "all_reduce, link_efficiency": source},
        },
        HERE / "profile-tp2.yaml",
    )


if __name__ == "__main__":
    main()
