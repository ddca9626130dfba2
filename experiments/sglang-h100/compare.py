"""Prints median errors of all arms with four costs: python experiments/sglang-h100/compare.py"""

from dataclasses import replace
from pathlib import Path
from statistics import median

from pdsim.calibration.case import compare_case, load_case
from pdsim.sim.simulation import simulate

COSTS = {
    "catalog alone": "cost={}",
    "scaled from H200": "cost={profile: profile-scaled.yaml}",
    "and this host": "cost={profile: profile-scaled.yaml, host: {slowdown: 2.3}}",
    "measured on these GPUs": "cost={profile: profile.yaml}",
}
"""The least forward takes 27.6 ms on this host (profile.yaml) and 11.8 ms on the one that was scaled from."""


def main() -> None:
    case = load_case(Path(__file__).parent)
    for name, cost in COSTS.items():
        arms = tuple(replace(arm, changes=(*arm.changes, cost)) for arm in case.arms)
        found = list(compare_case(replace(case, arms=arms), lambda scenario: simulate(scenario).summary()))
        errors = {metric: median(abs(arm.metrics[metric].error) for arm in found) for metric in found[0].metrics}
        print(f"{name}: {', '.join(f'{metric} {100 * error:.1f} %' for metric, error in errors.items())}")


if __name__ == "__main__":
    main()
