"""The points by the operator tables of aiconfigurator, which must be installed, beside the cost that the case sets:
python experiments/aiconfigurator-points/tables.py [CASE ...]

Tables are those of the engine that was measured, where aiconfigurator has them for the model and GPU.
"""

import sys
from pathlib import Path
from statistics import median

from pdsim import simulate
from pdsim.calibration.validate.case import MeasuredCase, load_case, simulated_metrics
from pdsim.scenario.yaml_file import ConfigError

METRICS = ("mean_ttft_ms", "mean_tpot_ms")
BACKENDS = ("sglang", "trtllm", "vllm")


def main() -> None:
    for name in sys.argv[1:] or [Path(__file__).parent.name]:
        print_errors(load_case(Path(__file__).parent.parent / name))


def print_errors(case: MeasuredCase) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    for arm in case.arms:
        backend = next((backend for backend in BACKENDS if f"-{backend}-" in arm.name), "sglang")
        cells = [arm.name]
        costs = {"as set": None, "aiconfigurator": f"{{use: aiconfigurator, backend: {backend}}}"}
        for name, cost in costs.items():
            try:
                found = simulated_metrics(
                    case, arm, lambda scenario: simulate(scenario).summary(), () if cost is None else (f"cost={cost}",)
                )
            except ConfigError as lacking:
                cells.append(str(lacking).splitlines()[0])
                continue
            for metric in METRICS:
                error = found[metric] / arm.measured[metric] - 1
                errors.setdefault((name, metric), []).append(abs(error))
                cells.append(f"{metric} {error:+.1%}")
        print(" | ".join(cells), flush=True)
    for (name, metric), values in errors.items():
        print(f"{name} {metric}: median {median(values):.1%} of {len(values)}")


if __name__ == "__main__":
    main()
