"""Computes one point. Equal tasks give equal shards, in whatever process and order."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.summary import is_saturated
from pdsim.scenario.build import build, requests_of
from pdsim.scenario.loading import parse_scenario
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Simulation
from pdsim.study.identity import workload_of
from pdsim.study.plan import Task
from pdsim.study.shard import means, to_shard
from pdsim.workload.clients import OpenLoop
from pdsim.workload.request_spec import RequestSpec

_requests: dict[str, Sequence[RequestSpec]] = {}
"""Of the workload that this process ran last, by its digest: the points of a sweep share theirs."""


@dataclass(frozen=True)
class Done:
    """A task's shard, and what it took to compute."""

    key: str
    shard: bytes
    cpu_s: float = 0.0
    wall_s: float = 0.0


def compute(task: Task) -> Done:
    """A point that fails is a row that says so."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    gc.collect()  # the cycles of the run before
    try:
        with garbage_collection_paused():
            row = _row(_run(task))
    except Exception as wrong:  # noqa: BLE001  whatever is wrong with one point, the others go on
        kind = "" if isinstance(wrong, ValueError) else f"{type(wrong).__name__}: "
        row = _failure("failed", f"{kind}{wrong}")
    return Done(task.key, _shard(task, row), time.process_time() - cpu_s, time.perf_counter() - wall_s)


def _run(task: Task) -> RunResult:
    scenario, workload = parse_scenario(task.data, base=task.base), workload_of(task.identity)
    if workload not in _requests:
        _requests.clear()
        _requests[workload] = requests_of(scenario)
    return Simulation(build(scenario, _requests[workload])).run()


def crashed(task: Task, how: str) -> Done:
    """Of a task whose worker died, and how."""
    return Done(task.key, _shard(task, _failure("crashed", f"its worker died {how}")))


def _shard(task: Task, row: Mapping[str, Any]) -> bytes:
    return to_shard({"key": task.key, "identity": task.identity, **row})


def _failure(status: str, message: str) -> dict[str, Any]:
    """The row of a point without a result."""
    return {"status": status, "message": message}


def _row(result: RunResult) -> dict[str, Any]:
    if result.stall:
        return _failure("failed", "stalled; " + "; ".join(result.stall[:3]))
    summary, requests = result.summary(), result.records.requests
    done = [r for r in requests if r.outcome == "finished"]
    return {
        **summary,
        **summary["pdsim"],
        **means(result.records),
        "status": "ok",
        "message": "",
        "saturated": isinstance(result.scenario.client, OpenLoop) and is_saturated(requests),
        "gpus": result.scenario.num_gpus,
        "ttft_ns": [r.first_token_ns - r.arrival_ns for r in done if r.first_token_ns is not None],
        "e2e_ns": [r.end_ns - r.arrival_ns for r in done if r.end_ns is not None],
        "output_tokens": [r.num_output_tokens for r in done],
    }
