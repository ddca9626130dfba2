"""Measures time and memory of large runs, to see whether they grow linearly: python bench/large.py [REQUESTS ...]

Runs experiments/speed/shared-prefixes.yaml with 100,000 and with 1,000,000 requests, or with the given numbers of
requests, each in a process of its own. Prints CPU seconds and peak memory of the whole command, with start-up and
summary.
"""

import json
import sys
from pathlib import Path

from measure import Cost, measure

SCENARIO = Path(__file__).parent.parent / "experiments" / "speed" / "shared-prefixes.yaml"
SIZES = (100_000, 1_000_000)


def whole_run(num_requests: int) -> Cost:
    change = f"workload.num_requests={num_requests}"
    cost = measure([sys.executable, "-m", "pdsim", "run", str(SCENARIO), "--json", "--set", change], repeats=1)
    assert json.loads(cost.output)["completed"] == num_requests
    print(
        f"{num_requests:>9,} requests: {cost.cpu_s:7.1f} CPU s, {1e3 * cost.cpu_s / num_requests:5.2f} ms a request, "
        f"{cost.peak_mib:7,.0f} MiB, {1024 * cost.peak_mib / num_requests:5.2f} KiB a request",
        flush=True,
    )
    return cost


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or SIZES
    costs = [whole_run(num_requests) for num_requests in sizes]
    for size, cost in zip(sizes[1:], costs[1:], strict=True):
        print(
            f"{size / sizes[0]:.1f} times the requests: {cost.cpu_s / costs[0].cpu_s:.1f} times the CPU, "
            f"{cost.peak_mib / costs[0].peak_mib:.1f} times the memory"
        )


if __name__ == "__main__":
    main()
