"""Finds the runs that a command shows: run folders, other tools' results, and scenarios, which are simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pdsim.cli.finished import FinishedRun, progress_over, saying
from pdsim.cli.runner import run_scenario
from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.cost.kernels import origins
from pdsim.cost.settings import Kernels
from pdsim.files import require_empty_or_own, temporary_folder
from pdsim.formats.results.reading import is_result, read_results
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics import run_folder
from pdsim.metrics.records import RunRecords
from pdsim.scenario.building.cluster import build
from pdsim.scenario.building.sizing import layout_of, roles
from pdsim.scenario.loading import load_scenario
from pdsim.scenario.schema import Scenario
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.uncertainty.sensitivity import Sensitivity, num_runs, sensitivities
from pdsim.study.repetition import MOST_REQUESTS, NUM_REPEATS, ComparedRun, kept_repetitions, repeat
from pdsim.system.catalog import names
from pdsim.workload.client import ClosedLoop

COMPARISON = "compare.png"


def obtain_runs(
    paths: Sequence[Path], changes: Sequence[str], out: Path | None, *, quiet: bool, force: bool = False
) -> list[FinishedRun]:
    """Reads run folders and results of other tools, and simulates scenario files with `changes`. If the user interrupts
    a run, it is the last one that is returned. out: folder for the simulated runs; None: they are not kept. force:
    True: runs in `out` may be replaced. changes: changes of scenario files, in the notation of --set; without effect on
    run folders. quiet: True: no progress is shown.
    """
    from pdsim.metrics.columns import StoredRecords

    _require_scenario(paths, changes)
    folders = {} if out is None else _folders(paths, changes, out, force=force)
    runs: list[FinishedRun] = []
    for path in paths:
        if path.is_dir():
            summary = run_folder.read_summary(path)
            name, records = summary.get("tag") or path.name, StoredRecords(path)
            found = [FinishedRun(name, summary, records, scenario=_scenario_in(path))]
        elif is_result(path):
            results = read_results(path)
            found = [FinishedRun(f"{one.name} ({one.tool})", one.summary, RunRecords()) for one in results]
        else:
            found = [run_scenario(path, changes, folders.get(path), quiet=quiet, levels=True, force=force)]
        for run in found:
            if any(run.name == other.name for other in runs):
                run.name = f"{run.name} ({path})"
            runs.append(run)
        if runs[-1].interrupted:
            break
    for run in runs[1:]:
        _warn_of_other_machine(run, runs[0])
    return runs


def _require_scenario(paths: Sequence[Path], changes: Sequence[str]) -> None:
    """Raises ConfigError if there are changes, and no path is a scenario file that they could change."""
    if changes and not any(_is_scenario(path) for path in paths):
        raise ConfigError(f"--set {changes[0]}: changes a scenario file, and {paths[0]} is the result of a run")


def _is_scenario(path: Path) -> bool:
    """True for the path of a scenario file, False for that of a run folder or of another tool's result."""
    return not (path.is_dir() or is_result(path))


def compared_runs(
    runs: Sequence[FinishedRun], paths: Sequence[Path], changes: Sequence[str], repeats: int | None, *, quiet: bool
) -> list[ComparedRun]:
    """Runs with their repetitions. No run is repeated unless there are at least two, all were simulated, and none was
    interrupted. paths: the file or folder of each run. changes: changes of scenario files, in the notation of --set.

    repeats: number of repetitions of each run; None: NUM_REPEATS, or none if a run has more than MOST_REQUESTS finished
    requests. quiet: True: no progress is shown.
    """
    sources = [(path, () if path.is_dir() else changes) for path in paths]
    is_long = any(run.summary.get("completed", 0) > MOST_REQUESTS for run in runs)
    count = (0 if is_long else NUM_REPEATS) if repeats is None else repeats
    can_repeat = len(runs) == len(paths) > 1 and all(_is_simulated(run) for run in runs)
    found = [ComparedRun(run.name, run.summary, run.judged, run.scenario) for run in runs]
    if not (count and can_repeat):
        return found
    with temporary_folder("pdsim-repeats-") as temporary, progress_over("repetitions", None, quiet=quiet) as advance:
        for i, (path, own_changes) in enumerate(sources):
            kept = kept_repetitions(path) or temporary
            file = path / run_folder.SCENARIO if path.is_dir() else path
            found[i] = replace(found[i], repeated=repeat(file, own_changes, count, kept, advance))
    return found


def _is_simulated(run: FinishedRun) -> bool:
    return run.scenario is not None and run.summary.get("backend") == "pdsim" and not run.interrupted


def _folders(paths: Sequence[Path], changes: Sequence[str], out: Path, *, force: bool) -> dict[Path, Path]:
    """The run folder of each scenario file in `paths`: a folder in `out` with the scenario's name. All folders are
    checked before the first scenario is simulated. Raises ConfigError if two scenarios have the same name, and
    InputError if `out` or one of the folders cannot be written to. changes: changes of the scenarios. force: True: a
    run in the folder of a scenario may be replaced.
    """
    folders: dict[Path, Path] = {}
    run_folder.require_out(out)
    there = [path.name == COMPARISON or run_folder.holds_run(path) for path in (out.iterdir() if out.is_dir() else ())]
    require_empty_or_own(out, "runs", is_own=any(there))
    for path in paths:
        if not _is_scenario(path):
            continue
        folder = out / load_scenario(path, changes).name
        if folder in folders.values():
            raise ConfigError(f"{path}: another run is named {folder.name} too, and {folder} holds one run; rename one")
        run_folder.require_out_of_run(folder, force=force)
        folders[path] = folder
    return folders


def _warn_of_other_machine(run: FinishedRun, first: FinishedRun) -> None:
    """Adds a warning to the summary of `run` if one of the two runs was measured or predicted for a CPU, and the other
    for a GPU.
    """
    devices = [str(one.summary.get("pdsim", {}).get("device", "")) for one in (run, first)]
    on_gpus = {device == "cuda" or device.partition(" and ")[0] in names("gpus") for device in devices}
    if all(devices) and len(on_gpus) > 1:
        difference = f"times of {devices[0]}, those of {first.name} are of {devices[1]}"
        why = f"different machines: {difference}, so differences are not errors of the simulation"
        run.summary["pdsim"]["warnings"] = [*run.warnings, why]


def _scenario_in(folder: Path) -> Scenario | None:
    """The scenario in a run folder. None: there is none, or this version of pdsim cannot read it."""
    try:
        return load_scenario(folder / run_folder.SCENARIO)
    except ConfigError:
        return None


def scenario_of(path: Path, changes: Sequence[str]) -> Scenario:
    """The scenario of a run folder, or of a scenario file with changes. Raises ConfigError if another tool made the
    result.
    """
    if is_result(path):
        raise ConfigError(f"{path} is a result of another tool; expected a run folder or a scenario file")
    _require_scenario([path], changes)
    if path.is_dir():
        run_folder.read_summary(path)
        return load_scenario(path / run_folder.SCENARIO)
    return load_scenario(path, changes)


def obtain_sensitivities(path: Path, changes: Sequence[str], *, quiet: bool) -> list[Sensitivity]:
    """Finds how the metrics of a scenario change with 10 % more of each resource, by simulation. path: a scenario file
    or a run folder. For the folder of a real run, the scenario in the folder is simulated. quiet: True: no progress is
    shown.
    """
    scenario = scenario_of(path, changes)
    with progress_over("10 % more", num_runs(scenario), quiet=quiet) as advance:
        return sensitivities(scenario, progress=advance)


class StepTerms(NamedTuple):
    step: str
    """Kind of the step, for the table: prefill forward or decode step."""
    instance_id: str
    num_requests: int
    """Number of requests that the step serves."""
    new_tokens: int
    """Number of tokens that the step computes for all its requests together."""
    context_tokens: int
    """Number of KV tokens that the step reads for all its requests together."""
    terms_ms: dict[str, float]
    """Parts of the time of the step in ms, by name. Their sum is the time."""


def typical_steps(scenario: Scenario) -> list[StepTerms]:
    """Returns a prefill forward and a decode step, with the times that add up to their durations. The forward computes
    one prompt of mean length, or its first chunk, without cached tokens. The requests of the decode step are in the
    middle of their outputs.

    Three numbers limit the requests of the decode step, and the smallest counts, but at least 1: the maximum number of
    running requests of an instance, the number of requests whose KV fits into the instance's pool, and the instance's
    share of the requests in flight. The requests in flight are as many as the clients of a closed loop, or else all
    requests of the workload. Raises ConfigError if the workload has no requests.
    """
    cluster = build(scenario)
    scenario, requests = cluster.scenario, cluster.requests
    if not requests:
        raise ConfigError(f"{scenario.name}: the workload has no requests, so there is no typical step")
    computing, decoding = scenario.servers
    prefill_id, decode_ids = next(iter(cluster.costs)), [i for i in cluster.costs if not i.startswith("prefill")]
    prompt_tokens = fmean(len(request.prompt) for request in requests)
    new_tokens = min(round(prompt_tokens), computing.rank_chunk_tokens or round(prompt_tokens))
    forward = PrefillStep(0, (PrefillChunk(0, 0, new_tokens, is_last=True),))
    context_tokens = prompt_tokens + fmean(len(request.output) for request in requests) / 2
    sent = scenario.client.concurrency if isinstance(scenario.client, ClosedLoop) else len(requests)
    most = (decoding.resolved_max_running, int(decoding.capacity_tokens / context_tokens))
    batch = max(1, min(ceil(min(sent, len(requests)) / len(decode_ids)), *most))
    kv_tokens = round(batch * context_tokens)
    prefill_ns = cluster.costs[prefill_id].prefill_terms(forward)
    decode_ns = cluster.costs[decode_ids[0]].decode_terms(batch, kv_tokens, kv_tokens)
    return [
        StepTerms("prefill forward", prefill_id, 1, new_tokens, 0, _in_ms(prefill_ns)),
        StepTerms("decode step", decode_ids[0], batch, batch, kv_tokens, _in_ms(decode_ns)),
    ]


def kernels_of(scenario: Scenario) -> dict[str, dict[str, str]]:
    """For each role whose cost comes from kernels: a text for each operator, by operator, which says if its times were
    measured on the role's GPU or are medians of other GPUs.
    """
    costs = {role: scenario.cost.decode if role == "decode" else scenario.cost.prefill for role in roles(scenario)}
    return {role: origins(layout_of(scenario, role)) for role, cost in costs.items() if isinstance(cost, Kernels)}


def _in_ms(terms_ns: Mapping[str, float]) -> dict[str, float]:
    return {name: duration_ns / 1e6 for name, duration_ns in terms_ns.items()}


def write_comparison(path: Path, runs: Sequence[FinishedRun], *, quiet: bool) -> None:
    with saying(f"writing {path} ...", quiet=quiet), garbage_collection_paused():
        from pdsim.metrics.plots import comparison, write_figure

        records = {run.name: run.judged for run in runs if run.is_observed}
        write_figure(path, comparison({run.name: run.summary for run in runs}, records))
