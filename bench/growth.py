"""Measures how the cost of simulating one request grows with the run: python bench/growth.py

The number of instances, the context, the concurrency and the prefixes grow one at a time, starting from the load of
experiments/speed. The cost is the CPU time of building, running and summing up, the best of two runs, without garbage
collection, as in commands. For each, the exponent of the growth is printed; 0: the cost does not grow.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from pathlib import Path
from time import process_time

from pdsim import load_scenario, simulate
from pdsim.garbage import garbage_collection_paused

SCENARIO = Path(__file__).parent.parent / "experiments" / "speed" / "scenario.yaml"


def instances(n: int, router: str) -> list[str]:
    return [
        "workload.num_requests=4000",
        f"prefill.instances={n}",
        f"decode.instances={n}",
        f"client.arrivals.rate={4 * n}/s",
        f"router={router}",
    ]


def context(num_tokens: int) -> list[str]:
    return [
        "workload.num_requests=100",
        f"workload.input_tokens={num_tokens}",
        "workload.output_tokens=200",
        "context_tokens=2000000",
        "prefill.pool_tokens=4000000",
        "decode.pool_tokens=4000000",
        "client={use: closed_loop, concurrency: 2}",
    ]


def concurrency(n: int) -> list[str]:
    return [
        f"workload.num_requests={max(8192, 2 * n)}",
        f"client={{use: closed_loop, concurrency: {n}}}",
        "decode.pool_tokens=20000000",
        f"decode.max_running_requests={max(4096, n)}",
    ]


def prefixes(n: int) -> list[str]:
    pool = f"{{use: prefix_pool, num_requests: 4000, num_prefixes: {n}, prefix_tokens: 1024, "
    lengths = "input_tokens: {use: uniform, low: 100, high: 900}, output_tokens: {use: uniform, low: 100, high: 300}}"
    return [f"workload={pool}{lengths}", "decode.radix_cache=true"]


AXES: dict[str, tuple[Callable[[int], list[str]], Sequence[int]]] = {
    "xPxD, cache_aware": (partial(instances, router="cache_aware"), (1, 4, 16, 64, 256)),
    "xPxD, least_loaded": (partial(instances, router="least_loaded"), (1, 4, 16, 64, 256)),
    "context (tokens)": (context, (1_000, 10_000, 100_000, 1_000_000)),
    "concurrency": (concurrency, (16, 64, 256, 1_024, 4_096, 16_384)),
    "prefixes": (prefixes, (10, 100, 1_000, 10_000)),
}


def request_us(changes: Sequence[str]) -> float:
    best = float("inf")
    for _ in range(2):
        scenario = load_scenario(SCENARIO, changes)
        gc.collect()  # what an earlier run left
        before = process_time()
        with garbage_collection_paused():
            summary = simulate(scenario).summary()
        best = min(best, (process_time() - before) / summary["completed"])
    return best * 1e6


def main() -> None:
    print(f"{'':18} {'':>10} {'us/request':>11} {'times':>7} {'exponent':>9}")
    for name, (changes, sizes) in AXES.items():
        least = None
        for size in sizes:
            found_us = request_us(changes(size))
            least = least or found_us
            times, text = found_us / least, ""
            if size > sizes[0]:
                text = f"{log(times) / log(size / sizes[0]):.2f}"
            print(f"{name:18} {size:>10,} {found_us:11.0f} {times:7.2f} {text:>9}", flush=True)


if __name__ == "__main__":
    main()
