"""Whether the default cost finds the better of two arms: python signs.py

Pairs are arms of one study that differ in one choice. Where a measured metric differs by more than 5 %, the predicted
one should differ the same way. Numbers are those of docs/accuracy.csv, without the kernels of the arm's own GPU and,
where there are some, with them.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.accuracy import KNOWN, Number, read

PAIRS = {
    "radix cache on decode": ("decode-radix-b200", [("baseline", "radix"), ("baseline", "radix-64")]),
    "KV sent as increments": ("incremental-h20", [("main", "incremental")]),
    "prefill/decode or aggregated": ("sglang-h200", [("agg_c32", "c32"), ("agg_q16", "q16")]),
    "the same on A10": ("mooncake-a10", [("case1-2regular", "case1-pd"), ("case2-2regular", "case2-pd")]),
    "tensor-parallel sizes": (
        "sglang-h200",
        [
            *combinations(("c1", "tp2to2_c1", "tp2to1_slice_c1", "tp2to1_staging1g_c1"), 2),
            *combinations(("tp1to2_staging1g_c16", "tp2to1_slice_c16", "tp2to2_c16"), 2),
        ],
    ),
    "decode servers": ("inferencex-tp", [("b200-fp8-8192-1p1d-c64", "b200-fp8-8192-1p4d-c64")]),
    "router": ("sglang-llama", [("2p2d_round_robin_hi", "2p2d_cache_aware_hi")]),
}
LEAST = 0.05


def changes(numbers: list[Number], pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, float, float]]:
    """Pair, metric, measured and predicted change."""
    found: dict[tuple[str, str], dict[str, Number]] = defaultdict(dict)
    for number in numbers:
        found[number.known, number.metric][number.arm] = number
    for (known, metric), arms in found.items():
        for first, second in pairs:
            if known in KNOWN[1:] and first in arms and second in arms:
                before, after = arms[first], arms[second]
                yield (
                    f"{first} to {second}",
                    f"{metric}, {known}",
                    after.measured / before.measured - 1,
                    after.predicted / before.predicted - 1,
                )


def main() -> None:
    everything = read()
    print("| choice | arms | metric | measured | predicted | |\n|---|---|---|---|---|---|")
    verdicts = []
    for choice, (study, pairs) in PAIRS.items():
        for pair, metric, measured, predicted in changes([one for one in everything if one.study == study], pairs):
            if abs(measured) > LEAST:
                verdicts.append(measured * predicted > 0)
                told = "" if verdicts[-1] else "wrong"
                print(f"| {choice} | {pair} | {metric} | {measured:+.0%} | {predicted:+.0%} | {told} |")
    print(f"\n{sum(verdicts)} of {len(verdicts)} signs are right.")


if __name__ == "__main__":
    main()
