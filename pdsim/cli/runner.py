"""Runs scenarios with a progress bar and keeps their results, also after an interruption."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.cli.finished import FinishedRun, Kept, progress_over, saying, write_run
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics import run_folder
from pdsim.metrics.summary_rows import ranges
from pdsim.scenario.building.cluster import Cluster, build
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError, named
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation

if TYPE_CHECKING:
    from pdsim.cli.judging import Judge
    from pdsim.sim.uncertainty.ends import Ends, Ranging
    from pdsim.sim.uncertainty.part import PartWatch
    from pdsim.study.verdict.slo import Slo


@garbage_collection_paused()
def run_scenario(
    path: Path,
    changes: Sequence[str],
    out: Path | None,
    *,
    quiet: bool,
    levels: bool = False,
    force: bool = False,
    ranging: "Ranging" = "part",
    slo: "Slo | None" = None,
    keep: Collection[Kept] = (),
) -> FinishedRun:
    """Simulates a scenario. With `out`, also writes the run folder.

    changes: changes of the scenario, in the notation of --set. quiet: True: no progress is shown. levels: True: also
    records requests and pages of instances over time; a run with `out` always records them. force: True: a run in `out`
    may be replaced. ranging: load that is also simulated with the fastest and slowest step times, if these were not
    measured on a server: "none", "part" (the first requests of a long load) or "whole". slo: limits that judge the run,
    written to pdsim.slo in the summary. keep: optional files to write into the folder.

    Raises ConfigError if the scenario is wrong, or if the SLO names a class that no request has. Raises RunFolderError
    or ForeignFileError if the run must not be written to `out`.
    """
    if out is None:
        return _simulate(path, changes, None, quiet=quiet, levels=levels, ranging=ranging, slo=slo)
    run_folder.require_out_of_run(out, force=force)
    with run_folder.run_replaced(out) as folder:
        return _simulate(path, changes, folder, quiet=quiet, levels=True, ranging=ranging, slo=slo, keep=keep)


def _simulate(
    path: Path,
    changes: Sequence[str],
    folder: Path | None,
    *,
    quiet: bool,
    levels: bool,
    ranging: "Ranging",
    slo: "Slo | None",
    keep: Collection[Kept] = (),
) -> FinishedRun:
    try:
        loaded = load_scenario(path, changes)
    except ConfigError:
        from pdsim.formats.results.reading import is_result

        if is_result(path):
            raise ConfigError(f"{path} is a result of another tool: pdsim compare shows it") from None
        raise
    with named(path):
        cluster = build(loaded)
    scenario = cluster.scenario
    judge = None if slo is None else _judge(slo, loaded, cluster)
    verdict_of, own_itl = (None, False) if judge is None else (judge.verdict, judge.needs_own_itl)
    with ExitStack() as stack:
        ends = None
        if ranging != "none" and loaded.uncertain:
            from pdsim.sim.uncertainty.ends import Ends

            ends = Ends(loaded, cluster.requests, whole=ranging == "whole", verdict_of=verdict_of, own_itl=own_itl)
            stack.enter_context(ends.started())
        journal = None
        if folder is not None:
            from pdsim.metrics.journal_file import journal_writer  # only runs that are kept pay for it

            journal = stack.enter_context(journal_writer(folder))
        watch = None if ends is None else ends.watch
        with progress_over(scenario.name, len(cluster.requests), quiet=quiet) as advance:
            observation = Observation(journal=journal, levels=levels, progress=advance, ended=watch, own_itl=own_itl)
            result, interrupted = _until_interrupted(Simulation(cluster, observation), watch)
        summary = result.summary()
        summary["pdsim"]["interrupted"] = interrupted
        if ends is not None and not interrupted:
            with saying(f"{scenario.name}: simulating both ends of its range ...", quiet=quiet):
                summary["pdsim"] |= _interval(summary, ends)
    examined = None
    if judge is not None:
        at_ends = [] if ends is None else ends.verdicts
        examined = judge.examined(result, at_ends, interrupted=interrupted, quiet=quiet)
        summary["pdsim"]["slo"] = {"slo": str(slo), **examined.to_json()}
    finished = FinishedRun(scenario.name, summary, result.records, result.stall, interrupted, loaded, examined)
    if folder is not None and journal is not None:
        write_run(folder, scenario, finished, journal.proof, keep=keep, quiet=quiet)
    return finished


def _judge(slo: "Slo", scenario: Scenario, cluster: Cluster) -> "Judge":
    from pdsim.cli.judging import Judge

    slo.require_classes(cluster.requests)
    return Judge(slo, scenario)


def _until_interrupted(simulation: Simulation, watch: "PartWatch | None") -> tuple[RunResult, bool]:
    """Runs a simulation until it ends or the user interrupts it. Returns the result so far, and True if the user
    interrupted. watch: observer that notes the numbers of the run's first requests; None: there is none.
    """
    if watch is not None:
        watch.simulation = simulation
    try:
        return simulation.run(), False
    except KeyboardInterrupt:
        return simulation.result(), True


def _interval(summary: Mapping[str, Any], ends: "Ends") -> dict[str, Any]:
    """Fields of the summary for ranges. "interval": smallest and largest value of each metric, over the run and the
    runs with the fastest and slowest step times. If one of these two runs simulated only the first requests of the
    load, also "interval_requests": the number of these requests, and "interval_error": the highest relative standard
    error of the changes that were extrapolated from them.
    """
    found = {"interval": ranges([summary, *ends.numbers(summary)])}
    if ends.part_requests is None:
        return found
    return {**found, "interval_requests": ends.part_requests, "interval_error": ends.error}
