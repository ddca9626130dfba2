"""Prints median and largest errors with four costs, and retractions: python experiments/sglang-h100/compare.py"""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from pdsim.calibration.validate.case import MeasuredCase, compare_case, load_case
from pdsim.sim.simulation import simulate

HERE = Path(__file__).parent
COSTS = {
    "catalog alone": "cost={}",
    "scaled from H200": "cost={profile: profile-scaled.yaml}",
    "and this host": "cost={profile: profile-scaled.yaml, host: {slowdown: 2.3}}",
    "measured on these GPUs": "cost={profile: profile.yaml}",
}
"""The least forward takes 27.6 ms on this host (profile.yaml) and 11.8 ms on the one that was scaled from."""
STALL_MS = 100, 500
"""Shorter gaps are steps; a longer one lies between two loads."""


def main() -> None:
    case = load_case(HERE)
    for name, cost in COSTS.items():
        print(f"{name}: {', '.join(errors(case, cost))}")
    retracting = next(arm for arm in case.arms if arm.name == "retract")
    summary = simulate(case.scenario(retracting, seed=0)).summary()["pdsim"]
    print(f"retractions simulated: {summary['retractions']}, {summary['retraction_copies_s']:.2f} s of copies")
    print("stalls of decode, ms:", *(f"{ms:.0f}" for ms in stalls_ms()))


def errors(case: MeasuredCase, cost: str) -> Iterator[str]:
    """Median of the absolute errors of each metric, and the largest."""
    arms = tuple(replace(arm, changes=(*arm.changes, cost)) for arm in case.arms)
    found = list(compare_case(replace(case, arms=arms), lambda scenario: simulate(scenario).summary()))
    for metric in found[0].metrics:
        by_arm = {arm.arm: arm.metrics[metric].error for arm in found}
        worst = max(by_arm, key=lambda name: abs(by_arm[name]))
        middle = median(map(abs, by_arm.values()))
        yield f"{metric} {middle:.1%} ({worst} {by_arm[worst]:+.1%})"


def stalls_ms() -> Iterator[float]:
    """Times between the ends of two decode steps that are far longer than a step."""
    with gzip.open(HERE / "data" / "steps_retract.csv.gz", "rt", encoding="utf-8") as file:
        steps = [row for row in csv.DictReader(file) if int(row["num_decode"]) > 1]
    for before, after in pairwise(steps):
        gap_ms = 1e3 * (float(after["end_unix_s"]) - float(before["end_unix_s"]))
        if STALL_MS[0] < gap_ms < STALL_MS[1]:
            yield gap_ms


if __name__ == "__main__":
    main()
