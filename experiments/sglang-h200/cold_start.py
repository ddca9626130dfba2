"""Stalls of cold decode servers, and runs with their first wave, simulated cold and warm: python cold_start.py

Stalls are numbered by steps of several requests. Four of seven servers stall at the first such step, and again at
nearly the same later ones. `cost.cold_start` of their arms is one rule: the mean of the servers, stall by stall.
"""

from itertools import zip_longest
from statistics import mean, median_low

import numpy as np
from prepare import COLD_START, METRICS, metrics_of
from rows import DATA, HERE, columns

from pdsim import load_scenario, simulate
from pdsim.calibration.validate.case import load_case

STALLED_MS = 20
"""Least stall beyond the median step of a batch."""
FIRST_STEPS = 200
RUNS = ("tp2to2_c16", "tp1to2_staging1g_c16")


def stalls(name: str) -> dict[int, float]:
    """In ms, by number among the server's steps of several requests.

    A row is written when the next step is launched, so what lies between the GPU's end and the row is the next step's,
    if the batch goes on: its KV has grown since the row before.
    """
    table = columns(name)
    is_decode = (table["num_decode"] > 0) & (table["num_prefill"] == 0)
    fields = ("t_unix_s", "gpu_s", "num_decode", "decode_kv_tokens")
    end_s, gpu_s, batches, kv_tokens = (table[field][is_decode] for field in fields)
    gpu_ms = 1e3 * gpu_s
    usual = {size: float(np.median(gpu_ms[batches == size])) for size in np.unique(batches)}
    beyond = gpu_ms - np.array([min(usual[size], usual[max(usual)]) for size in batches])
    late_ms = 1e3 * np.diff(end_s) - gpu_ms[1:]
    goes_on = np.diff(kv_tokens) > 0
    beyond[2:] += np.where(goes_on & (late_ms > STALLED_MS), late_ms, 0)[:-1]
    several = beyond[batches > 1][:FIRST_STEPS]
    return {int(at) + 1: float(several[at]) for at in np.flatnonzero(several > STALLED_MS)}


def servers() -> list[str]:
    """Decode servers that ran several requests at once."""
    names = [path.name.removesuffix(".csv.gz") for path in sorted(DATA.glob("steps_*_d0.csv.gz"))]
    return [name for name in names if (columns(name)["num_decode"] > 1).any()]


def rule() -> dict[int, float]:
    """By the first stall of each cold server, by the second, and so on, as far as they have them."""
    found = [stalls(name).items() for name in servers()]
    ranks = [[one for one in rank if one is not None] for rank in zip_longest(*(cold for cold in found if cold))]
    return {median_low([at for at, _ in rank]): mean([ms for _, ms in rank]) for rank in ranks}


def errors(run: str, cold_start: str) -> dict[str, float]:
    """Simulated / measured - 1 of all requests, the first wave among them."""
    arm = next(arm for arm in load_case(HERE).arms if arm.name == run)
    everything = np.ones(len(columns(f"requests_{run}")["k"]), dtype=bool)
    changes = (*arm.changes, f"cost.cold_start={cold_start}")
    summary, measured = simulate(load_scenario(HERE / "scenario.yaml", changes)).summary(), metrics_of(run, everything)
    return {metric: summary[metric] / measured[metric] - 1 for metric in METRICS}


def main() -> None:
    print(f"| steps of | stalls of the first {FIRST_STEPS} steps of several requests |")
    print("|---|---|")
    for name in servers():
        found = ", ".join(f"{at}: {ms:.0f} ms" for at, ms in stalls(name).items())
        print(f"| {name.removeprefix('steps_')} | {found} |")
    print(f"\nrule: {', '.join(f'{at}: {ms:.0f} ms' for at, ms in rule().items())}; used: {COLD_START}")
    print(f"\n| with the first wave | | {' | '.join(f'`{metric}`' for metric in METRICS)} |")
    print(f"|---|---|{'---|' * len(METRICS)}")
    for run in RUNS:
        for name, cold_start in (("off", "{}"), ("on", COLD_START)):
            cells = [f"{100 * error:+.1f} %" for error in errors(run, cold_start).values()]
            print(f"| {run} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
