"""Computes tasks. A process of the pool reads tasks from its standard input, and writes results to its standard
output.
"""

import gc
import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.explanation.failures import failure_text, failures_in
from pdsim.scenario.building.cluster import build, requests_of
from pdsim.scenario.loading import parse_scenario
from pdsim.sim.result import RunResult
from pdsim.sim.simulation import Observation, Simulation
from pdsim.study.points.tasks import Done, Task, with_all_columns
from pdsim.study.verdict.outcome import cannot_take_load
from pdsim.study.verdict.tally import MissedError, Tally
from pdsim.system.catalog import borrow, lookups_remembered
from pdsim.workload.client import warm_up_requests
from pdsim.workload.request_spec import RequestSpec, classes_of
from pdsim.workload.trace_file import InputWarning

_requests: dict[str, Sequence[RequestSpec]] = {}
"""The requests that this process simulated last, by their digest. The points of a sweep often have the same
requests.
"""


def compute(task: Task) -> Done:
    """Simulates one task. The result has the reason if the run fails, or ends early because it misses its SLO."""
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
    return _done(task, row, time.process_time() - cpu_s, time.perf_counter() - wall_s)


@lookups_remembered()
def _run(task: Task) -> dict[str, Any]:
    borrow(task.entries)
    scenario, workload = parse_scenario(task.data, base=task.base), json.loads(task.identity)["workload"]
    if workload not in _requests:
        _requests.clear()
        _requests[workload] = requests_of(scenario)
    cluster = build(scenario, _requests[workload])
    num_primes = sum(spec.primes for spec in cluster.requests)
    num_left_out = warm_up_requests(scenario.client, len(cluster.requests), num_primes)
    tally = Tally(task.slo, cluster.requests, num_left_out) if task.slo is not None else None
    return _row(Simulation(cluster, Observation(ended=tally, own_itl=task.own_itl)).run(), cluster.requests)


def crashed(task: Task, how: str) -> Done:
    """The result of a task whose worker process died. how: says how often and how the worker died."""
    return _done(task, _failure("crashed", f"its worker died {how}"))


def _done(task: Task, result: Mapping[str, Any], cpu_s: float = 0.0, wall_s: float = 0.0) -> Done:
    row = with_all_columns({"key": task.key, "identity": task.identity, **result})
    return Done(task.key, row, cpu_s, wall_s)


def _failure(status: str, message: str) -> dict[str, Any]:
    """A row of results that has a status and a reason instead of numbers. status, message: the status, and the reason
    as text.
    """
    return {"status": status, "message": message}


def _row(result: RunResult, specs: Sequence[RequestSpec]) -> dict[str, Any]:
    from pdsim.metrics.explanation.explain import mean_stage_ms  # noqa: PLC0415  numpy, which a single run does without

    if result.stall:
        return _failure("failed", "stalled; " + "; ".join(result.stall[:3]))
    summary, requests = result.summary(), result.judged.requests
    done = [r for r in requests if r.outcome == "finished"]
    if not done:
        why = "; ".join(failure.text for failure in failures_in(summary))
        return _failure("failed", f"every request failed: {why}")
    judged = {request.request_id for request in requests}
    classes = classes_of(specs)
    in_order = [*done, *(r for r in requests if r.outcome != "finished")]
    return {
        **summary,
        "gpu_hours": summary["duration"] / 3600 * result.scenario.num_gpus,
        **summary["pdsim"],
        **{f"mean_{stage}_ms": ms for stage, ms in mean_stage_ms(result.judged).items()},
        "descriptors": sum(sent.num_descriptors for sent in result.records.transfers if sent.request_id in judged),
        "status": "ok",
        "message": "",
        "failures": failure_text(summary),
        "saturated": cannot_take_load(result.scenario.client, requests),
        "gpus": result.scenario.num_gpus,
        "ttft_ns": [r.first_token_ns - r.arrival_ns for r in done if r.first_token_ns is not None],
        "e2e_ns": [r.end_ns - r.arrival_ns for r in done if r.end_ns is not None],
        "output_tokens": [r.num_output_tokens for r in done],
        "own_itl_ms": [r.own_itl_ms for r in done] if done[0].own_itl_ms else None,
        "classes": [classes.get(r.request_id, "") for r in in_order] if classes else None,
    }


def main() -> None:
    warnings.simplefilter("ignore", InputWarning)  # who planned the tasks has told it
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a policy prints is no answer
    source = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    tasks: SimpleQueue[Task] = SimpleQueue()
    Thread(target=_receive, args=(source, tasks), daemon=True).start()
    gc.disable()  # each task begins with a search for what the one before left
    _answer(compute(tasks.get()), answers)
    gc.collect()
    gc.freeze()  # code and workload stay: no search looks at them again
    while True:
        _answer(compute(tasks.get()), answers)


def _answer(done: Done, answers: IO[bytes]) -> None:
    try:
        pickle.dump(done, answers)
        answers.flush()
    except BrokenPipeError:
        os._exit(0)  # as when the input ends


def _receive(source: IO[bytes], tasks: "SimpleQueue[Task]") -> None:
    """Puts tasks from the input into the queue. Ends the process when the input ends, because the process that wants
    the results has then ended or stopped this worker.
    """
    try:
        while True:
            tasks.put(pickle.load(source))  # noqa: S301  it is our own process
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
