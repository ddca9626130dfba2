"""Compares the CPU time of simulations with the default cost model and with the roofline: python bench/costs.py

One process simulates each scenario with both cost models in turn, and takes the best of four runs without start-up.
The scenarios are golden ones, the load of experiments/speed, shared prefixes that attention reads in waves, and models
with experts.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import process_time

from pdsim import Scenario, load_scenario, simulate
from pdsim.calibration.validate.case import load_case

HOME = Path(__file__).parent.parent
STUDIES = {
    "decode-radix-b200": ("baseline", "radix", "radix-64"),
    "inferencex-tp": ("gb200-fp4-1024-1p2d-c32",),
    "sglang-h200": ("shared_radix",),
}
ASKED = 1.2
_REPEATS = 4
_LEAST_S = 0.05
"""Minimum CPU seconds of the simulations that are timed together. Short simulations are repeated."""


def scenarios(cost: str) -> Iterator[tuple[str, Scenario]]:
    changes = (f"cost={cost}", "front_end={waits_for_prefill: false}")
    for path in sorted((HOME / "tests" / "golden").glob("*/scenario.yaml")):
        yield f"golden {path.parent.name}", load_scenario(path, changes)
    yield "speed", load_scenario(HOME / "experiments/speed/scenario.yaml", [*changes, "workload.num_requests=2000"])
    for study, names in STUDIES.items():
        case = load_case(HOME / "experiments" / study)
        for arm in case.arms:
            if arm.name in names:
                yield f"{study} {arm.name}", case.scenario(arm, 1, changes)


def cpu_s(scenario: Scenario, times: int) -> float:
    before = process_time()
    for _ in range(times):
        simulate(scenario).summary()
    return (process_time() - before) / times


def main() -> None:
    ratios = []
    print("| scenario | roofline, CPU s | default | ratio |\n|---|---|---|---|")
    for (name, roofline), (_, kernels) in zip(scenarios("roofline"), scenarios("kernels"), strict=True):
        times = 1 + int(_LEAST_S / cpu_s(roofline, 1))
        cpu_s(kernels, 1)
        pairs = [(cpu_s(roofline, times), cpu_s(kernels, times)) for _ in range(_REPEATS)]
        before, now = map(min, zip(*pairs, strict=True))
        ratios.append(now / before)
        print(f"| {name} | {before:.3f} | {now:.3f} | {now / before:.2f} |")
    print(f"\nmedian {median(ratios):.2f}, largest {max(ratios):.2f}, at most {ASKED} asked")


if __name__ == "__main__":
    main()
