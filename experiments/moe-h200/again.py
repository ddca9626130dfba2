"""Rows and runs of another H200, whose decode steps were measured before prefill: python experiments/moe-h200/again.py

`again/` has the rows and the summary of each run, from the commands of README's set-up, 2026-11-27.
"""

from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from pdsim import simulate
from pdsim.calibration.fit.profile import calibrate, profile_of
from pdsim.calibration.fit.rows import read_rows
from pdsim.inputs import read_json
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.yaml_file import read_yaml, write_yaml

HERE = Path(__file__).parent
RUNS = HERE / "again"
VARIANTS = {
    name: changes for name, changes in read_yaml(HERE / "matrix.yaml")["variants"].items() if name != "poisson5"
}
"""The run of `poisson5` was not kept."""
METRICS = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms")


def errors() -> dict[str, list[tuple[float, float]]]:
    """Measured and simulated value of each metric, by variant."""
    profile = profile_of(calibrate(read_rows([RUNS / "rows.csv"])), "again", "")
    found = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        write_yaml(profile, path)
        fitted = f"cost={{profile: {path}}}", f"front_end={dumps(profile['front_end'])}"
        for name, changes in VARIANTS.items():
            summary = simulate(load_scenario(HERE / "scenario.yaml", (*changes, *fitted))).summary()
            run = read_json(RUNS / f"{name}.json")
            found[name] = [(run[metric], summary[metric]) for metric in METRICS]
    return found


def main() -> None:
    print(f"| variant | {' | '.join(f'`{metric}` | simulated | error' for metric in METRICS)} |\n|---|{9 * '---|'}")
    for name, values in errors().items():
        cells = (f"{run:.4g} | {found:.4g} | {found / run - 1:+.1%}" for run, found in values)
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
