"""The ranks of one instance. Each rank has threads for its tasks. The leader gives each task to all ranks: to its own
threads, and by messages to the followers.
"""

from asyncio import AbstractEventLoop, gather
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from time import monotonic_ns
from typing import Any, NamedTuple

from pdreal.control import notices
from pdreal.control.channel import Channel
from pdreal.control.expert_counts import ExpertCounts
from pdreal.control.requests import Logprobs
from pdreal.control.tasks import (
    Compute,
    DecodeBatch,
    DigestArrived,
    DigestSent,
    LookUpPages,
    ReadPages,
    ScatterCell,
    Seed,
    SendUnit,
    StateMove,
    StorePages,
    Task,
    Windows,
)
from pdreal.memory.storage_threads import StorageThreads, wait_for
from pdreal.rank.graphs import LaunchedStep
from pdreal.rank.resources import RankResources
from pdsim.core.messages import TransferUnit, WriteBackup

OnDone = Callable[[Any, BaseException | None], None]


class ComputedTokens(NamedTuple):
    """Result of a Compute task. Start and end of the work are times of the monotonic clock, in ns."""

    tokens: list[int]
    """The next tokens, one per prompt chunk or sequence of the decode batch. If a decode step verifies drafts: the
    integers of Drafter.step, one sequence after another. Empty: the task makes none.
    """
    start_ns: int
    end_ns: int
    expert_counts: ExpertCounts | None = None
    """Number of tokens of each expert, [layers, experts]. None: not recorded."""
    logprobs: Sequence[Logprobs | None] = ()
    """Log probabilities of each token; empty if no request asks for them."""
    seeds: Sequence[Seed] = ()
    """For each chunk: a first draft token and a hidden state, from which the draft model goes on. Empty: the task is no
    prefill forward, or there are no drafts.
    """


class RankThreads:
    def __init__(self, loop: AbstractEventLoop, resources: RankResources, forward_limit_ns: int) -> None:
        """forward_limit_ns: time in ns after which a forward counts as hung."""
        self._loop = loop
        self._forward_limit_ns = forward_limit_ns
        self._runner = resources.runner
        self._mover: Any = resources.mover
        self._on_gpu = resources.device.type == "cuda"
        self._progress = Condition()
        self._layers_computed = 0, 0
        """Id of the step whose layers this rank computed last, and the number of layer groups that are done."""
        self._compute_start_ns: int | None = None
        """Start of the work that is being computed, in ns of the monotonic clock. None: nothing is being computed."""
        self._num_queued = 0
        """Number of tasks that the compute thread got and whose end is not reported yet."""
        resources.enter_compute()  # decode steps are launched here
        self._compute = ThreadPoolExecutor(1, "compute", resources.enter_compute)
        self._scatter = ThreadPoolExecutor(1, "scatter", resources.enter_copies)
        self._workers = [
            ThreadPoolExecutor(1, f"transfer-{i}", resources.enter_copies) for i in range(resources.num_workers)
        ]
        self._storage = None if resources.stored is None else StorageThreads(resources.stored)

    def warm_up(self) -> None:
        """Runs a first piece of work on the compute thread (on a GPU only) and on the threads that send or scatter KV,
        because a thread's first work is slow. Returns when all this work is done.
        """
        if self._on_gpu:
            self._compute.submit(self._runner.warm_up).result()
        if self._mover is not None:
            for thread in self._workers or [self._scatter]:
                thread.submit(self._mover.warm_up).result()

    async def greet(self, decode_id: str) -> None:
        """Connects to a decode instance from every thread that will send to it. Raises TransferError if the instance is
        gone.
        """
        await gather(*(self._loop.run_in_executor(worker, self._mover.greet, decode_id) for worker in self._workers))

    def begin(self, task: Task, on_done: OnDone, on_layers: Callable[[int], None] | None = None) -> None:
        """Begins a task in its thread, or a decode step on the GPU from the calling thread if possible. on_done: called
        on the main thread with the task's result, or with the exception that the task raised. on_layers: called in the
        compute thread with the number of a prefill forward's layer groups that are computed; None: not called.
        """
        if isinstance(task, Compute):
            if isinstance(task.work, DecodeBatch) and not self._num_queued and self._launch(task.work, on_done):
                return
            self._num_queued += 1
            on_done = partial(self._on_computed, on_done)
        future = self._submit(task, on_layers)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(_report, done, on_done))

    def _on_computed(self, on_done: OnDone, result: Any, error: BaseException | None) -> None:
        self._num_queued -= 1
        on_done(result, error)

    def _launch(self, batch: DecodeBatch, on_done: OnDone) -> bool:
        """Begins a decode step on the GPU from this thread, because waking another thread takes longer. `_look` sees
        the step's end. If the launch fails, on_done gets the error. Returns False, and begins nothing, if the compute
        thread must compute the step.
        """
        start_ns = monotonic_ns()
        try:
            launched = self._runner.launch(batch)
        except Exception as error:  # noqa: BLE001  whoever began it hears of it
            self._loop.call_soon(on_done, None, error)
            return True
        if launched is not None:
            self._compute_start_ns = start_ns
            self._loop.call_soon(self._look, launched, start_ns, on_done)
        return launched is not None

    def _look(self, launched: LaunchedStep, start_ns: int, on_done: OnDone) -> None:
        """Calls on_done if the step has ended. Otherwise looks again as soon as the event loop has handled its
        messages, because a timer would be milliseconds late.
        """
        try:
            if not launched.done.query():
                self._loop.call_soon(self._look, launched, start_ns, on_done)
                return
            tokens, error = launched.tokens.tolist(), None
        except RuntimeError as failed:
            tokens, error = [], failed
        self._compute_start_ns = None
        on_done(ComputedTokens(tokens, start_ns, monotonic_ns()), error)

    def _submit(self, task: Task, on_layers: Callable[[int], None] | None) -> "Future[Any]":
        match task:
            case Compute(work, step_id):
                user = None
                if self._storage is not None and isinstance(work, WriteBackup):
                    user = self._storage.user_of(work.host_pages)
                return self._compute.submit(self._run, work, step_id, on_layers, user)
            case SendUnit(worker, unit, offset, windows, state):
                return self._workers[worker].submit(self._send, unit, offset, windows, state)
            case ScatterCell(command, pages):
                return self._scatter.submit(self._mover.scatter, command, pages)
            case DigestSent(worker, pages, num_tokens, slot):
                return self._workers[worker].submit(self._mover.digest, pages, range(num_tokens), slot)
            case DigestArrived(pages, num_tokens, slot):
                return self._scatter.submit(self._mover.digest, pages, range(num_tokens), slot)
            case LookUpPages() | ReadPages() | StorePages():
                assert self._storage is not None
                return self._storage.submit(task)

    def _run(
        self,
        work: Any,
        step_id: int | None,
        on_layers: Callable[[int], None] | None,
        user: "Future[Any] | None",
    ) -> ComputedTokens:
        """Does a piece of work in the compute thread. step_id: number of the step, whose computed layers release
        waiting transfer units; None: no unit waits for the work. on_layers: called with the number of computed layer
        groups. user: a write to storage that reads the host pages to which this work writes, and so must end first;
        None: there is no such write.
        """
        wait_for(user)
        self._compute_start_ns = start_ns = monotonic_ns()
        try:
            tokens = self._runner.run(work, partial(self._on_layers, step_id, on_layers))
        finally:
            self._compute_start_ns = None
        runner, end_ns = self._runner, monotonic_ns()
        return ComputedTokens(tokens, start_ns, end_ns, runner.expert_counts, runner.logprobs, runner.seeds)

    @property
    def hangs(self) -> bool:
        """True if a forward or a copy that this rank computes has run for longer than the watchdog allows."""
        start_ns = self._compute_start_ns
        return start_ns is not None and monotonic_ns() - start_ns > self._forward_limit_ns

    def _on_layers(self, step_id: int | None, on_layers: Callable[[int], None] | None, num_groups: int) -> None:
        if step_id is not None:
            with self._progress:
                self._layers_computed = step_id, num_groups
                self._progress.notify_all()
        if on_layers is not None:
            on_layers(num_groups)

    def _send(
        self, unit: TransferUnit, staging_offset_bytes: int | None, windows: Windows | None, state: StateMove | None
    ) -> None:
        """Sends a unit after this rank has computed the layers that the unit contains. The arguments are the fields of
        SendUnit.
        """
        if (needed := unit.after_layers) is not None:
            with self._progress:
                self._progress.wait_for(lambda: needed < self._layers_computed)
        self._mover.send(unit, staging_offset_bytes, windows, state)


def _report(done: "Future[Any]", on_done: OnDone) -> None:
    error = done.exception()
    on_done(None if error else done.result(), error)


@dataclass
class _UnderWay:
    num_missing: int
    """Number of ranks that have not done the task yet."""
    on_done: Callable[[list[Any], str | None], None]
    """Called when all ranks have done the task, with their results and the error (None: none failed)."""
    results: list[Any] = field(default_factory=list)
    """Results of the ranks that have done the task, in the order in which they ended."""
    error: str | None = None
    """The reason why a rank failed. None: none has failed."""


class RankGroup:
    def __init__(
        self,
        channel: Channel,
        threads: RankThreads,
        followers: Sequence[str],
        fail: Callable[[BaseException], None],
    ) -> None:
        """threads: the threads of this rank. followers: names of the processes of the other ranks. fail: called with
        the error if the instance cannot continue.
        """
        self.fail = fail
        self._channel = channel
        self._threads = threads
        self._followers = followers
        self._under_way: dict[int, _UnderWay] = {}
        self._num_tickets = 0

    def compute(
        self,
        task: Compute,
        on_done: Callable[[ComputedTokens], None] = lambda _: None,
        on_layers: Callable[[int], None] | None = None,
    ) -> None:
        """Sends a task to all ranks, and calls on_done with the leader's result. on_layers: called after each layer
        group of the leader's prefill forward, with the number of computed groups. If a rank fails, the instance fails.
        """
        for follower in self._followers:
            self._channel.send(follower, notices.Task(0), payload=task)

        def take(computed: ComputedTokens, error: BaseException | None) -> None:
            if error is None:
                on_done(computed)
            else:
                self.fail(error)

        self._threads.begin(task, take, on_layers)

    def begin_or_fail(self, task: Task, what: str, on_done: Callable[[list[Any]], None]) -> None:
        """Begins a task on all ranks. on_done: called with the results of all ranks when all are done. If a rank fails,
        the instance fails instead, with an error that begins with `what`.
        """

        def take(results: list[Any], error: str | None) -> None:
            if error is None:
                on_done(results)
            else:
                self.fail(RuntimeError(f"{what}: {error}"))

        self.begin(task, take)

    def begin(self, task: Task, on_done: Callable[[list[Any], str | None], None]) -> None:
        """Begins a task on all ranks. on_done: called when all ranks are done. Its arguments are the results of all
        ranks, and the reason why a rank failed (None: no rank failed).
        """
        self._num_tickets += 1
        ticket = self._num_tickets
        self._under_way[ticket] = _UnderWay(1 + len(self._followers), on_done)
        for follower in self._followers:
            self._channel.send(follower, notices.Task(ticket), payload=task)
        self._threads.begin(task, lambda result, error: self._take(ticket, result, describe(error) if error else None))

    def on_done(self, done: notices.Done) -> None:
        self._take(done.ticket, done.result, done.error)

    def _take(self, ticket: int, result: Any, error: str | None) -> None:
        task = self._under_way[ticket]
        task.num_missing -= 1
        task.results.append(result)
        task.error = task.error or error
        if not task.num_missing:
            del self._under_way[ticket]
            task.on_done(task.results, task.error)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Follower:
    def __init__(
        self, leader: str, channel: Channel, threads: RankThreads, fail: Callable[[BaseException], None]
    ) -> None:
        """leader: name of the leader's process. channel: receives the leader's tasks and sends answers. threads: the
        rank's threads, which carry out the tasks. fail: called with the error if the rank cannot continue.
        """
        self._leader = leader
        self._channel = channel
        self._threads = threads
        self._fail = fail

    def levels(self) -> list[Any]:
        """Returns an empty list: the leader reports the instance's numbers of requests and pages (levels)."""
        return []

    def on_message(self, to: str, message: Any, payload: Any) -> None:
        if not isinstance(message, notices.Task):
            raise TypeError(f"a follower does not take {message}")
        self._begin(message.ticket, payload)

    def _begin(self, ticket: int, task: Task) -> None:
        def on_done(result: Any, error: BaseException | None) -> None:
            if ticket:
                done = notices.Done(ticket, result, None if error is None else describe(error))
                self._channel.send(self._leader, done)
            elif error is not None:
                self._fail(error)

        self._threads.begin(task, on_done)
