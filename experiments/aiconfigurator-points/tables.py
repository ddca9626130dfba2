"""The points by the operator tables of aiconfigurator, which must be installed, beside the roofline:
python experiments/aiconfigurator-points/tables.py

Tables are those of the engine that was measured, where aiconfigurator has them for the model and GPU.
"""

from pathlib import Path
from statistics import median

from pdsim import simulate
from pdsim.calibration.case import load_case
from pdsim.calibration.compare import simulated_metrics
from pdsim.scenario.yaml_file import ConfigError

METRICS = ("mean_ttft_ms", "mean_tpot_ms")
BACKENDS = ("sglang", "trtllm", "vllm")


def main() -> None:
    case = load_case(Path(__file__).parent)
    errors: dict[tuple[str, str], list[float]] = {}
    for arm in case.arms:
        backend = next(backend for backend in BACKENDS if f"-{backend}-" in arm.name)
        cells = [arm.name]
        costs = {"roofline": "roofline", "aiconfigurator": f"{{use: aiconfigurator, backend: {backend}}}"}
        for name, cost in costs.items():
            try:
                found = simulated_metrics(case, arm, lambda scenario: simulate(scenario).summary(), (f"cost={cost}",))
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
