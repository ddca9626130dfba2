"""A host besides the launcher's, as the launcher sees it: an agent there starts and ends ranks (agent.py)."""

import asyncio
import json
import shlex
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

from pdreal.channel import Channel, Network
from pdreal.hosts import HostEntry
from pdreal.launch_error import LaunchError
from pdreal.notices import AskTime, Ended, EndHost, HostDone, HostUp, KeptLog, KillRanks, SpawnRanks, Time
from pdreal.processes import PATIENCE_S
from pdreal.rank_spec import RankSpec
from pdsim import __version__

_START_S = 60.0
"""Limit for an agent to answer."""
_QUIET_S = 2 * PATIENCE_S
"""Time without news from an agent that was told to end, after which it is left alone."""
_ROUND_TRIPS = 50
_ROUND_TRIP_S = 2.0
_TO_STDERR = 2

HostNotice = HostUp | Time | Ended | KeptLog | HostDone


class ClockOffset(NamedTuple):
    """Lead of a host's monotonic clock over the launcher's."""

    offset_ns: int = 0
    error_ns: int = 0
    """Half the shortest round trip."""


class RemoteHost:
    def __init__(
        self, name: str, entry: HostEntry, network: Network, channel: Channel, on_exit: Callable[[str, int | str], None]
    ) -> None:
        """on_exit: called with an instance and an exit code, or why it is lost, once for each that was started."""
        self.name = name
        self.clock = ClockOffset()
        self.last_clock: ClockOffset | None = None
        """The clock at the end of the run; None if the host was lost."""
        self.half_trips_ns: list[int] = []
        """Half of each round trip that asked for the time."""
        self._entry = entry
        self._network = network._replace(address=str(entry.address))
        self._channel = channel
        self._on_exit = on_exit
        self._process: Process | None = None
        self._alive: set[str] = set()
        self._lost = ""
        self._answers: dict[type, asyncio.Future[Any]] = {}
        """The next notice of each kind."""
        self._logs: Path | None = None
        self._is_quiet = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def process(self) -> str:
        """The agent's."""
        return f"host:{self.name}"

    async def start(self) -> None:
        """Returns when the agent is there, and its clock is known. Raises LaunchError."""
        command = shlex.split(self._entry.start or "")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=_TO_STDERR, start_new_session=True
            )
        except OSError as wrong:
            raise LaunchError(f"host {self.name}: {command[0]}: {wrong.strerror}") from None
        assert self._process.stdin is not None
        ticket = {"host": self.name, "launcher": self._channel.endpoint, **self._network._asdict()}
        self._process.stdin.write(json.dumps(ticket).encode() + b"\n")
        up = self._next(HostUp)
        self._watch = asyncio.create_task(self._wait_for_its_end(self._process))
        await asyncio.wait([up, self._watch], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            raise LaunchError(self._lost or f"host {self.name} did not answer within {_START_S:g} s")
        _, endpoint, version = up.result()
        if version != __version__:
            raise LaunchError(f"host {self.name} has pdsim {version}, here is {__version__}")
        self._channel.connect(self.process, endpoint)
        try:
            self.clock = await self._ask_time()
        except TimeoutError:
            raise LaunchError(f"host {self.name} did not say its time within {_ROUND_TRIP_S:g} s") from None

    async def _wait_for_its_end(self, process: Process) -> None:
        exit_code = await process.wait()
        self._lost = f"host {self.name} was lost: {self._entry.start} ended with exit code {exit_code}"
        for instance_id in list(self._alive):
            self._alive.discard(instance_id)
            self._on_exit(instance_id, self._lost)

    async def _ask_time(self) -> ClockOffset:
        """The offset of the shortest round trip: the clock is taken to be read in its middle, as NTP does."""
        offsets = []
        for number in range(_ROUND_TRIPS):
            begin_ns, answer = monotonic_ns(), self._next(Time)
            self._channel.send(self.process, AskTime(number))
            async with asyncio.timeout(_ROUND_TRIP_S):
                read_ns = (await answer).time_ns
            end_ns = monotonic_ns()
            offsets.append(ClockOffset(read_ns - (begin_ns + end_ns) // 2, (end_ns - begin_ns) // 2))
        self.half_trips_ns = [offset.error_ns for offset in offsets]
        return min(offsets, key=lambda offset: offset.error_ns)

    def described(self) -> dict[str, float]:
        """Its clock, in ms; the drift is what the offset grew by in the run, and is not taken into account."""
        drift = {} if self.last_clock is None else {"clock_drift_ms": self.last_clock.offset_ns - self.clock.offset_ns}
        measured = {"clock_offset_ms": self.clock.offset_ns, "clock_error_ms": self.clock.error_ns, **drift}
        return {name: time_ns / 1e6 for name, time_ns in measured.items()}

    def _next(self, kind: type) -> "asyncio.Future[Any]":
        answer = self._answers[kind] = asyncio.get_running_loop().create_future()
        return answer

    def on_notice(self, notice: HostNotice, payload: Any) -> None:
        self._is_quiet = False
        match notice:
            case Ended(_, instance_id, exit_code):
                if instance_id in self._alive:
                    self._alive.discard(instance_id)
                    self._on_exit(instance_id, exit_code)
            case KeptLog(_, file_name):
                if self._logs is not None:
                    with (self._logs / Path(file_name).name).open("ab") as file:
                        file.write(payload)
            case _:
                if (answer := self._answers.pop(type(notice), None)) is not None and not answer.done():
                    answer.set_result(notice)

    def spawn(self, ranks: Sequence[RankSpec]) -> None:
        """Start all ranks of an instance."""
        instance_id = ranks[0].instance_id
        if self._lost:
            asyncio.get_running_loop().call_soon(self._on_exit, instance_id, self._lost)
            return
        self._alive.add(instance_id)
        self._channel.send(self.process, SpawnRanks(), payload=[rank.at(self._network) for rank in ranks])

    def kill(self, instance_id: str, rank: int | None = None) -> None:
        self._channel.send(self.process, KillRanks(instance_id, rank))

    async def end(self, logs: Path | None) -> list[str]:
        """End all its processes, and fetch their logbooks, if they are kept. Returns what went wrong."""
        self._alive.clear()
        if self._process is None or self._watch is None:
            return []
        self._logs = logs
        with suppress(TimeoutError):
            self.last_clock = await self._ask_time()
        done = self._next(HostDone)
        self._channel.send(self.process, EndHost())
        while not (done.done() or self._is_quiet or self._watch.done()):
            self._is_quiet = True
            await asyncio.wait([done, self._watch], timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        lost = self._lost  # before it is told to go
        await self._dismiss(self._process, self._watch)
        if done.done() or logs is None:
            return []
        return [f"{lost or f'host {self.name} was silent at the end'}; logbooks of its instances are not here"]

    async def _dismiss(self, process: Process, watch: "asyncio.Task[None]") -> None:
        """Agents end with their standard input."""
        assert process.stdin is not None
        process.stdin.close()
        for stop in (process.terminate, process.kill):
            await asyncio.wait([watch], timeout=PATIENCE_S)
            if watch.done():
                return
            stop()
        await watch
