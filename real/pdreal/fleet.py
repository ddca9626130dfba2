"""The rank processes of a run: started, watched, killed.

They are forked from a process that has imported torch and nothing else, so that a start costs a fraction of a second.
"""

import os
import signal
import sys
import tempfile
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context, resource_tracker
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from pdreal.options import Options
from pdreal.scratch_folder import ScratchFolder
from pdsim.scenario.schema import AggregatedSettings, DecodeSettings, PrefillSettings, Scenario
from pdsim.scenario.sizing import instance_ids
from pdsim.system.memory import Role


def process_name(instance_id: str, rank: int) -> str:
    """The leader goes by its instance's name."""
    return f"{instance_id}.rank{rank}" if rank else instance_id


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    scenario: Scenario
    """Resolved, without its workload."""
    options: Options
    instance_id: str
    role: Role
    rank: int
    life: int
    """Starts of this instance before this one."""
    sockets: Path
    """The folder of the control channel's sockets, and where the ranks of an instance meet."""
    logs: Path | None
    """The folder of logbooks, if any are kept."""
    device_index: int
    """The GPU, if there are any: ranks are dealt to them in turn."""
    num_threads: int
    """Threads for torch on the CPU."""
    cores: tuple[int, ...]
    """Cores of all its threads."""

    @property
    def settings(self) -> PrefillSettings | DecodeSettings | AggregatedSettings:
        settings: PrefillSettings | DecodeSettings | AggregatedSettings = getattr(self.scenario, self.role)
        return settings

    @property
    def process(self) -> str:
        return process_name(self.instance_id, self.rank)

    @property
    def followers(self) -> list[str]:
        return [process_name(self.instance_id, rank) for rank in range(1, self.settings.tp)]


_PRELOADED = ["torch", "pdreal.rank"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They end a run early; what has finished is kept."""
_PATIENCE_S = 5.0
"""Limit for processes that were told to exit."""


class Fleet:
    def __init__(
        self,
        scenario: Scenario,
        options: Options,
        *,
        sockets: Path,
        logs: Path | None,
        loop: AbstractEventLoop,
        on_death: Callable[[str, int], None],
    ) -> None:
        """scenario: resolved. on_death: called with an instance and its exit code, once for each life."""
        self._scenario = scenario.model_copy(update={"workload": None})
        self._options = options
        self._sockets = sockets
        self._logs = logs
        self._loop = loop
        self._on_death = on_death
        claim_temp_dir()
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._alive: dict[str, list[Any]] = {}
        self.roles: dict[str, Role] = {}
        """Role of each instance, in the order of the scenario."""
        for role in ("prefill", "decode", "aggregated"):
            if (settings := getattr(scenario, role)) is not None:
                self.roles |= dict.fromkeys(instance_ids(settings, role), role)
        self.lives = dict.fromkeys(self.roles, -1)
        """Number of each instance's current or last life."""

    @property
    def instance_ids(self) -> list[str]:
        return list(self.roles)

    def is_alive(self, instance_id: str) -> bool:
        return instance_id in self._alive

    def tp(self, instance_id: str) -> int:
        tp: int = getattr(self._scenario, self.roles[instance_id]).tp
        return tp

    def processes(self, instance_id: str) -> list[str]:
        return [process_name(instance_id, rank) for rank in range(self.tp(instance_id))]

    def pid(self, instance_id: str, rank: int = 0) -> int:
        pid: int = self._alive[instance_id][rank].pid
        return pid

    def spawn(self, instance_id: str) -> None:
        """A new life, all ranks of it."""
        self.lives[instance_id] += 1
        life, ranks = self.lives[instance_id], range(self.tp(instance_id))
        self._alive[instance_id] = []
        for rank in ranks:
            process = self._context.Process(target=_live, args=(self._spec(instance_id, rank, life),), daemon=True)
            with _without_main(), _signals_held_back():
                process.start()
            self._alive[instance_id].append(process)
            self._loop.add_reader(process.sentinel, self._on_exit, instance_id, process)

    def kill(self, instance_id: str, rank: int | None = None) -> None:
        """Kills one rank or all of them, with all that they hold. on_death is called as it is seen."""
        for i, process in enumerate(self._alive.get(instance_id, [])):
            if rank in {None, i} and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """All were told to exit: who does not in time is killed."""
        deadline_s = monotonic() + _PATIENCE_S
        for instance_id in self.instance_ids:
            self._leave(instance_id, deadline_s)

    def _leave(self, instance_id: str, deadline_s: float) -> None:
        """Its end is no news any more."""
        for process in self._alive.pop(instance_id, []):
            self._loop.remove_reader(process.sentinel)
            process.join(max(0.0, deadline_s - monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def _on_exit(self, instance_id: str, process: Any) -> None:
        """An instance lives as long as all its ranks do."""
        exit_code = process.exitcode
        self.kill(instance_id)
        self._leave(instance_id, monotonic() + _PATIENCE_S)
        self._on_death(instance_id, exit_code)

    def _spec(self, instance_id: str, rank: int, life: int) -> RankSpec:
        tps = [self.tp(i) for i in self.roles]
        before = sum(tps[: self.instance_ids.index(instance_id)])
        return RankSpec(
            scenario=self._scenario,
            options=self._options,
            instance_id=instance_id,
            role=self.roles[instance_id],
            rank=rank,
            life=life,
            sockets=self._sockets,
            logs=self._logs,
            device_index=before + rank,
            num_threads=self._options.threads_of_rank(sum(tps)),
            cores=self._options.cores_of_rank(before + rank, sum(tps)),
        )


@cache
def claim_temp_dir() -> None:
    """Have multiprocessing keep its socket where the next start removes it, should this process be killed."""
    folder = ScratchFolder()
    Finalize(None, folder.cleanup, exitpriority=-200)  # after multiprocessing has removed what is its own
    before, tempfile.tempdir = tempfile.tempdir, str(folder.path)
    get_temp_dir()
    tempfile.tempdir = before


@contextmanager
def _without_main() -> Iterator[None]:
    """Or the child would run the program that started us: it has all it needs in its arguments."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Children never get them: terminals and `timeout` send them to all, and the launcher ends the run in order."""
    resource_tracker.ensure_running()  # as it starts, it lets them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _live(spec: RankSpec) -> None:
    from pdreal.rank import run_rank  # noqa: PLC0415  it imports torch, which the launcher does without

    run_rank(spec)
