"""First decode steps beside later ones, and runs with their first wave, simulated cold and warm: python cold_start.py

Cold: the stalls of the same run's own first steps, so what is predicted is what follows from them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from prepare import ARMS, METRICS, metrics_of
from rows import DATA, HERE, columns

from pdsim import load_scenario, simulate

STALLED_MS = 10
"""Least stall beyond the median step of a batch."""
RUNS = ("tp2to2_c16", "tp1to2_staging1g_c16")


class FirstSteps(NamedTuple):
    num_batches: int
    """Batch sizes with more than one step."""
    stalls_ms: dict[int, float]
    """By batch size, of those whose first step stalled."""


def first_steps(name: str) -> FirstSteps:
    table = columns(name)
    is_decode = (table["num_decode"] > 0) & (table["num_prefill"] == 0)
    batches, times_ms = table["num_decode"][is_decode].astype(int), 1e3 * table["gpu_s"][is_decode]
    sizes = [int(size) for size in np.unique(batches) if (batches == size).sum() > 1]
    beyond_ms = {size: float(times_ms[batches == size][0] - np.median(times_ms[batches == size])) for size in sizes}
    return FirstSteps(len(sizes), {size: stall for size, stall in beyond_ms.items() if stall > STALLED_MS})


def servers() -> Iterator[str]:
    for path in sorted(DATA.glob("steps_*.csv.gz")):
        yield path.name.removesuffix(".csv.gz")


def errors(run: str, stalls_ms: dict[int, float]) -> dict[str, float]:
    """Simulated / measured - 1 of all requests, the first wave among them."""
    arm = next(arm for arm in ARMS if arm.run == run)
    everything = np.ones(len(columns(f"requests_{run}")["k"]), dtype=bool)
    stalls = ", ".join(f"{size}: {stall:.1f} ms" for size, stall in stalls_ms.items())
    changes = [
        f"workload.path=data/requests_{run}.csv.gz",
        f"client.concurrency={arm.concurrency}",
        *(change.strip('"') for change in arm.changes),
        f"cost.cold_start={{{stalls}}}",
    ]
    summary, measured = simulate(load_scenario(HERE / "scenario.yaml", changes)).summary(), metrics_of(run, everything)
    return {metric: summary[metric] / measured[metric] - 1 for metric in METRICS}


def main() -> None:
    print("| steps of | batch sizes | first steps that stalled |")
    print("|---|---|---|")
    for name in servers():
        found = first_steps(name)
        if found.num_batches:
            stalls = ", ".join(f"{size} requests: {stall:.0f} ms" for size, stall in found.stalls_ms.items())
            print(f"| {name.removeprefix('steps_')} | {found.num_batches} | {stalls} |")
    print(f"\n| with the first wave | | {' | '.join(f'`{metric}`' for metric in METRICS)} |")
    print(f"|---|---|{'---|' * len(METRICS)}")
    for run in RUNS:
        stalls_ms = first_steps(f"steps_{run}_d0").stalls_ms
        for name, stalls in (("warm", {}), ("cold", stalls_ms)):
            cells = [f"{100 * error:+.1f} %" for error in errors(run, stalls).values()]
            print(f"| {run} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
