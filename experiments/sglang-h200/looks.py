"""Transfers that prefill sees done at its look behind their sends, by prompts of the forward: python looks.py

The next look comes behind the next launch or forward, so the others are seen 12 ms later or more. Forwards behind which
the loop idles, and looks all the time, are left out.
"""

from collections import defaultdict

import numpy as np
from rows import columns

SERVERS = {
    "8B, one after another": ("lot1", "lot2"),
    "TP2 to TP2": ("tp2to2_c16",),
    "TP1 to TP2, staged": ("tp1to2_staging1g_c16",),
}
BEFORE_MS, AFTER_MS = 14, 5
"""Sends of a forward's prompts lie so far around its row."""
LATER_MS = 12
PROMPT_TOKENS = 1024


def seen(server: str) -> dict[int, list[int]]:
    """Transfers seen at the first look, by prompts of the forward."""
    table, forwards = columns(f"stages_{server}_p0"), columns(f"steps_{server}_p0")
    waits_ms = sum(table[key] for key in ("bootstrap_ms", "alloc_wait_ms", "queue_ms", "forward_ms"))
    seen_ms = 1e3 * table["entry_unix_s"] + waits_ms
    with np.errstate(divide="ignore"):
        sent_ms = seen_ms - table["transfer_MB"] / 1.024 / table["transfer_GBps"]
    found = defaultdict(list)
    for row_ms, num_prompts in zip(1e3 * forwards["t_unix_s"], forwards["num_prefill"], strict=True):
        own = (table["input_tokens"] == PROMPT_TOKENS) & (sent_ms > row_ms - BEFORE_MS) & (sent_ms < row_ms + AFTER_MS)
        num_later = int((seen_ms[own] > row_ms + LATER_MS).sum())
        if own.sum() == num_prompts > 1 and num_later:
            found[int(num_prompts)].append(int(num_prompts) - num_later)
    return found


def main() -> None:
    print("| | " + " | ".join(f"{n} prompts" for n in range(2, 9)) + f" |\n|---|{'---|' * 7}")
    for name, servers in SERVERS.items():
        found = [seen(server) for server in servers]
        both = [[num for rows in found for num in rows[n]] for n in range(2, 9)]
        print(f"| {name} | " + " | ".join(f"{np.mean(one):.1f} ({len(one)})" if one else "" for one in both) + " |")


if __name__ == "__main__":
    main()
