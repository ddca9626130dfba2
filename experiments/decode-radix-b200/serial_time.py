"""The default cost's serial time per prompt beside the published fit: python serial_time.py

Means over the seeds of measured.yaml. Nothing is fitted anew.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pdsim import load_scenario, simulate
from pdsim.scenario.yaml_file import read_yaml

HERE = Path(__file__).parent
ARMS = ("baseline", "radix")
METRICS = ("request_throughput", "median_ttft_ms", "mean_ttft_ms", "mean_itl_ms")
FOUR_DIGITS = 1000
VARIANTS = {
    "fit as published: 4.2 ms a prompt": (),
    "and the default's front end: 40 ms": ("front_end={latency_in: 40 ms, waits_for_prefill: false}",),
    "and these 40 ms one after another": ("front_end={service: 40 ms, waits_for_prefill: false}",),
    "the default cost": ("cost=kernels",),
}


def simulated(changes: Sequence[str], seeds: Sequence[int]) -> dict[str, float]:
    runs = [simulate(load_scenario(HERE / "scenario.yaml", [*changes, f"seed={seed}"])).summary() for seed in seeds]
    return {metric: fmean(run[metric] for run in runs) for metric in METRICS}


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= FOUR_DIGITS else f"{value:.4g}"


def main() -> None:
    told = read_yaml(HERE / "measured.yaml")
    print(f"| arm | | {' | '.join(f'`{metric}`' for metric in METRICS)} |")
    print(f"|---|---|{'---|' * len(METRICS)}")
    for arm in ARMS:
        setting = told["arms"][arm]
        measured = {metric: fmean(run[metric] for run in setting["runs"] if metric in run) for metric in METRICS}
        rows = {"*measured*": measured}
        for name, changes in VARIANTS.items():
            rows[name] = simulated([*setting.get("set", ()), *changes], told["seeds"])
        for name, values in rows.items():
            print(f"| {arm} | {name} | {' | '.join(f'{shown(values[metric])}' for metric in METRICS)} |")


if __name__ == "__main__":
    main()
