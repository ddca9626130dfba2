"""Makes a plan: checks the arguments, finds the cheapest cluster that meets the SLO, and writes the plan's files."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdsim.files import write_whole
from pdsim.metrics.run_folder import SCENARIO, require_out
from pdsim.metrics.summary_rows import counted
from pdsim.scenario.building.cluster import requests_of
from pdsim.scenario.loading import write_entries_of
from pdsim.scenario.yaml_file import ConfigError, write_yaml
from pdsim.sim.simulation import simulate
from pdsim.study.base import MAX_GPUS, NUM_SEEDS, AskOptions, Base, base_of
from pdsim.study.planning.busiest import busiest
from pdsim.study.planning.finder import Finder
from pdsim.study.planning.plan import Plan, Row
from pdsim.study.planning.screen import Screen
from pdsim.study.planning.watch import Watch
from pdsim.study.points.engine import Progress, Work, open_engine
from pdsim.study.points.store import Store, opened_folder
from pdsim.study.space import CandidateCluster, Space
from pdsim.study.trials import Trials
from pdsim.study.verdict.slo import DEFAULT_SLO, Slo

CURRENCY = "$"


def plan(
    scenario: Path | str | None = None,
    /,
    *,
    trace: Path | str | None = None,
    check: Path | str | None = None,
    slo: str = DEFAULT_SLO,
    prices: Mapping[str, float] | None = None,
    currency: str = CURRENCY,
    max_gpus: int = MAX_GPUS,
    tried: Mapping[str, Sequence[Any]] | None = None,
    speedup: str = AskOptions.speedup,
    changes: Sequence[str] = (),
    seeds: int = NUM_SEEDS,
    jobs: int | None = None,
    engine: str = "pool",
    out: Path | str | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Plan:
    """Find the cheapest cluster that meets an SLO.

    Args:
        scenario: A scenario file; None: a built-in one. Its servers' settings are kept, except GPU, TP and instances.
        trace: A trace that replaces the workload.
        check: Another trace, on which the finished plan is simulated; for example the second half of a day.
        slo: Limits of ttft, tpot and e2e: "ttft p99 < 2 s", or with a share: "ttft < 2 s and tpot < 50 ms for 95 %".
        prices: Price of one hour of each GPU that may be used, by name; None: the scenario's GPUs may be used, and
            the cluster with the fewest GPUs is the cheapest.
        currency: Symbol or code of the prices, as "$" or "EUR".
        max_gpus: Maximum number of GPUs of a cluster.
        tried: Values to try of further scenario fields, by path. Routers are tried, too, unless a path gives routers.
        speedup: Multiples of the load for which the cheapest cluster is also found, as "0.5,2,4".
        changes: Changes of the scenario, as "dotted.path=value".
        seeds: Number of runs of each cluster; a trace sent at its recorded times is run once.
        jobs: Number of processes; None: one for each CPU.
        engine: Where to simulate: pool (processes), here (this process), ray or ray:ADDRESS.
        out: A folder for plan.json, plan.md, the plan's scenario.yaml and all runs. A later call reuses the runs.
        progress: Called after each run.
        report: Called with lines on the progress, such as one each time that a cheaper cluster is found.

    Raises ConfigError for wrong arguments and fields, and if no cluster is possible.

    """
    if seeds < 1 or max_gpus < 1:
        raise ConfigError(f"--seeds {seeds}, --max-gpus {max_gpus}: expected at least 1")
    given = None if scenario is None else Path(scenario)
    if out is not None:
        _require_folder(Path(out), given)
    wanted = Slo.parse(slo)
    options = AskOptions(trace=None if trace is None else Path(trace), speedup=speedup)
    with opened_folder(out) as folder:
        base = _base(given, options, wanted, changes, folder)
        judge = None if check is None else _check_base(given, Path(check), wanted, changes, folder)
        if options.speedups and base.load is None:
            raise ConfigError(f"--speedup {speedup}: this load has neither arrival times nor a rate to multiply")
        space = _space(base, prices, max_gpus, tried or {})
        with closing(open_engine(engine, jobs)) as opened:
            watch = Watch(report)
            work = Work(_kept_runs(folder, report), opened, watch.over(progress))
            trials = Trials(base, wanted, seeds, work)
            with watch.provisional():
                made = Finder(trials, space, watch, currency if prices else "").find(options.speedups)
            if made.chosen is not None:
                checks = None if judge is None else Trials(judge, wanted, seeds, work)
                made = _compared(made, made.chosen, trials, space.own(base) if given else None, checks)
        if out is not None:
            made = _with_busiest(made, trials)
            _write(made, trials.base, folder)
    return made


def _space(base: Base, prices: Mapping[str, float] | None, max_gpus: int, tried: Mapping[str, Sequence[Any]]) -> Space:
    """The clusters to search, of up to `max_gpus` GPUs. prices: price per hour by GPU; None: the scenario's GPUs, at
    equal prices. tried: values to try of further scenario fields, by path. Raises ConfigError if the prices lack the
    GPU of encode instances, or if a field of encode instances is tried and the scenario has no such instances.
    """
    encode = base.scenario.encode
    of_encode = next((path for path in tried if path.startswith("encode.")), None)
    if of_encode is not None and encode is None:
        raise ConfigError(f"--try {of_encode}: {base.where} has no encode instances: add the section encode")
    if not prices:
        return Space(dict.fromkeys((one.gpu for one in base.scenario.pair), 1.0), max_gpus, tried)
    if encode is None:
        return Space(prices, max_gpus, tried)
    if encode.gpu not in prices:
        raise ConfigError(f"{base.where}: encode.gpu: {encode.gpu} has no price: --gpu {encode.gpu}=1.5")
    return Space(prices, max_gpus, tried, encoder_price=prices[encode.gpu])


def _require_folder(out: Path, given: Path | None) -> None:
    """Raises ConfigError if the plan's files cannot be written to `out`, or if they would replace the user's own
    scenario `given`.
    """
    require_out(out)
    if given is not None and given.resolve() == (out / SCENARIO).resolve():
        raise ConfigError(f"--out {out}: the plan's {SCENARIO} would replace {given}: name another folder")


def _base(path: Path | None, options: AskOptions, slo: Slo, changes: Sequence[str], folder: Path) -> Base:
    """Reads the scenario to plan for from `path`; None: writes the built-in scenario into `folder`. Raises ConfigError
    if the scenario is wrong, or if the SLO names a class that no request has. changes: of the scenario, in the notation
    of --set.
    """
    base = base_of(path, options, changes, folder=folder, starter={}, takes_aggregated=True)
    slo.require_classes(requests_of(base.scenario))
    return base


def _check_base(path: Path | None, trace: Path, slo: Slo, changes: Sequence[str], folder: Path) -> Base:
    """Returns the scenario for the check of a plan, with the trace of --check as its workload. path: the scenario file;
    None: the built-in scenario, which is written into a sub-folder of `folder`. changes: changes of the scenario, in
    the notation of --set. Raises ConfigError if the trace does not exist, if the scenario is wrong, or if the SLO names
    a class that no request has.
    """
    if not trace.exists():
        raise ConfigError(f"--check: no trace file {trace}")
    own_folder = folder / "check"
    own_folder.mkdir(exist_ok=True)
    return _base(path, AskOptions(trace=trace), slo, changes, own_folder)


def _kept_runs(folder: Path, report: Callable[[str], None]) -> Store:
    """Opens the results in the folder, and reports how many runs an earlier command has computed."""
    store = Store(folder)
    if num_kept := store.num_kept:
        report(f"{counted(num_kept, 'run')} kept from before")
    return store


def _compared(made: Plan, chosen: Row, trials: Trials, own: CandidateCluster | None, checks: Trials | None) -> Plan:
    """Adds two outcomes to a plan: that of the user's own cluster, and that of the plan's cluster under a second trace.

    made: the plan so far. chosen: row of the plan's cluster. trials: simulates clusters with the plan's load. own: the
    user's cluster; None: not given. checks: simulates clusters with the second trace; None: no second trace was given.
    """
    if own is not None:
        (outcome,) = trials.whole([own.changes])
        repeated = trials.repeated([own.changes])[0] if outcome.is_near else ()
        made = replace(made, own=Row(own, outcome, repeated=repeated))
    if checks is not None:
        made = replace(made, checked=checks.whole([chosen.candidate.changes])[0])
    return made


def _with_busiest(made: Plan, trials: Trials) -> Plan:
    """Returns the plan with the request rate and the queue of the chosen cluster in the busiest minutes: the minutes
    around the longest queue. Simulates the cluster once more. Returns the plan unchanged if no cluster meets the SLO.
    """
    if made.chosen is None:
        return made
    run = simulate(trials.scenario(made.chosen.candidate.changes))
    return replace(made, busiest=busiest(run.records.requests))


def _write(made: Plan, base: Base, folder: Path) -> None:
    """Writes plan.json, plan.md, and the scenario of the chosen cluster with the catalog entries that the scenario
    names.
    """
    write_whole(folder / "plan.json", json.dumps(Screen(made).to_json(), indent=2))
    write_whole(folder / "plan.md", Screen(made).to_markdown())
    if made.chosen is None:
        return
    chosen = base.changed(made.chosen.candidate.changes)
    fields = {name: value for name, value in chosen.model_dump().items() if value is not None}
    if base.of_starter is not None:
        fields["name"] = "plan"
    write_yaml(fields, folder / SCENARIO)
    write_entries_of(chosen, folder)
