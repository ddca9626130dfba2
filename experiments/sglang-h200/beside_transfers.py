"""Decode steps while KV arrives beside steps when none does: python experiments/sglang-h200/beside_transfers.py

A forward's KV arrives in the milliseconds around its row, which is written when its sends are posted. What a step takes
beyond the line through its batch's steps is counted by the time since the last such row.
"""

from itertools import pairwise

import numpy as np
from rows import Floats, columns

SERVERS = ("lot1", "lot2", "shared_base", "shared_radix", "tp2to1_slice_c16")
SINCE_MS = (0, 2, 4, 6, 8, 12, 16, 50, 1e6)
LEAST_STEPS = 20
FAR_OFF = 0.05
"""Relative error from which on a step does not bear on its line."""


def beyond_line(batches: Floats, tokens: Floats, times_s: Floats) -> Floats:
    """Relative to a line in KV tokens, for each batch size; NaN where it has too few steps."""
    beyond = np.full(len(times_s), np.nan)
    for size in np.unique(batches[batches > 0]):
        own = batches == size
        if own.sum() < LEAST_STEPS:
            continue
        design, kept = np.column_stack([np.ones(own.sum()), tokens[own]]), np.ones(own.sum(), dtype=bool)
        for _ in range(3):
            line = np.linalg.lstsq(design[kept], times_s[own][kept], rcond=None)[0]
            beyond[own] = times_s[own] / (design @ line) - 1
            kept = np.abs(beyond[own]) < FAR_OFF
    return beyond


def main() -> None:
    spans = [f"{low:g} to {high:g} ms" for low, high in pairwise(SINCE_MS[:-1])] + ["later"]
    print(f"| median of steps after a forward | {' | '.join(spans)} |")
    print(f"|---|{'---|' * len(spans)}")
    for server in SERVERS:
        steps, forwards = columns(f"steps_{server}_d0"), np.sort(columns(f"steps_{server}_p0")["t_unix_s"])
        beyond = beyond_line(steps["num_decode"], steps["decode_kv_tokens"], steps["gpu_s"])
        last = np.searchsorted(forwards, steps["t_unix_s"]) - 1
        since_ms = np.where(last >= 0, 1e3 * (steps["t_unix_s"] - forwards[last]), np.inf)
        cells = []
        for low, high in pairwise(SINCE_MS):
            chosen = beyond[(since_ms >= low) & (since_ms < high) & ~np.isnan(beyond)]
            cells.append(f"{100 * np.median(chosen):+.2f} %" if len(chosen) >= LEAST_STEPS else "")
        print(f"| {server} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
