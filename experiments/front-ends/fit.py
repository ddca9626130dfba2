"""Time of each kind of front end: what light loads take in TTFT beyond the default cost: python fit.py

Every second arm of a kind chooses its time, the median; the others judge.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from pdsim import simulate
from pdsim.calibration.validate.case import MeasuredArm, MeasuredCase, load_case
from pdsim.metrics.summary import by_client

STUDIES = Path(__file__).parent.parent
ARMS = {
    "in_process": {"accelmark-a100": ("interactive-c1", "online-5", "sustained-c8", "online-25")},
    "engine": {
        "sglang-h200": ("agg_q16", "agg_c32"),
        "vllm-rtx-4090": ("4b-128", "4b-1024", "7b-128", "7b-1024"),
        "aiconfigurator-points": (
            "minimax-m2.5-b200-vllm-tp2-1024-1024-c32",
            "minimax-m2.5-h100-vllm-tp4-1024-1024-c16",
            "minimax-m2.5-h200-vllm-tp8-1024-1024-c32",
        ),
    },
    "sglang_gateway": {
        "sglang-h200": ("s128", "s1024", "q4", "q16", "c1", "b32_c1"),
        "sglang-llama": ("llama_c1", "llama_c8", "fp8_c1", "fp8_singles"),
    },
    "dynamo": {
        "inferencex-tp": (
            "b200-fp8-1024-1p1d-c4",
            "gb200-fp8-1024-1p1d-c4",
            "gb200-fp4-1024-1p2d-c4",
            "gb200-fp4-1024-1p2d-c8",
            "gb200-fp8-1024-1p1d-c8",
            "b200-fp8-8192-1p1d-c4",
            "gb200-fp4-8192-1p4d-c4",
            "gb200-fp4-8192-1p4d-c8",
        ),
        "dynamo-gb200": ("536-c4", "536-c8"),
    },
}
"""Arms with light loads, by kind and study."""


def arms(kind: str) -> Iterator[tuple[MeasuredCase, MeasuredArm]]:
    for study, names in ARMS[kind].items():
        case = load_case(STUDIES / study)
        yield from ((case, arm) for name in names for arm in case.arms if arm.name == name)


def ttft_ms(case: MeasuredCase, arm: MeasuredArm, front_end: str) -> tuple[float, float]:
    """TTFT measured, and simulated behind a front end."""
    metric = next(name for name in ("mean_ttft_ms", "median_ttft_ms") if name in arm.measured)
    scenario = case.scenario(arm, case.seeds[0], ("cost=kernels", f"front_end={front_end}"))
    return arm.measured[metric], by_client(simulate(scenario).summary(), case.client)[metric]


def main() -> None:
    print("| kind | half | arms | takes beyond the engine, ms | median | error at 40 ms | error at its kind's time |")
    print("|---|---|---|---|---|---|---|")
    for kind in ARMS:
        waits = str(kind == "sglang_gateway").lower()
        beyond: list[float] = []
        errors: list[tuple[float, float]] = []
        for case, arm in arms(kind):
            measured, without = ttft_ms(case, arm, f"{{waits_for_prefill: {waits}}}")
            beyond.append(measured - without)
            before, now = (
                abs(ttft_ms(case, arm, front_end)[1] / measured - 1)
                for front_end in (f"{{latency_in: 40 ms, waits_for_prefill: {waits}}}", kind)
            )
            errors.append((before, now))
        for name, first in (("chooses", 0), ("judges", 1)):
            kept = beyond[first::2]
            before, now = (median(found) for found in zip(*errors[first::2], strict=True))
            listed = ", ".join(f"{ms:.0f}" for ms in kept)
            print(f"| {kind} | {name} | {len(kept)} | {listed} | {median(kept):.0f} | {before:.0%} | {now:.0%} |")


if __name__ == "__main__":
    main()
