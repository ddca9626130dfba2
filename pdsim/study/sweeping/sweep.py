"""Runs the points of a sweep file, and reads the results from the sweep's folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pdsim.inputs import parse_json, read_json, read_text
from pdsim.metrics.run_folder import require_out
from pdsim.scenario.building.room import POINT_BYTES, POINT_S, require_room
from pdsim.scenario.loading import Changes
from pdsim.scenario.sections.cost import ENDS
from pdsim.scenario.yaml_file import ConfigError
from pdsim.sim.uncertainty.noise import JITTERS
from pdsim.study.base import is_sample, jittered_messages
from pdsim.study.points.engine import Progress, Work, open_engine
from pdsim.study.points.result import PointResult, Replication, SweepResult, replication
from pdsim.study.points.store import DAMAGED, HEAD, PLAN, Store, locked_folder
from pdsim.study.points.tasks import Planner, Point
from pdsim.study.sweeping.sweep_file import (
    NUM_RANGES,
    Range,
    SearchSettings,
    assigned,
    designed_points,
    load_sweep,
    num_points,
)
from pdsim.study.verdict.slo import Slo

_BATCH = 8
"""Number of points that the search chooses at a time. The number is fixed, so that results do not depend on the number
of workers.
"""

Evaluate = Callable[[Sequence[Changes]], Sequence[PointResult]]


def sweep(
    path: Path | str,
    *,
    out: Path | str | None = None,
    changes: Sequence[str] = (),
    jobs: int | None = None,
    engine: str = "pool",
    ranges: int = NUM_RANGES,
    progress: Progress | None = None,
) -> SweepResult:
    """Compute those points of a sweep file that the sweep's folder lacks, and return the results of all points.

    Args:
        path: A sweep file (YAML); docs/sweeps.md has its fields.
        out: The sweep's folder; None: runs/NAME. Runs in this folder are not computed again.
        changes: Changes of the base scenario, as "dotted.path=value".
        jobs: Number of processes of the pool; None: one for each CPU.
        engine: Where to simulate: pool (processes), here (this process), ray or ray:ADDRESS.
        ranges: Number of best points of each SLO (without SLOs: by requests per second and GPU) to simulate also with
            the fastest and the slowest step times of their range, and with slightly faster and slower messages if the
            load is a recorded trace.
        progress: Called after each run.

    Raises ConfigError before the first run if file, fields or values are wrong; wrong values that a search chooses are
    found during the search. A point whose cluster is impossible, or whose run fails, gets an error, and the sweep
    continues. After an interruption the folder has all finished runs.

    """
    path = Path(path)
    file = load_sweep(path)
    folder = Path("runs") / file.name if out is None else Path(out)
    require_out(folder)
    num_runs = num_points(file) * len(file.seeds or (0,))
    require_room(f"{path}: {num_runs:,} runs", num_runs * POINT_BYTES, num_runs * POINT_S)
    own_itl = any(slo.needs_own_itl for slo in file.slos.values())
    planner = Planner(str(path), path.parent / file.scenario, changes=changes, seeds=file.seeds, own_itl=own_itl)
    points = planner.plan(designed_points(file))
    if file.search is not None:
        load_optuna()
    with locked_folder(folder), closing(open_engine(engine, jobs)) as opened:
        store = Store(folder)
        work = Work(store, opened, progress, file.slos)
        store.write_head(file.name, file.slos)
        store.write_plan(points)
        work.compute(points)
        if file.search is not None:
            slo = file.searched_slo(file.search)

            def evaluate(chosen: Sequence[Changes]) -> list[PointResult]:
                found = planner.plan(chosen)
                store.write_plan(planner.points)
                work.compute(found)
                return [work.result(point) for point in found]

            search(file.search, slo, evaluate)
        results = [work.result(point) for point in planner.points]
        best = {point.number for point in SweepResult(file.name, folder, results, file.slos).leading(ranges)}
        added = [
            one
            for point in planner.points
            if point.number in best
            for one in (*planner.at_ends(point), *_repetitions(planner, point))
        ]
        if added:
            store.write_plan([*planner.points, *added])
            work.compute(added)
    runs = {(one.number, one.end): work.result(one) for one in added}
    results = [_with_runs(point, runs) for point in results]
    return SweepResult(file.name, store.folder, results, file.slos, work.num_computed, work.num_kept, work.num_damaged)


_REPEATS = [f"repeat_{i + 1}" for i in range(len(JITTERS))]


def _repetitions(planner: Planner, point: Point) -> list[Point]:
    """Copies of the point with slightly faster and slower messages, which show the effect of chance on a trace that is
    sent at its recorded times. Empty list: the load is no such trace, so that further seeds show the effect of chance;
    or the point has several seeds.
    """
    scenario = planner.scenario(point)
    if len(point.tasks) > 1 or not is_sample(scenario):
        return []
    return [planner.varied(point, *one) for one in zip(_REPEATS, jittered_messages(scenario), strict=True)]


def _with_runs(point: PointResult, runs: Mapping[tuple[int, str], PointResult]) -> PointResult:
    """Adds to a point the results of its runs with the fastest and slowest step times, and of its repetitions. If one
    of the two runs with other step times is missing, neither is added; if one repetition is missing, no repetition is
    added. runs: results, by the number and the Point.end of their points.
    """
    ends, repeats = ([runs.get((point.number, one)) for one in names] for names in (ENDS, _REPEATS))
    found = replace(point, ends=[end for end in ends if end is not None] if all(ends) else ())
    return found.repeated([one for one in repeats if one is not None]) if all(repeats) else found


def is_sweep_folder(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def read_sweep(folder: Path) -> SweepResult:
    """Reads all points whose runs are computed. Raises ConfigError if there are none, or if the folder is damaged."""
    store = Store(folder)
    if not (folder / HEAD).is_file():
        raise ConfigError(f"{folder} has no {HEAD}: start its sweep again, which keeps what is computed")
    try:
        head = read_json(folder / HEAD)
        slos = {name: Slo.of_text(wanted) for name, wanted in head["slos"].items()}
        rows = [parse_json(line, str(folder / PLAN)) for line in read_text(folder / PLAN).splitlines()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as broken:
        raise ConfigError(f"{folder}: {HEAD} or {PLAN} is damaged: {broken}; start its sweep again") from None
    keys: dict[tuple[int, str], list[str]] = {}
    changes: dict[int, Changes] = {}
    for row in rows:
        number = row.pop("point")
        keys.setdefault((number, row.pop("range_end", "")), []).append(row.pop("key"))
        changes[number] = {field: value for field, value in row.items() if field != "seed" and value is not None}
    runs, num_damaged = _kept_runs(store, chain.from_iterable(keys.values()), slos)
    computed = {
        at: PointResult(at[0], changes[at[0]], [runs[key] for key in keys[at]])
        for at in keys
        if all(key in runs for key in keys[at])
    }
    if not computed:
        raise ConfigError(f"{folder} has no computed point; start its sweep again")
    points = [_with_runs(point, computed) for (_, end), point in computed.items() if not end]
    return SweepResult(head["name"], folder, points, slos, 0, sum(len(keys[at]) for at in computed), num_damaged)


def _kept_runs(store: Store, keys: Iterable[str], slos: Mapping[str, Slo]) -> tuple[dict[str, Replication], int]:
    """Reads runs from a store, each once. Returns the runs by key, without damaged ones, and the number of damaged
    runs. keys: of the tasks of the runs. slos: SLOs that judge the runs, by name.
    """
    runs: dict[str, Replication] = {}
    num_damaged = 0
    for key in dict.fromkeys(keys):
        row = store.kept(key)
        if row is not None and row["status"] == DAMAGED:
            num_damaged += 1
        elif row is not None:
            runs[key] = replication(row, slos)
    return runs, num_damaged


def search(settings: SearchSettings, slo: str, evaluate: Evaluate) -> None:
    """Evaluates as many points as the search has trials. Optuna's TPE chooses the points; a point that is chosen again
    is not computed again.

    The seed and the number of points chosen at a time are fixed. A repeated search therefore asks for the same points,
    and an interrupted search goes on with the runs in the folder. slo: name of the SLO that the search uses. evaluate:
    simulates points, given as changes, and returns their results in the same order.
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=settings.seed))
    for start in range(0, settings.trials, _BATCH):
        trials = [study.ask() for _ in range(min(_BATCH, settings.trials - start))]
        points = evaluate([_changes(trial, settings) for trial in trials])
        for trial, point in zip(trials, points, strict=True):
            if point.error:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, _objective(point, settings, slo))


def load_optuna() -> Any:
    """Imports Optuna. Raises ConfigError if it is not installed."""
    try:
        import optuna  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("search needs Optuna, which is not installed: pip install 'pdsim[sweep]'") from None
    return optuna


def _changes(trial: Any, settings: SearchSettings) -> Changes:
    chosen: dict[str, Any] = {}
    for key, values in settings.fields_.items():
        if isinstance(values, Range):
            chosen[key] = values.at(trial.suggest_float(key, 0.0, 1.0))
        else:
            chosen[key] = values[trial.suggest_categorical(key, list(range(len(values))))]
    return assigned(chosen)


def _objective(point: PointResult, settings: SearchSettings, slo: str) -> float:
    """The value that the search maximises: goodput (requests within the SLO) or requests, per second and GPU
    (settings.maximise). If the search maximises requests, a point that misses the SLO is worth less than every point
    that meets the SLO. slo: name of the SLO.
    """
    if settings.maximise == "goodput":
        return point.goodput_per_gpu(slo).mean
    if not point.meets(slo):
        return point.attainment(slo).mean - 1.0 - point.is_saturated
    return point.metric("request_throughput").mean / point.num_gpus
