"""Whether the default cost finds the better of two arms: python signs.py

Pairs are arms of one study. Where a measured metric differs by more than 5 %, the simulated one should differ the same
way.
"""

from collections.abc import Iterator
from itertools import combinations

from judge import DEFAULT, HERE

from pdsim import simulate
from pdsim.calibration.validate.case import load_case

PAIRS = {
    "radix cache on decode": ("decode-radix-b200", [("baseline", "radix"), ("baseline", "radix-64")]),
    "KV sent as increments": ("incremental-h20", [("main", "incremental")]),
    "KV sent by layers": (
        "layerwise-tcp",
        [(f"off-{load}", f"on-{load}") for load in ("3500-c1", "3500-rate", "16000-c1")],
    ),
    "prefill/decode or aggregated": ("sglang-h200", [("c32", "agg_c32"), ("q16", "agg_q16")]),
    "tensor-parallel sizes": (
        "sglang-h200",
        list(combinations(("c1", "tp2to2_c1", "tp2to1_slice_c1", "tp2to1_staging1g_c1"), 2)),
    ),
}
METRICS = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms")
LEAST = 0.05


def changes(study: str, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, float, float]]:
    """What is compared, and its measured and simulated change."""
    case = load_case(HERE.parent / study)
    arms = {arm.name: arm for arm in case.arms if any(arm.name in pair for pair in pairs)}
    found = {name: simulate(case.scenario(arm, 1, DEFAULT)).summary() for name, arm in arms.items()}
    for first, second in pairs:
        before, after = arms[first].measured, arms[second].measured
        for metric in METRICS:
            if metric in before.keys() & after.keys():
                yield (
                    f"{first} to {second}, {metric}",
                    after[metric] / before[metric] - 1,
                    found[second][metric] / found[first][metric] - 1,
                )


def main() -> None:
    print("| choice | arms | measured | simulated | |\n|---|---|---|---|---|")
    for choice, (study, pairs) in PAIRS.items():
        for name, measured, simulated in changes(study, pairs):
            if abs(measured) > LEAST:
                verdict = "" if measured * simulated > 0 else "wrong"
                print(f"| {choice} | {name} | {measured:+.0%} | {simulated:+.0%} | {verdict} |")


if __name__ == "__main__":
    main()
