"""The threads of one rank: one that computes, some that transfer, one that scatters.

Each does its tasks in order. The main thread is told of every end and never waits for one.
"""

from asyncio import AbstractEventLoop, gather
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from time import monotonic_ns
from typing import Any, NamedTuple

from pdreal.rank_resources import RankResources
from pdreal.tasks import Compute, DigestArrived, DigestSent, ScatterCell, SendUnit, Task
from pdsim.core.transfer_plan import TransferUnit

OnDone = Callable[[Any, BaseException | None], None]


class Computed(NamedTuple):
    """What the model made of some work, and when by the monotonic clock."""

    tokens: list[int]
    start_ns: int
    end_ns: int


class RankThreads:
    def __init__(self, loop: AbstractEventLoop, resources: RankResources) -> None:
        self._loop = loop
        self._runner = resources.runner
        self._mover: Any = resources.mover
        self._on_gpu = resources.device.type == "cuda"
        self._progress = Condition()
        self._layers_computed = 0, 0
        """By this rank: the step that computes layers, and how many groups it has."""
        self._compute = ThreadPoolExecutor(1, "compute", resources.enter_compute)
        self._scatter = ThreadPoolExecutor(1, "scatter", resources.enter_copies)
        self._workers = [
            ThreadPoolExecutor(1, f"transfer-{i}", resources.enter_copies) for i in range(resources.num_workers)
        ]

    def warm_up(self) -> None:
        """What each thread does for the first time, before anybody waits for it. Returns when it is done."""
        if self._on_gpu:
            self._compute.submit(self._runner.warm_up).result()
        if self._mover is not None:
            for thread in self._workers or [self._scatter]:
                thread.submit(self._mover.warm_up).result()

    async def greet(self, decode_id: str) -> None:
        """From every thread that will send to it. Raises TransferError if it is gone."""
        await gather(*(self._loop.run_in_executor(worker, self._mover.greet, decode_id) for worker in self._workers))

    def begin(self, task: Task, on_done: OnDone, on_layers: Callable[[int], None] | None = None) -> None:
        """on_done: called on the main thread with what the task returned, or raised."""
        future = self._submit(task, on_layers)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(_report, done, on_done))

    def _submit(self, task: Task, on_layers: Callable[[int], None] | None) -> "Future[Any]":
        match task:
            case Compute(work, step_id):
                return self._compute.submit(self._run, work, step_id, on_layers)
            case SendUnit(worker, unit, offset):
                return self._workers[worker].submit(self._send, unit, offset)
            case ScatterCell(command, pages):
                return self._scatter.submit(self._mover.scatter, command, pages)
            case DigestSent(worker, pages, num_tokens):
                return self._workers[worker].submit(self._mover.digest, pages, range(num_tokens))
            case DigestArrived(pages, num_tokens):
                return self._scatter.submit(self._mover.digest, pages, range(num_tokens))

    def _run(self, work: Any, step_id: int | None, on_layers: Callable[[int], None] | None) -> Computed:
        start_ns = monotonic_ns()
        tokens = self._runner.run(work, partial(self._on_layers, step_id, on_layers))
        return Computed(tokens, start_ns, monotonic_ns())

    def _on_layers(self, step_id: int | None, on_layers: Callable[[int], None] | None, num_groups: int) -> None:
        if step_id is not None:
            with self._progress:
                self._layers_computed = step_id, num_groups
                self._progress.notify_all()
        if on_layers is not None:
            on_layers(num_groups)

    def _send(self, unit: TransferUnit, staging_offset_bytes: int | None) -> None:
        """The leader's layers are computed; those of this rank may take a moment longer."""
        if (needed := unit.after_layers) is not None:
            with self._progress:
                self._progress.wait_for(lambda: needed < self._layers_computed)
        self._mover.send(unit, staging_offset_bytes)


def _report(done: "Future[Any]", on_done: OnDone) -> None:
    error = done.exception()
    on_done(None if error else done.result(), error)
