"""Computes one point. Equal tasks give equal rows, in whatever process and order."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.explain import mean_stage_ms
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import is_saturated
from pdsim.scenario.build import build, requests_of
from pdsim.scenario.loading import parse_scenario
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.study.identity import workload_of
from pdsim.study.plan import Task
from pdsim.study.planning.slo import MissedError, Tally
from pdsim.study.shard import with_all_columns
from pdsim.system.catalog import borrow, lookups_remembered
from pdsim.workload.client_driver import OpenLoop
from pdsim.workload.request_spec import RequestSpec, classes_of


def means(records: RunRecords) -> dict[str, Any]:
    """Means of where the time of a run's requests went, and of what their transfers were cut into."""
    stages = {f"mean_{stage}_ms": ms for stage, ms in mean_stage_ms(records.requests).items()}
    return {**stages, "descriptors": sum(transfer.num_descriptors for transfer in records.transfers)}


_requests: dict[str, Sequence[RequestSpec]] = {}
"""Requests of the workload that this process ran last, by its digest: the points of a sweep share theirs."""


@dataclass(frozen=True)
class Done:
    """A task's result, and what it took to compute."""

    key: str
    row: Mapping[str, Any]
    """Its shard's."""
    cpu_s: float = 0.0
    wall_s: float = 0.0


def compute(task: Task) -> Done:
    """A point that fails is a row that says so."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    gc.collect(0)  # the cycles of the run before: all that was made since is young
    try:
        with garbage_collection_paused():
            row = _run(task)
    except MissedError as missed:
        row = {**_failure("missed", str(missed)), "completed": missed.num_ended}
    except Exception as wrong:  # noqa: BLE001  whatever is wrong with one point, the others go on
        kind = "" if isinstance(wrong, ValueError) else f"{type(wrong).__name__}: "
        row = _failure("failed", f"{kind}{wrong}")
    done = _done(task, row)
    return replace(done, cpu_s=time.process_time() - cpu_s, wall_s=time.perf_counter() - wall_s)


@lookups_remembered()
def _run(task: Task) -> dict[str, Any]:
    borrow(task.entries)
    scenario, workload = parse_scenario(task.data, base=task.base), workload_of(task.identity)
    if workload not in _requests:
        _requests.clear()
        _requests[workload] = requests_of(scenario)
    cluster = build(scenario, _requests[workload])
    tally = None if task.slo is None else Tally(task.slo, cluster.requests)
    return _row(Simulation(cluster, Observation(ended=tally)).run(), cluster.requests)


def crashed(task: Task, how: str) -> Done:
    """The result of a task whose worker died, and how."""
    return _done(task, _failure("crashed", f"its worker died {how}"))


def _done(task: Task, result: Mapping[str, Any]) -> Done:
    return Done(task.key, with_all_columns({"key": task.key, "identity": task.identity, **result}))


def _failure(status: str, message: str) -> dict[str, Any]:
    """The row of a point without a result."""
    return {"status": status, "message": message}


def _row(result: RunResult, specs: Sequence[RequestSpec]) -> dict[str, Any]:
    if result.stall:
        return _failure("failed", "stalled; " + "; ".join(result.stall[:3]))
    summary, requests = result.summary(), result.records.requests
    done = [r for r in requests if r.outcome == "finished"]
    classes = classes_of(specs)
    in_order = [*done, *(r for r in requests if r.outcome != "finished")]
    return {
        **summary,
        "gpu_hours": summary["duration"] / 3600 * result.scenario.num_gpus,
        **summary["pdsim"],
        **means(result.records),
        "status": "ok",
        "message": "",
        "saturated": isinstance(result.scenario.client, OpenLoop) and is_saturated(requests),
        "gpus": result.scenario.num_gpus,
        "ttft_ns": [r.first_token_ns - r.arrival_ns for r in done if r.first_token_ns is not None],
        "e2e_ns": [r.end_ns - r.arrival_ns for r in done if r.end_ns is not None],
        "output_tokens": [r.num_output_tokens for r in done],
        "classes": [classes.get(r.request_id, "") for r in in_order] if classes else None,
    }
