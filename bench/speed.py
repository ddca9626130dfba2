"""Measures the speed of the simulator: python bench/speed.py [--large]

Simulates the load of experiments/speed: 10,000 requests at 4/s on 1P1D. Prints CPU seconds of the whole command, with
start-up and summary, best of three runs. Then compares many decode steps that are simulated at once with single steps.
With --large, also simulates 100,000 requests.
"""

import json
import sys
from pathlib import Path
from time import process_time

from measure import measure

from pdsim import load_scenario, simulate

SCENARIO = Path(__file__).parent.parent / "experiments" / "speed" / "scenario.yaml"


def whole_command(num_requests: int, repeats: int) -> float:
    change = f"workload.num_requests={num_requests}"
    cost = measure([sys.executable, "-m", "pdsim", "run", str(SCENARIO), "--json", "--set", change], repeats)
    summary = json.loads(cost.output)
    assert summary["completed"] == num_requests
    own = summary["pdsim"]
    print(
        f"{num_requests:>9,} requests: {cost.cpu_s:6.2f} CPU s, {num_requests / cost.cpu_s:8,.0f} requests/s, "
        f"{(own['decode_steps'] + own['prefill_steps']) / cost.cpu_s:9,.0f} steps/s, "
        f"{own['events'] / num_requests:5.1f} events a request, {cost.peak_mib:5.0f} MiB"
    )
    return cost.cpu_s


def many_against_single(num_requests: int) -> None:
    times = {}
    for name, single_steps in (("many at once", False), ("single steps", True)):
        scenario = load_scenario(SCENARIO, [f"workload.num_requests={num_requests}"])
        before = process_time()
        result = simulate(scenario, single_steps=single_steps)
        times[name] = process_time() - before
        print(
            f"{num_requests:>9,} requests, decode steps {name}: {times[name]:6.2f} CPU s, {result.num_events:,} events"
        )
    print(f"single steps / many at once: {times['single steps'] / times['many at once']:.1f}")


if __name__ == "__main__":
    small = whole_command(10_000, repeats=3)
    if "--large" in sys.argv:
        large = whole_command(100_000, repeats=1)
        print(f"ten times the requests cost {large / small:.1f} times the CPU")
    many_against_single(1_000)
