"""Errors and ranges of costs that nothing here was fitted for, on servers that others measured: python judge.py

Every second arm of the studies below chose the constants of `cost: kernels` that operators' tables do not have; the
others judge. What a study fitted, its profile and its front end, is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdsim import Scenario, simulate
from pdsim.calibration.validate.case import load_case
from pdsim.scenario.sizing import resolve

HERE = Path(__file__).parent
STUDIES = ("aiconfigurator-points", "inferencex-tp", "vllm-rtx", "infersim-h20", "sglang-h200")
METRICS = {
    "mean_ttft_ms": "TTFT",
    "mean_tpot_ms": "TPOT",
    "request_throughput": "throughput",
    "input_throughput": "throughput",
}
DEFAULT = "cost=kernels", "front_end={{latency_in: 40 ms, waits_for_prefill: {waits}}}"
BEFORE = "cost=roofline", "front_end={{waits_for_prefill: {waits}}}"
"""Changes of a study's scenario; whether a gateway waits is the study's own."""
LATER = ("shared_radix", "tp2to1_slice_c16", "tp1to2_staging1g_c16")
"""Arms that were not there when the constants were chosen."""


class Point(NamedTuple):
    """Relative errors of one metric of one arm."""

    arm: str
    metric: str
    half: str
    before: float
    """By the roofline's own constants."""
    now: float
    low: float
    high: float
    """The ends of the range."""

    @property
    def is_covered(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2 / (1 + self.now)


def points() -> Iterator[Point]:
    arms = [(case, arm) for case in (load_case(HERE.parent / name) for name in STUDIES) for arm in case.arms]
    for number, (case, arm) in enumerate(arms):
        if arm.name.endswith("-roofline"):  # the arm before it by a cost of its own
            continue
        front_end = resolve(case.scenario(arm, 1)).front_end
        waits = str(front_end is not None and front_end.waits_for_prefill).lower()
        before, now = (
            case.scenario(arm, 1, tuple(change.format(waits=waits) for change in changes))
            for changes in (BEFORE, DEFAULT)
        )
        runs: list[Scenario] = [before, now, *now.ends]
        summaries = [simulate(run).summary(arm.skip) for run in runs]
        for metric in [name for name in METRICS if name in arm.measured]:
            before, best, *ends = (summary[metric] / arm.measured[metric] - 1 for summary in summaries)
            half = "judges" if number % 2 or arm.name in LATER else "chooses"
            name = f"{case.name}: {arm.name}"
            yield Point(name, METRICS[metric], half, before, best, min(best, *ends), max(best, *ends))


def main() -> None:
    found = list(points())
    print("| half | metric | points | roofline | kernels | inside the range | half its width |")
    print("|---|---|---|---|---|---|---|")
    for half in ("chooses", "judges"):
        for metrics in (("TTFT",), ("TPOT",), ("throughput",), ("TTFT", "TPOT", "throughput")):
            kept = [point for point in found if point.half == half and point.metric in metrics]
            before, now = (median(map(abs, errors)) for errors in zip(*((p.before, p.now) for p in kept), strict=True))
            inside = sum(point.is_covered for point in kept) / len(kept)
            width = median(point.half_width for point in kept)
            name = metrics[0] if len(metrics) == 1 else "all"
            print(f"| {half} | {name} | {len(kept)} | {before:.0%} | {now:.0%} | {inside:.0%} | {width:.0%} |")
    print("\n| arm | metric | half | roofline | kernels | range |\n|---|---|---|---|---|---|")
    for point in sorted(found, key=lambda point: (point.half, point.metric)):
        told = f"{point.before:+.0%} | {point.now:+.0%} | {point.low:+.0%} to {point.high:+.0%}"
        print(f"| {point.arm} | {point.metric} | {point.half} | {told} |")


if __name__ == "__main__":
    main()
