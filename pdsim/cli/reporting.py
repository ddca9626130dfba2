"""Makes the page that reports on runs or a sweep, from their paths."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pdsim.cli.runner import obtain_runs, obtain_sensitivities
from pdsim.metrics.run_folder import SCENARIO
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.sizing import resolve
from pdsim.scenario.yaml_file import ConfigError
from pdsim.show.page import Page
from pdsim.show.plan_page import FILE as PLAN
from pdsim.show.plan_page import plan_page
from pdsim.show.run_page import ReportedRun, run_page
from pdsim.show.sweep_page import sweep_page
from pdsim.sim.sensitivity import Sensitivity
from pdsim.study.result import is_sweep_folder, read_sweep


def make_page(paths: Sequence[Path], changes: Sequence[str], *, with_tornado: bool, quiet: bool) -> Page:
    """Raises ConfigError for a sweep beside something else."""
    if len(paths) == 1 and (paths[0] / PLAN).is_file():
        return plan_page(paths[0])
    sweeps = [path for path in paths if is_sweep_folder(path)]
    if not sweeps:
        return run_page(_reported(paths, changes, with_tornado=with_tornado, quiet=quiet))
    if len(paths) > 1:
        raise ConfigError(f"{sweeps[0]} is a sweep: report one at a time, or runs side by side")
    if with_tornado:
        raise ConfigError("--tornado is of a run; the page of a sweep says which of its fields matters")
    result = read_sweep(sweeps[0])
    if result.num_damaged:
        left_out = f"damaged runs: {result.num_damaged}; their points are left out, until the sweep is started again"
        print(f"pdsim: {sweeps[0]}: {left_out}", file=sys.stderr)
    return sweep_page(result)


def _reported(paths: Sequence[Path], changes: Sequence[str], *, with_tornado: bool, quiet: bool) -> list[ReportedRun]:
    runs = obtain_runs(paths, changes, None, quiet=quiet)
    scenarios = [_scenario(path, changes) for path in paths]
    if len(scenarios) != len(runs):  # a file with the results of several runs
        scenarios = [None] * len(runs)
    found: Sequence[Sensitivity] = ()
    if with_tornado:
        if len(runs) > 1:
            raise ConfigError("--tornado is of one run: report it alone")
        found = obtain_sensitivities(paths[0], changes, quiet=quiet)
    return [
        ReportedRun(run.name, run.summary, run.records, scenario, found)
        for run, scenario in zip(runs, scenarios, strict=True)
    ]


def _scenario(path: Path, changes: Sequence[str]) -> Scenario | None:
    """Resolved; None of what has none."""
    if path.is_dir():
        kept = path / SCENARIO
        return resolve(load_scenario(kept)) if kept.is_file() else None
    return None if path.suffix in (".json", ".jsonl") else resolve(load_scenario(path, changes))
