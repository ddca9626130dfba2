"""The processes of Mooncake's store on the launcher's host: a master, and lenders of memory. The scenario's storage has
drives (`storage.drives`); for each drive, one lender gives the store memory of the drive's size. These processes
outlive instances, and end with the launcher.
"""

import asyncio
import ctypes
import logging
import os
import signal
from asyncio import AbstractEventLoop
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import Pipe, connection, parent_process
from pathlib import Path
from typing import Any

from pdreal.hosts.processes import Processes
from pdreal.settings.host import LOOPBACK, LaunchError, free_host_bytes, free_port

_LOG = logging.getLogger("pdreal")
_START_S = 60.0
"""Maximum time in s for a process of the store to start."""
_LOOK_S = 0.02
_TO_STDERR = 2
_DIE_WITH_PARENT = 1
"""The option PR_SET_PDEATHSIG of Linux's prctl: a process gets a signal when its parent ends."""


class Store:
    def __init__(self, processes: Processes, loop: AbstractEventLoop) -> None:
        self._processes = processes
        self._loop = loop
        self._alive: dict[str, Any] = {}
        """Running processes of the store, by name: "master", or a lender of memory, such as "drive 0"."""
        self.master: str | None = None
        """Address of the master. None: it is not started."""

    async def start(self, num_drives: int, drive_bytes: int, address: str) -> None:
        """Starts Mooncake's master and num_drives processes that lend memory, one for each drive of the scenario.
        drive_bytes: memory that each process lends, in bytes. address: address at which clients of the store reach this
        host. Raises LaunchError if this host lacks the memory, or a process does not start.
        """
        free = free_host_bytes()
        if num_drives * drive_bytes > free:
            raise LaunchError(
                f"storage: {num_drives} drives of {drive_bytes / 1e9:g} GB are memory of this host, which has "
                f"{free / 1e9:.1f} GB of free memory; set storage.size"
            )
        port = free_port()
        self.master = f"{address}:{port}"
        await self._fork("master", _be_master, address, port, free_port())
        await self._until_it_listens(address, port)
        for i in range(num_drives):
            await self._fork(f"drive {i}", _lend, self.master, address, drive_bytes)

    async def _fork(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Starts a process that calls target(*args, ready), and waits until the process reports through the pipe
        `ready`: an empty text on success, else the problem. name: name of the process in messages, such as "drive 0".
        Raises LaunchError if the process reports a problem, ends, or reports nothing in time.
        """
        ours, its = Pipe(duplex=False)
        process = await asyncio.to_thread(self._processes.fork, target, *args, its)
        its.close()
        self._alive[name] = process
        self._loop.add_reader(process.sentinel, self._on_end, name, process)
        try:
            if not await asyncio.to_thread(ours.poll, _START_S):
                raise LaunchError(f"storage: the store's {name} did not start within {_START_S:g} s")
            if problem := ours.recv():
                raise LaunchError(f"storage: {problem}")
        except EOFError:
            raise LaunchError(f"storage: the store's {name} ended at its start") from None

    async def _until_it_listens(self, address: str, port: int) -> None:
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(address, port)
                    except OSError:
                        await asyncio.sleep(_LOOK_S)
                    else:
                        writer.close()
                        return
        except TimeoutError:
            raise LaunchError(f"storage: the store's master does not listen at {address}:{port}") from None

    def _on_end(self, name: str, process: Any) -> None:
        """Handles the end of a process of the store during the run. The run goes on; pages that were lost with the
        process are computed again.
        """
        self._loop.remove_reader(process.sentinel)
        del self._alive[name]
        _LOG.error("storage: the store's %s ended (exit code %s); pages there count as missing", name, process.exitcode)

    def kill(self, name: str) -> None:
        """Kills a process of the store with SIGKILL. name: "master", or a lender of memory, such as "drive 0"."""
        self._alive[name].kill()

    def end(self) -> None:
        for process in self._alive.values():
            self._loop.remove_reader(process.sentinel)
            process.kill()
            process.join()
        self._alive.clear()


def _be_master(address: str, port: int, metrics_port: int, ready: connection.Connection) -> None:
    """Turns this process into the program mooncake_master of Mooncake's Python wheel. The program ends with this
    process's parent. address, port: where clients reach the master. metrics_port: port of this host at which the
    master serves its metrics. ready: gets the reason why the program cannot run, or an empty text directly before the
    program starts.
    """
    if problem := _problem_with_the_wheel():
        ready.send(problem)
        return
    package = find_spec("mooncake")
    assert package is not None
    assert package.submodule_search_locations is not None
    program = Path(package.submodule_search_locations[0]) / "mooncake_master"
    flags = [f"-rpc_address={address}", f"-rpc_port={port}"]
    flags += [f"-metrics_host={LOOPBACK}", f"-metrics_port={metrics_port}", "-minloglevel=3", "-logtostderr"]
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    ready.send("")
    os.closerange(_TO_STDERR + 1, os.sysconf("SC_OPEN_MAX"))  # one of them keeps this process's parent alive
    os.execv(program, [str(program), *flags])  # noqa: S606  no shell is needed


def _lend(master: str, address: str, num_bytes: int, ready: connection.Connection) -> None:
    """Lends num_bytes bytes of this process's memory to the store until the launcher has ended. master: address of the
    store's master. address: where other clients reach this host. ready: gets an empty text when the memory is lent, or
    the reason why the memory cannot be lent.
    """
    import torch  # noqa: PLC0415  the launcher does without

    from pdreal.transports.mooncake_store import MooncakeStore  # noqa: PLC0415
    from pdreal.transports.protocol import UnavailableError  # noqa: PLC0415

    try:
        store = MooncakeStore(master, address, torch.device("cpu"), lent_bytes=num_bytes)
    except UnavailableError as wrong:
        ready.send(str(wrong))
        return
    ready.send("")
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    store.close()


def _problem_with_the_wheel() -> str:
    """Says why Mooncake's store cannot be used here. Empty: it can."""
    from pdreal.transports.mooncake_store import load_store  # noqa: PLC0415  it imports torch, which the launcher does without
    from pdreal.transports.protocol import UnavailableError  # noqa: PLC0415

    try:
        load_store()
    except UnavailableError as missing:
        return str(missing)
    return ""
