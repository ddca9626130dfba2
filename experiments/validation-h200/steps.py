"""Durations of steps in real runs beside the fitted profile's: python experiments/validation-h200/steps.py RUN ...

A run is a folder in the data of a study, whose suite says the variant's scenario and profile. Medians over steps, by
kind, without the first two of an instance: they load kernels."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from pdsim.calibration.validate.suite import load_suite
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.step_times import StepTimes
from pdsim.metrics.records import StepRecord
from pdsim.metrics.run_folder import read_records
from pdsim.scenario.building.cluster import build
from pdsim.scenario.schema import Scenario

NUM_COLD_STEPS = 2


def main() -> None:
    print("| run | kind | steps | first step, ms | median, ms | profile, ms | profile / measured |")
    print("|---|---|---|---|---|---|---|")
    for folder in map(Path, sys.argv[1:]):
        scenario = scenario_of(folder)
        costs = build(scenario).costs  # of a GPU that has rested
        steps: dict[str, list[StepRecord]] = defaultdict(list)
        for step in read_records(folder).steps:
            steps[step.kind].append(step)
        for kind, rows in steps.items():
            warm = rows[NUM_COLD_STEPS:]
            pairs = [(row.duration_ns / row.num_steps / 1e6, predicted_ns(costs, row) / 1e6) for row in warm]
            measured, predicted = median(p[0] for p in pairs), median(p[1] for p in pairs)
            ratio = median(p / m for m, p in pairs)
            cells = [folder.name, kind, str(len(rows)), f"{rows[0].duration_ns / 1e6:.0f}", f"{measured:.2f}"]
            cells += [f"{predicted:.2f}", f"{100 * (ratio - 1):+.1f} %"]
            print(f"| {' | '.join(cells)} |")


def scenario_of(run: Path) -> Scenario:
    """With its profile, without the rest behind a step."""
    study = run.parent.parent
    suite = load_suite(study.name, study.parent)
    scenario = next(suite.scenario(variant) for variant in suite.variants if variant.name == run.name)
    host = scenario.cost.host.model_copy(update={"decode_step": 0, "decode_request": 0})
    cost = scenario.cost.model_copy(update={"host": host})
    return scenario.model_copy(update={"cost": cost})


def predicted_ns(costs: Mapping[str, StepTimes], row: StepRecord) -> float:
    """Of one step without the rest behind it, or of one of those that a row stands for."""
    if row.kind == "decode":
        line = costs["decode-0"].decode_line(row.num_requests)
        return (line.base + line.per_context_token * row.num_context_tokens) / (1 << FRACTION_BITS)
    num_tokens, num_context = row.num_tokens // row.num_requests, row.num_context_tokens // row.num_requests
    chunks = tuple(PrefillChunk(i, num_context, num_tokens, is_last=True) for i in range(row.num_requests))
    return costs["prefill-0"].prefill_ns(PrefillStep(0, chunks), row.start_ns)


if __name__ == "__main__":
    main()
