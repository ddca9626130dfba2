"""How long decode steps take from start to start, and the host between them, in runs and simulated: python steps.py"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from pdsim.calibration.validate.suite import load_suite
from pdsim.metrics.records import StepRecord
from pdsim.metrics.run_folder import read_records
from pdsim.sim.simulation import simulate

HERE = Path(__file__).parent
_IDLE = 3
"""Times a step's duration after which the next did not follow at once."""


def spans_ns(steps: Iterable[StepRecord]) -> dict[int, list[float]]:
    """From the start of a decode step to the start of what follows it at once, by the batch."""
    found = defaultdict(list)
    for step, after in pairwise(sorted(steps, key=lambda step: step.start_ns)):
        span_ns = after.start_ns - step.start_ns
        if step.kind == "decode" and span_ns < _IDLE * step.duration_ns:
            found[step.num_requests] += [span_ns / step.num_steps] * step.num_steps
    return found


def between_ms(steps: Iterable[StepRecord]) -> float:
    """Median time of the host between two decode steps."""
    ordered = sorted(steps, key=lambda step: step.start_ns)
    pairs = [(a, b) for a, b in pairwise(ordered) if a.kind == b.kind == "decode"]
    return median(b.start_ns - a.start_ns - a.duration_ns for a, b in pairs) / 1e6


def main() -> None:
    suite = load_suite(str(HERE / "matrix.yaml"), HERE.parent)
    print("| variant | start to start, measured over simulated | between steps, measured |\n|---|---|---|")
    for variant in suite.variants:
        steps = read_records(suite.runs / variant.name).steps
        real, simulated = spans_ns(steps), spans_ns(simulate(suite.scenario(variant)).records.steps)
        both = real.keys() & simulated.keys()
        num_steps = sum(len(real[batch]) for batch in both)
        ratio = sum(len(real[batch]) * fmean(real[batch]) / fmean(simulated[batch]) for batch in both) / num_steps
        print(f"| `{variant.name}` | {ratio - 1:+.1%} | {between_ms(steps):.2f} ms |")


if __name__ == "__main__":
    main()
