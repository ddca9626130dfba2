"""Prefill forwards of the runs beside their simulation, by the tokens that they compute: python forwards.py"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pdsim.calibration.validate.suite import load_suite
from pdsim.metrics.records import StepRecord
from pdsim.metrics.run_folder import read_records
from pdsim.sim.simulation import simulate

HERE = Path(__file__).parent
_BOUNDS = (0, 512, 1024, 2048, 8192)
_FEWEST = 5
"""Forwards that a cell stands for, in the run and in its simulation."""


def us_per_token(forwards: Sequence[StepRecord]) -> float:
    return sum(step.duration_ns for step in forwards) / 1e3 / sum(step.num_tokens for step in forwards)


def cell(measured: Sequence[StepRecord], simulated: Sequence[StepRecord], least: int, most: int) -> str:
    """Time of a token, measured over simulated, in forwards of more than `least` and at most `most` tokens."""
    real, expected = (
        [step for step in steps if step.kind == "prefill" and least < step.num_tokens <= most]
        for steps in (measured, simulated)
    )
    if min(len(real), len(expected)) < _FEWEST:
        return ""
    return f"{us_per_token(real) / us_per_token(expected) - 1:+.0%} of {len(real)}"


def main() -> None:
    suite = load_suite(str(HERE / "matrix.yaml"), HERE.parent)
    print("| variant | " + " | ".join(f"{least + 1:,} to {most:,}" for least, most in pairwise(_BOUNDS)) + " |")
    print("|---" * len(_BOUNDS) + "|")
    for variant in suite.variants:
        measured = read_records(suite.runs / variant.name).steps
        simulated = simulate(suite.scenario(variant)).records.steps
        cells = [cell(measured, simulated, least, most) for least, most in pairwise(_BOUNDS)]
        print(f"| `{variant.name}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
