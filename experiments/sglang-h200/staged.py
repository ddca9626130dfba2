"""Stages of TTFT with staging, prefill with TP1 and decode with TP2: python experiments/sglang-h200/staged.py

Prints mean stages of requests, measured by stamps of a server of 2026-11-28, and simulated: with the profile of the
study, then with what single requests of that day's server show of its host.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from prepare import STAGING
from rows import HERE, Floats, columns

from pdsim import load_scenario, simulate
from pdsim.scenario.yaml_file import read_yaml

LOADS = {
    "warm, three runs": ("tp1to2_warm_a", "tp1to2_warm_b", "tp1to2_warm_c"),
    "warm, 160 requests": ("tp1to2_long",),
    "cold": ("tp1to2_cold",),
}
STAGES = ("until the GPU begins", "forward", "until decode has the KV", "until the first token")
STAMPS = ("send_s", "gpu_begin_s", "gpu_end_s", "batch_s", "first_token_s")
FIELDS = ("arrival_ns", "prefill_start_ns", "prefill_end_ns", "streamed_ns", "first_token_ns")
SINGLE = "tp1to2_single"
COLD_START = "cost.cold_start={1: 451 ms, 3: 97 ms, 11: 97 ms, 132: 88 ms}"
"""Launches of decode steps of `tp1to2_cold` that took more than 25 ms, by stamps."""
GATHER_MS = 1.5
"""One gather and its post, of which a request has one for each decode rank: median of ten in `tp1to2_single`."""


def measured(runs: Sequence[str]) -> Floats:
    """Mean stages in ms."""
    tables = [columns(f"requests_{run}") for run in runs]
    times_s = [np.concatenate([table[stamp] for table in tables]) for stamp in STAMPS]
    return np.array([1e3 * (end - begin).mean() for begin, end in pairwise(times_s)])


def simulated(run: str, changes: Sequence[str]) -> Floats:
    """Mean stages in ms."""
    load = (f"workload.path=data/requests_{run}.csv.gz", "client.concurrency=16", "decode.tp=2")
    requests = simulate(load_scenario(HERE / "scenario.yaml", (*load, *changes))).records.requests
    times_ns = [np.array([getattr(one, field) for one in requests]) for field in FIELDS]
    return np.array([(end - begin).mean() / 1e6 for begin, end in pairwise(times_ns)])


def known() -> dict[str, tuple[str, ...]]:
    """Changes of the scenario, by what the simulation knows."""
    single = columns(f"requests_{SINGLE}")
    start_ms = 1e3 * float(np.median(single["gpu_begin_s"] - single["chosen_s"]))
    launch_ms = 1e3 * float(np.median(single["gpu_end_s"] - single["gpu_begin_s"]))
    host = read_yaml(HERE / "profile-tp1to2.yaml")["cost"]["host"]
    host |= {"start": f"{start_ms:.1f} ms", "launch": f"{launch_ms:.1f} ms"}
    staging = STAGING[0].strip('"').replace("}", f", gather_host: {GATHER_MS} ms}}")
    times = ", ".join(f"{name}: {time}" for name, time in host.items())
    profile = "cost={profile: profile-tp1to2.yaml}"
    return {
        "profile": (profile, STAGING[0].strip('"')),
        "and the host by single requests": (f"{profile[:-1]}, host: {{{times}}}}}", staging),
    }


def row(load: str, name: str, stages: Floats, error: str = "") -> str:
    return f"| {' | '.join((load, name, *(f'{ms:.1f}' for ms in (*stages, stages.sum())), error))} |"


def main() -> None:
    print(f"| load | | {' | '.join(STAGES)} | TTFT | |\n|---|---|{'---|' * len(STAGES)}---|---|")
    for load, runs in LOADS.items():
        real = measured(runs)
        print(row(load, "measured", real))
        for name, changes in known().items():
            found = simulated(runs[0], (*changes, COLD_START) if load == "cold" else changes)
            error = f"{100 * (found.sum() / real.sum() - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
            print(row("", name, found, error))


if __name__ == "__main__":
    main()
