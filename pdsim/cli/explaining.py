"""The command `pdsim explain`: where the time of a run's requests goes, and what limits the run."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from pdsim.cli.command import Json, ProfileFiles, RunOrScenario, Set, Tornado, print_json, profile_changes
from pdsim.cli.finished import FinishedRun
from pdsim.metrics.summary import TailMetric
from pdsim.scenario.yaml_file import ConfigError, named


def explain(
    run: RunOrScenario,
    *,
    request: Annotated[int | None, Parameter(help="Print the stages of one request, by its number.")] = None,
    cost: Annotated[
        bool, Parameter(help="Print the terms of the time of a typical step, without a simulation.")
    ] = False,
    tail: Annotated[
        TailMetric | None, Parameter(help="Group the slowest requests of this metric by what they waited for.")
    ] = None,
    tail_percent: Annotated[
        float, Parameter(validator=Number(gt=0, lte=100), help="Percent of the requests that count as slowest.")
    ] = 1.0,
    tornado: Tornado = False,
    set_: Set = (),
    profile: ProfileFiles = (),
    json_: Json = False,
) -> None:
    """Print where the time of a run's requests went. --tornado: what limits the run; --tail: what its slowest requests
    waited for; --cost: what the time of a step consists of.
    """
    from pdsim.cli.obtaining import obtain_runs, obtain_sensitivities
    from pdsim.metrics.explanation.explain import mean_parts_ms, stage_times
    from pdsim.metrics.explanation.failures import failures_in
    from pdsim.metrics.explanation.usage import instance_usage
    from pdsim.show.terminal.tables import print_failures, print_path, print_sensitivities, print_stages, print_usage
    from pdsim.sim.uncertainty.sensitivity import limits

    set_ = (*profile_changes(profile), *set_)
    chosen = {"--request": request is not None, "--cost": cost, "--tail": tail is not None}
    if tail is not None and sum(chosen.values()) > 1:
        raise ConfigError(f"{' and '.join(flag for flag, given in chosen.items() if given)} exclude each other")
    if cost:
        _explain_cost(run, set_, json_=json_)
        return
    if request is not None:
        _explain_request(run, request, set_, json_=json_)
        return
    (finished,) = obtain_runs((run,), set_, None, quiet=json_)
    found = obtain_sensitivities(run, set_, quiet=json_) if tornado else []
    made: dict[str, Any] = {}
    if tornado:
        made["limits"] = [limit._asdict() for limit in limits(found)]
        made["sensitivities"] = [asdict(one) for one in found]
    given = [word for change in set_ for word in ("--set", change)]
    command = shlex.join(["pdsim", "explain", str(run), *given])
    if failures := failures_in(finished.summary):
        made["failures"] = [asdict(failure) for failure in failures]
    if tail is not None:
        _explain_tail(finished, tail, tail_percent, command, beside=made, json_=json_)
    elif json_:
        stages = [asdict(stage) for stage in stage_times(finished.judged)]
        instances = [asdict(use) for use in instance_usage(finished.records)]
        print_json({"stages": stages, "path_ms": mean_parts_ms(finished.judged), "instances": instances, **made})
    else:
        print_stages({finished.name: finished.judged})
        print_path("what requests wait for, on average", mean_parts_ms(finished.judged))
        print_usage({finished.name: finished.records})
    if json_:
        return
    print_failures(finished.summary, command)
    if tornado:
        print_sensitivities(found)
    else:
        print(f"what limits it: {command} --tornado")


def _explain_cost(run: Path, changes: tuple[str, ...], *, json_: bool) -> None:
    """Prints the terms that sum up to the time of a typical prefill forward, and of a typical decode step. Also prints
    where the times of operators were measured, if the cost comes from kernels. Simulates nothing.
    """
    from pdsim.cli.obtaining import kernels_of, scenario_of, typical_steps
    from pdsim.show.terminal.tables import print_kernels, print_step_terms

    scenario = scenario_of(run, changes)
    with named(run):
        steps, kernels = typical_steps(scenario), kernels_of(scenario)
    if json_:
        rows = [{**step._asdict(), "ms": sum(step.terms_ms.values())} for step in steps]
        print_json({"steps": rows, "kernels": kernels})
        return
    for step in steps:
        print_step_terms(step._asdict())
    print_kernels(kernels)


def _explain_request(run: Path, request_id: int, changes: tuple[str, ...], *, json_: bool) -> None:
    """Prints the stages and the critical path of one request. Raises ConfigError if the run has no such request."""
    from pdsim.cli.obtaining import obtain_runs
    from pdsim.metrics.columns import StoredRecords, columns
    from pdsim.metrics.explanation.explain import CriticalPaths
    from pdsim.metrics.explanation.stages import stage_ms
    from pdsim.show.terminal.tables import print_path, print_request

    (finished,) = obtain_runs((run,), changes, None, quiet=json_)
    records = finished.records
    if isinstance(records, StoredRecords):
        record = records.request(request_id)
    else:
        record = next((r for r in records.requests if r.request_id == request_id), None)
    if record is None:
        last = columns(records, "requests")["request_id"].max(initial=-1)
        raise ConfigError(f"--request {request_id}: the run has requests 0 to {last}")
    is_done = record.outcome == "finished"
    path_ns = CriticalPaths(records).of(record) if is_done else {}
    parts_ms = {part: duration_ns / 1e6 for part, duration_ns in path_ns.items()}
    if json_:
        print_json({**asdict(record), "stages_ms": stage_ms(record), "path_ms": parts_ms})
    else:
        print_request(record)
        print_path("its critical path", parts_ms)


def _explain_tail(
    finished: FinishedRun, metric: TailMetric, percent: float, command: str, *, beside: dict[str, Any], json_: bool
) -> None:
    """Prints the groups of the slowest requests by `metric`. percent: percentage of requests that count as slowest.
    command: explains the run; printed for each group, with a request's number added. beside: fields that the JSON
    output has in addition to the groups. Raises ConfigError if no request finished and none failed; for TPOT, only
    finished requests with two or more output tokens count.
    """
    from pdsim.metrics.explanation.tail import tail
    from pdsim.show.terminal.tables import print_tail, tail_json

    found = tail(finished.judged, metric, percent=percent)
    if not found.groups and not beside.get("failures"):
        tokens = " with two output tokens" if metric == "tpot" else ""
        raise ConfigError(f"--tail {metric}: no request{tokens} finished in {finished.name}")
    if json_:
        print_json({**tail_json(found, command), **beside})
    elif found.groups:
        print_tail(found, command)
