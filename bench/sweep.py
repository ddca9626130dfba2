"""Compares the CPU time of a point in a sweep with the same simulation alone: python bench/sweep.py [POINTS]

One worker of a sweep simulates points of 200 requests of experiments/speed; its time includes start-up and the folder
of the sweep. One process builds, runs and sums up the same points without a sweep.
"""

import sys
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from measure import measure

from pdsim import load_scenario, simulate
from pdsim.garbage import garbage_collection_paused

SCENARIO = (Path(__file__).parent.parent / "experiments" / "speed" / "scenario.yaml").resolve()
FEW = "workload.num_requests=200"
NUM_RATES = 10
SWEEP = """
scenario: {scenario}
points:
{points}
"""


def points(num_points: int) -> list[tuple[str, int]]:
    """Returns points that all differ: the request rate as text, and max_running_requests of decode."""
    every = product(range(16, 1 << 20), range(1, NUM_RATES + 1))
    return [(f"{rate}/s", max_running) for max_running, rate in islice(every, num_points)]


def simulated_s(chosen: list[tuple[str, int]]) -> float:
    total_s = 0.0
    for rate, max_running in chosen:
        changes = [FEW, f"client.arrivals.rate={rate}", f"decode.max_running_requests={max_running}"]
        scenario = load_scenario(SCENARIO, changes)
        before_s = process_time()
        with garbage_collection_paused():
            simulate(scenario).summary()
        total_s += process_time() - before_s
    return total_s


def main() -> None:
    chosen = points(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    with TemporaryDirectory() as folder:
        rows = "\n".join(
            f"  - {{client.arrivals.rate: {rate}, decode.max_running_requests: {n}}}" for rate, n in chosen
        )
        file = Path(folder) / "sweep.yaml"
        file.write_text(SWEEP.format(scenario=SCENARIO, points=rows))
        sweep = [sys.executable, "-m", "pdsim", "sweep", str(file), "--out", f"{folder}/out", "--jobs", "1", "--json"]
        whole_s = measure([*sweep, "--set", FEW], repeats=1).cpu_s
    alone_s = simulated_s(chosen)
    print(f"{len(chosen)} points: {whole_s / alone_s:.2f} x their simulation")


if __name__ == "__main__":
    main()
