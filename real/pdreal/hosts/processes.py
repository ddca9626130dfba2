"""Starts, watches and kills the rank processes of one host. Ranks are forked from a process that has only imported
torch, so a start takes a fraction of a second.
"""

import asyncio
import os
import signal
import sys
import tempfile
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context, resource_tracker
from multiprocessing.util import Finalize, get_temp_dir
from threading import Lock
from time import monotonic
from types import ModuleType
from typing import Any

from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.settings.rank import RankSpec

_PRELOADED = ["torch", "pdreal.rank.process"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run early. The results of finished requests are kept."""
PATIENCE_S = 5.0
"""Maximum time in s that processes have to exit after they were told to."""


class Processes:
    def __init__(self, loop: AbstractEventLoop, on_exit: Callable[[str, int], None]) -> None:
        """on_exit: called when no rank of an instance is left, with the instance and the exit code of the first rank
        that ended.
        """
        self._loop = loop
        self._on_exit = on_exit
        claim_temp_dir()
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._alive: dict[str, list[Any]] = {}
        self._starting = Lock()
        """Lock for one start at a time, because a start changes state that this process's threads share."""

    async def prepare(self) -> None:
        """Starts the fork server, a process from which all ranks are forked, if none runs. Waits in a thread, because
        the fork server imports torch first.
        """
        await asyncio.to_thread(self._fork_one)

    def _fork_one(self) -> None:
        process = self.fork(_nothing)
        process.join()
        process.close()

    def fork(self, target: Callable[..., None], *args: Any) -> Any:
        """Starts a child process that calls target(*args), and returns the child. When this process exits, the child is
        terminated. If this process is killed, target must end by itself.
        """
        process = self._context.Process(target=target, args=args, daemon=True)
        with self._starting, _without_main(), _signals_held_back():
            process.start()
        return process

    def spawn(self, ranks: Sequence[RankSpec]) -> None:
        """Starts all ranks of an instance. Takes seconds unless `prepare` was called."""
        instance_id = ranks[0].instance_id
        self._alive[instance_id] = []
        for rank in ranks:
            process = self.fork(_live, rank)
            self._alive[instance_id].append(process)
            self._loop.add_reader(process.sentinel, self._on_sentinel, instance_id, process)

    def kill(self, instance_id: str, rank: int | None = None) -> None:
        """Kills one rank of an instance, or all (rank: None), with SIGKILL. As after every end of a rank, the other
        ranks are then killed, too, and on_exit is called once.
        """
        for i, process in enumerate(self._alive.get(instance_id, [])):
            if rank in {None, i} and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Waits for processes that were told to exit, and kills those that do not exit in time."""
        deadline_s = monotonic() + PATIENCE_S
        for instance_id in list(self._alive):
            self._leave(instance_id, deadline_s)

    def _leave(self, instance_id: str, deadline_s: float) -> None:
        """Waits for an instance's processes, and kills those that have not exited by the deadline. Does not call
        on_exit. deadline_s: time in s of the monotonic clock.
        """
        for process in self._alive.pop(instance_id, []):
            self._loop.remove_reader(process.sentinel)
            process.join(max(0.0, deadline_s - monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def _on_sentinel(self, instance_id: str, process: Any) -> None:
        """Handles the end of a rank: kills the instance's other ranks, and calls on_exit when they have ended."""
        exit_code = process.exitcode
        self.kill(instance_id)
        self._leave(instance_id, monotonic() + PATIENCE_S)
        self._on_exit(instance_id, exit_code)


@cache
def claim_temp_dir() -> None:
    """Makes multiprocessing keep its socket in a folder of this run. The folder is removed when this process ends. If
    the process is killed, a later run removes the folder.
    """
    folder = ScratchFolder()
    Finalize(None, folder.cleanup, exitpriority=-200)  # after multiprocessing has removed what is its own
    before, tempfile.tempdir = tempfile.tempdir, str(folder.path)
    get_temp_dir()
    tempfile.tempdir = before


@contextmanager
def _without_main() -> Iterator[None]:
    """Context in which this process has no main module, so that new child processes do not run the main module. The
    children get all they need as arguments.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Context in which new processes start with stop signals blocked. Terminals and `timeout` send these signals to all
    processes, but only the launcher may end the run, in order.
    """
    resource_tracker.ensure_running()  # as it starts, it lets them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nothing() -> None:
    """Does nothing. `prepare` forks a process that runs this function, so that a fork server is started."""


def _live(spec: RankSpec) -> None:
    from pdreal.rank.process import run_rank  # noqa: PLC0415  it imports torch, which the launcher does without

    run_rank(spec)
