"""Commands on runs: run, compare, report, replay, export."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from pdsim.cli.command import (
    NO_LOAD,
    Details,
    Force,
    Json,
    Load,
    Out,
    ProfileFiles,
    RunOrScenario,
    Seed,
    Set,
    Tornado,
    out_at,
    print_json,
    profile_changes,
)
from pdsim.cli.finished import FinishedRun, Kept, fail_if_incomplete, print_warnings
from pdsim.files import temporary_folder, write_whole
from pdsim.metrics.run_folder import require_out_file
from pdsim.scenario.yaml_file import ConfigError

if TYPE_CHECKING:
    from pdsim.scenario.load_options import LoadOptions
    from pdsim.scenario.schema import Scenario
    from pdsim.show.html.page import Page
    from pdsim.sim.uncertainty.ends import Ranging
    from pdsim.study.repetition import ComparedRun
    from pdsim.study.verdict.slo import Slo


def run(
    scenario: Annotated[
        Path | None, Parameter(help="Scenario file (YAML) [a built-in scenario with four H200].")
    ] = None,
    /,
    *,
    load: Load = NO_LOAD,
    no_ranges: Annotated[
        bool,
        Parameter(
            help="Print numbers without ranges. Where no server was measured, this saves two of three simulations."
        ),
    ] = False,
    whole_ranges: Annotated[
        bool,
        Parameter(help="Simulate the ends of the ranges with the whole load. By default a long load is cut for them."),
    ] = False,
    slo: Annotated[
        str | None,
        Parameter(help="SLO for the run to meet: ttft p99 < 2 s, or ttft < 2 s and tpot < 50 ms for 95 %."),
    ] = None,
    set_: Set = (),
    profile: ProfileFiles = (),
    seed: Seed = None,
    out: Out = None,
    keep: Annotated[
        tuple[Kept, ...],
        Parameter(help="Write into --out, too: a timeline for Perfetto, a figure. May be given again."),
    ] = (),
    force: Force = False,
    details: Details = False,
    json_: Json = False,
) -> None:
    """Simulate a scenario and print its summary."""
    from pdsim.cli.runner import run_scenario
    from pdsim.garbage import garbage_collection_paused

    if keep and out is None:
        raise ConfigError(f"--keep {' --keep '.join(keep)}: give --out FOLDER to write into")
    own = set_ if seed is None else (*set_, f"seed={seed}")
    given = (*profile_changes(profile), *own)
    with garbage_collection_paused(), _file_or_starter(scenario, load, given) as (file, changes):
        wanted = None if slo is None else _parsed(slo)
        ranging: Ranging = "none" if no_ranges else "whole" if whole_ranges else "part"
        finished = run_scenario(file, changes, out, quiet=json_, force=force, ranging=ranging, slo=wanted, keep=keep)
        gc.freeze()  # the process ends soon: what is there need not be searched
    if json_:
        print_json(finished.summary)
    else:
        from pdsim.show.terminal.run import explain_command, print_run

        explained = ""
        if out is not None:
            explained = explain_command(out)
        elif scenario is not None:
            explained = explain_command(scenario, (*load.changes(has_own_load=True), *own), profile)
        assert finished.scenario is not None
        shown = finished.name, finished.summary, finished.judged, finished.scenario, finished.examined
        print_run(*shown, explain=explained, details=details)
        if out is not None:
            print(f"run folder: {out}")
    fail_if_incomplete(finished)


def _parsed(slo: str) -> "Slo":
    from pdsim.study.verdict.slo import Slo

    return Slo.parse(slo)


@contextmanager
def _file_or_starter(
    scenario: Path | None, load: "LoadOptions", changes: tuple[str, ...]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Context with a scenario file, and changes of its fields: those of the load, then `changes`. If the user names no
    file, the file is a generated scenario that contains load and changes, so no changes are left. Raises ConfigError if
    the user gives no file and no load, or if load or changes are wrong.
    """
    if scenario is not None:
        yield scenario, (*load.changes(has_own_load=True), *changes)
        return
    from pdsim.scenario.load_options import require_load
    from pdsim.scenario.starter import StarterOptions, first_scenario
    from pdsim.scenario.yaml_file import write_yaml

    require_load(load, changes)
    with temporary_folder("pdsim-run-") as folder:
        file = folder / "starter.yaml"
        try:
            write_yaml(first_scenario(StarterOptions(**asdict(load)), changes, file=file), file)
            yield file, ()
        except ConfigError as wrong:
            raise ConfigError(str(wrong).replace(str(file), "--set")) from None


def compare(
    *runs: Annotated[
        Path,
        Parameter(
            help="Scenario files, which are simulated, folders of earlier runs, or results of load generators "
            "(docs/formats.md lists them)."
        ),
    ],
    set_: Set = (),
    profile: ProfileFiles = (),
    repeats: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=0, lte=4),
            help="Repetitions of each run, which say which differences are chance [4; 0 above 5,000 requests].",
        ),
    ] = None,
    out: Annotated[Path | None, out_at("Folder for compare.png and the folders of simulated runs.")] = None,
    force: Force = False,
    details: Details = False,
    json_: Json = False,
) -> None:
    """Show runs side by side, each with its difference from the first run. A single run is shown alone."""
    from pdsim.cli.obtaining import COMPARISON, compared_runs, obtain_runs, write_comparison

    set_ = (*profile_changes(profile), *set_)
    if not runs:
        raise ConfigError("compare needs scenarios, run folders or results")
    finished = obtain_runs(runs, set_, out, quiet=json_, force=force)
    compared = compared_runs(finished, runs, set_, repeats, quiet=json_)
    if json_:
        print_json([_as_json(compared[0], run) for run in compared])
    else:
        _print_compared(finished, compared, details=details)
    if out is not None:
        write_comparison(out / COMPARISON, finished, quiet=json_)
        if not json_:
            print(f"run folders and {COMPARISON}: {out}")
    fail_if_incomplete(*finished)


def _as_json(first: "ComparedRun", run: "ComparedRun") -> dict[str, Any]:
    from pdsim.show.terminal.compare import changes_of

    changes = {} if run is first else {name: asdict(one) for name, one in changes_of(first, run).items()}
    return {"run": run.name, **run.summary, **({"differences": changes} if changes else {})}


def _print_compared(finished: Sequence[FinishedRun], compared: "Sequence[ComparedRun]", *, details: bool) -> None:
    from pdsim.metrics.summary_rows import ranges_of
    from pdsim.show.terminal.compare import print_comparison
    from pdsim.show.terminal.run import is_of_kernels
    from pdsim.show.terminal.tables import print_range_notes, print_ranges, print_stages, print_summaries, print_usage

    print_comparison(compared)
    print()
    for run in finished:
        print_warnings(run, besides=None if details else is_of_kernels)
    if not details:
        print("Say more:   the same command with --details")
        return
    summaries = {run.name: run.summary for run in finished}
    print_summaries(summaries)
    print_ranges({run.name: ranges_of(run.summary) for run in finished})
    print_range_notes(summaries)
    if observed := [run for run in finished if run.is_observed]:
        print_stages({run.name: run.judged for run in observed})
        print_usage({run.name: run.records for run in observed})


def report(
    *paths: Annotated[
        Path,
        Parameter(
            help="Folder of a sweep or plan; or run folders, scenario files to simulate, results that compare reads."
        ),
    ],
    out: Annotated[Path, out_at("HTML file to write.")] = Path("report.html"),
    tornado: Tornado = False,
    set_: Set = (),
    profile: ProfileFiles = (),
    json_: Json = False,
) -> None:
    """Write one HTML file with figures and tables of runs, of a sweep, or of a plan."""
    from pdsim.show.html.page import render

    set_ = (*profile_changes(profile), *set_)
    if not paths:
        raise ConfigError("report needs a run folder, a scenario file, or the folder of a sweep")
    require_out_file(out, paths, "<!doctype html")
    page = _page(paths, set_, with_tornado=tornado, quiet=json_)
    html = render(page)
    write_whole(out, html)
    if json_:
        print_json({"report": str(out), "bytes": len(html.encode()), "answer": page.answer})
    else:
        print(f"{page.answer}\nreport: {out}")


def _page(paths: Sequence[Path], changes: Sequence[str], *, with_tornado: bool, quiet: bool) -> "Page":
    """The page of runs, of a sweep or of a plan. changes: changes of scenario files, in the notation of --set.
    with_tornado: also show which resource limits a single run; without effect on the page of a plan. quiet: True: no
    progress is shown. Raises ConfigError if a sweep is given together with other paths, if a plan or an answer is
    unfinished, or if with_tornado is given with a sweep or with several runs.
    """
    from pdsim.show.html.plan import FILE as PLAN
    from pdsim.show.html.plan import plan_page
    from pdsim.show.html.sweep import sweep_page
    from pdsim.study.points.store import has_points
    from pdsim.study.sweeping.sweep import is_sweep_folder, read_sweep

    if len(paths) == 1 and (paths[0] / PLAN).is_file():
        return plan_page(paths[0])
    sweeps = [path for path in paths if is_sweep_folder(path)]
    if not sweeps and (begun := [path for path in paths if has_points(path) and not (path / PLAN).is_file()]):
        raise ConfigError(f"{begun[0]}: an unfinished plan or answer; run its command again to complete it")
    if not sweeps:
        return _run_page(paths, changes, with_tornado=with_tornado, quiet=quiet)
    if len(paths) > 1:
        raise ConfigError(f"{sweeps[0]} is a sweep: report one at a time, or runs side by side")
    if with_tornado:
        raise ConfigError("--tornado needs a run; the page of a sweep shows which field matters")
    result = read_sweep(sweeps[0])
    if result.num_damaged:
        left_out = f"damaged runs: {result.num_damaged}; their points are left out, until the sweep is started again"
        print(f"pdsim: {sweeps[0]}: {left_out}", file=sys.stderr)
    return sweep_page(result)


def _run_page(paths: Sequence[Path], changes: Sequence[str], *, with_tornado: bool, quiet: bool) -> "Page":
    from pdsim.cli.obtaining import obtain_runs, obtain_sensitivities
    from pdsim.show.html.run import ReportedRun, run_page

    runs = obtain_runs(paths, changes, None, quiet=quiet)
    scenarios = [_scenario(path, changes) for path in paths]
    if len(scenarios) != len(runs):  # a file with the results of several runs
        scenarios = [None] * len(runs)
    if with_tornado and len(runs) > 1:
        raise ConfigError("--tornado needs a single run: report it alone")
    found = obtain_sensitivities(paths[0], changes, quiet=quiet) if with_tornado else ()
    pairs = zip(runs, scenarios, strict=True)
    return run_page([ReportedRun(run.name, run.summary, run.records, scenario, found) for run, scenario in pairs])


def _scenario(path: Path, changes: Sequence[str]) -> "Scenario | None":
    """The resolved scenario of a run folder or scenario file. None: the folder has no scenario, or the path is a .json
    or .jsonl file, which is a result of another tool. changes: changes of the scenario file, in the notation of --set.
    """
    from pdsim.formats.results.reading import is_result
    from pdsim.metrics.run_folder import SCENARIO
    from pdsim.scenario.building.sizing import resolve
    from pdsim.scenario.loading import load_scenario

    if path.is_dir():
        kept = path / SCENARIO
        return resolve(load_scenario(kept)) if kept.is_file() else None
    return None if is_result(path) else resolve(load_scenario(path, changes))


_WHY_DIFFERENT = (
    "Reasons for a difference: another release of pdsim made the run, the run's files were changed, or a policy "
    "depends on a clock, on random, or on the order of a set."
)


def replay(
    run: Annotated[Path, Parameter(help="Run folder with a journal, simulated or real.")], *, json_: Json = False
) -> None:
    """Repeat the recorded calls of a run on new instances, and check that they decide the same."""
    from pdsim.core.journal.replay import ReplayError
    from pdsim.core.journal.replay import replay as replay_journal
    from pdsim.metrics.journal_file import proves_its_journal, read_journal
    from pdsim.metrics.run_folder import SCENARIO, read_summary
    from pdsim.metrics.summary_rows import counted
    from pdsim.scenario.building.machines import restarted, state_machines
    from pdsim.scenario.building.sizing import resolve
    from pdsim.scenario.loading import load_scenario

    is_proved = proves_its_journal(read_summary(run))
    scenario = resolve(load_scenario(run / SCENARIO))
    try:
        count = replay_journal(read_journal(run), state_machines(scenario), partial(restarted, scenario))
    except ReplayError as difference:
        if json_:
            print_json({"run": str(run), "identical": False, "difference": str(difference)})
        else:
            print(f"{run}: {difference}\n{_WHY_DIFFERENT}", file=sys.stderr)
        raise SystemExit(1) from None
    if json_:
        print_json({"run": str(run), "identical": True, "calls": count, "complete": is_proved or None})
    else:
        print(f"{run}: {counted(count, 'call')} replayed, all decisions identical")
        if not is_proved:
            print("an earlier release made this run: its summary does not count the calls, and some may be missing")


def export(
    run: RunOrScenario,
    *,
    to: Annotated[
        Literal["sglang", "vllm", "aiperf", "inferencex", "mooncake", "agentic_mooncake", "perfetto"],
        Parameter(help="Tool whose format to write."),
    ],
    out: Annotated[Path, out_at("File to write.")],
    block_tokens: Annotated[
        int, Parameter(validator=Number(gte=1), help="For traces: number of prompt tokens per hash id.")
    ] = 512,
    set_: Set = (),
) -> None:
    """Write a run as another tool's result file, its requests as a Mooncake trace, or its timeline for Perfetto."""
    from pdsim.cli.obtaining import obtain_runs, scenario_of
    from pdsim.formats.results.exports import Run, write_result
    from pdsim.metrics.timeline import write_timeline
    from pdsim.scenario.building.cluster import requests_of
    from pdsim.workload.hash_ids import NotASessionError, agentic_rows, mooncake_rows, write_mooncake

    require_out_file(out, [run], "\x1f\x8b" if to == "perfetto" else "{")
    scenario = scenario_of(run, set_)
    (finished,) = obtain_runs((run,), set_, None, quiet=False)
    rows = {"mooncake": mooncake_rows, "agentic_mooncake": agentic_rows}
    if to in rows:
        sent_ns = {request.request_id: request.arrival_ns for request in finished.records.requests}
        try:
            write_mooncake(out, rows[to](requests_of(scenario), sent_ns, block_tokens=block_tokens))
        except NotASessionError as wrong:
            raise ConfigError(f"{run}: {wrong}; --to agentic_mooncake keeps which request waits for which") from None
    elif to == "perfetto":
        write_timeline(out, finished.records)
    else:
        write_result(out, to, Run(finished.summary, finished.judged.requests, scenario))
    print(f"{to}: {out}")
    fail_if_incomplete(finished)
