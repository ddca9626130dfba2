"""A host other than the launcher's. RemoteHost is the launcher's view of the host; Agent runs on the host, and starts
and ends ranks there.

The agent (`pdreal host`) reads the launcher's ticket, with the run's keys, from the first line of its standard input.
The agent ends when its standard input is closed, so no process outlives the launcher. The user names the command that
starts the agent (ssh, srun, kubectl exec); these commands log in and carry standard input. ZeroMQ's heartbeats are off:
TCP resends messages, so a cut link delays messages and loses none.
"""

import asyncio
import json
import os
import shlex
import sys
from asyncio import TaskGroup
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from time import monotonic_ns
from typing import Any, NamedTuple

from pdreal.control.channel import LAUNCHER, Channel, Envelope, Network
from pdreal.control.notices import AskTime, Ended, EndHost, HostDone, HostUp, KeptLog, KillRanks, SpawnRanks, Time
from pdreal.hosts.processes import PATIENCE_S, Processes
from pdreal.hosts.scratch_folder import ScratchFolder
from pdreal.settings.host import HostEntry, LaunchError
from pdreal.settings.rank import RankSpec
from pdsim import __version__
from pdsim.inputs import InputError, parse_json
from pdsim.scenario.yaml_file import ConfigError

_START_S = 60.0
"""Maximum time in s for an agent to answer."""
_QUIET_S = 2 * PATIENCE_S
"""The launcher waits this time in s for each message of an agent that was told to end."""
_ROUND_TRIPS = 50
_ROUND_TRIP_S = 2.0
_TO_STDERR = 2

HostNotice = HostUp | Time | Ended | KeptLog | HostDone


class ClockOffset(NamedTuple):
    """The monotonic clock of a host minus the launcher's."""

    offset_ns: int = 0
    error_ns: int = 0
    """Maximum error of the offset in ns: half the shortest round trip."""


class RemoteHost:
    def __init__(
        self, name: str, entry: HostEntry, network: Network, channel: Channel, on_exit: Callable[[str, int | str], None]
    ) -> None:
        """name: name of the host. entry: its address, instances and start command. on_exit: called once for each start
        of an instance, when the instance has ended: with the instance and the exit code of the rank that ended first,
        or the reason of the instance's loss. `end` does not call on_exit.
        """
        self.name = name
        self.clock = ClockOffset()
        self.last_clock: ClockOffset | None = None
        """The clock's offset at the end of the run. None: the run has not ended, or the host did not answer then."""
        self.half_trips_ns: list[int] = []
        """Half of each round trip of a time request, in ns."""
        self._entry = entry
        self._network = network._replace(address=str(entry.address))
        self._channel = channel
        self._on_exit = on_exit
        self._process: Process | None = None
        self._alive: set[str] = set()
        self._lost = ""
        self._answers: dict[type, asyncio.Future[Any]] = {}
        """Future for the next notice of each kind."""
        self._logs: Path | None = None
        self._is_quiet = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def process(self) -> str:
        """Process name of the host's agent."""
        return f"host:{self.name}"

    async def start(self) -> None:
        """Starts the agent and measures its clock's offset. Raises LaunchError if the agent does not start or answer,
        or has another version of pdsim.
        """
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
            raise LaunchError(f"host {self.name} did not answer with its time within {_ROUND_TRIP_S:g} s") from None

    async def _wait_for_its_end(self, process: Process) -> None:
        exit_code = await process.wait()
        self._lost = f"host {self.name} was lost: {self._entry.start} ended with exit code {exit_code}"
        for instance_id in list(self._alive):
            self._alive.discard(instance_id)
            self._on_exit(instance_id, self._lost)

    async def _ask_time(self) -> ClockOffset:
        """Measures the clock of the remote host minus the launcher's clock in several round trips, and returns the
        result of the shortest trip. As in NTP, the remote host is assumed to read its clock in the middle of the trip.
        Raises TimeoutError if an answer takes longer than _ROUND_TRIP_S s.
        """
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
        """Returns, in ms, the offset of the host's clock from the launcher's clock, the error of the measured offset,
        and the drift: the change of the offset during the run. The drift is left out if last_clock is None. Recorded
        times are corrected for the offset, and not for the drift.
        """
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
        """Tells the agent to start the processes of one instance on this remote host. If the host is lost, calls
        on_exit soon instead. ranks: settings of all ranks of the instance.
        """
        instance_id = ranks[0].instance_id
        if self._lost:
            asyncio.get_running_loop().call_soon(self._on_exit, instance_id, self._lost)
            return
        self._alive.add(instance_id)
        there = [replace(rank, network=self._network) for rank in ranks]
        self._channel.send(self.process, SpawnRanks(), payload=there)

    def kill(self, instance_id: str, rank: int | None = None) -> None:
        self._channel.send(self.process, KillRanks(instance_id, rank))

    async def end(self, logs: Path | None) -> list[str]:
        """Ends all processes of the host, and fetches their logbooks. logs: folder for the logbooks; None: no logbooks
        are kept. Returns a list with a text if logbooks were not received, else an empty list.
        """
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
        return [f"{lost or f'host {self.name} was silent at the end'}; logs of its instances were not received"]

    async def _dismiss(self, process: Process, watch: "asyncio.Task[None]") -> None:
        """Ends the agent by closing the standard input of its start command, such as ssh. If the command still runs
        after PATIENCE_S s, sends SIGTERM to the command, and after the same time SIGKILL. process: the start command.
        watch: task that ends when the start command has ended.
        """
        assert process.stdin is not None
        process.stdin.close()
        for stop in (process.terminate, process.kill):
            await asyncio.wait([watch], timeout=PATIENCE_S)
            if watch.done():
                return
            stop()
        await watch


_PART_BYTES = 4 << 20


def read_ticket() -> dict[str, Any]:
    """Returns the ticket: the JSON object in the first line of standard input. A ticket of RemoteHost.start has the
    arguments of `serve_host`; a ticket of target_of (measure/transfers.py) has the field `target`. Raises ConfigError
    if the line is no ticket.
    """
    try:
        ticket = parse_json(sys.stdin.readline(), "standard input")
    except InputError:
        ticket = None
    if not isinstance(ticket, dict) or not ({"host", "launcher"} <= ticket.keys() or "target" in ticket):
        raise ConfigError("expected a launcher's ticket on standard input: `pdreal run --hosts` calls this")
    return ticket


def serve_host(*, host: str, launcher: str, **network: str) -> None:
    """Runs instances on this host until the launcher tells the agent to end, or is gone. The arguments come from the
    launcher's ticket. host: name of this host. launcher: endpoint of the launcher. network: fields of Network.
    """
    with ScratchFolder() as folder:
        asyncio.run(Agent(host, launcher, Network(**network), folder).live())


class Agent:
    def __init__(self, host: str, launcher: str, network: Network, folder: Path) -> None:
        """host: name of this host. launcher: endpoint of the launcher. network: settings for runs on several hosts.
        folder: for sockets and logbooks.
        """
        self._host = host
        self._launcher = launcher
        self._network = network
        self._folder = folder
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._starting: dict[str, list[RankSpec]] = {}
        """Ranks of instances that wait for the process from which ranks are forked."""

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 1) else is_over.set())
        self._processes = Processes(loop, lambda *exited: self._tell(Ended(self._host, *exited)))
        self._channel = Channel(self._folder, "agent", network=self._network)
        self._channel.connect(LAUNCHER, self._launcher)
        self._channel.listen(loop, self._on_envelope)
        async with TaskGroup() as self._tasks:
            self._tell(HostUp(self._host, self._channel.endpoint, __version__))
            await is_over.wait()
            self._starting.clear()
        loop.remove_reader(sys.stdin.fileno())
        self._processes.end()
        self._channel.close()

    def _tell(self, notice: Any, payload: Any = None) -> None:
        self._channel.send(LAUNCHER, notice, payload=payload)

    def _on_envelope(self, envelope: Envelope, payload: Any) -> None:
        match envelope.message:
            case AskTime(number):
                self._tell(Time(self._host, number, monotonic_ns()))
            case SpawnRanks():
                ranks = self._starting[payload[0].instance_id] = [self._here(rank) for rank in payload]
                self._tasks.create_task(self._spawn(ranks))
            case KillRanks(instance_id) if self._starting.pop(instance_id, None):
                self._tell(Ended(self._host, instance_id, -SIGKILL))
            case KillRanks(instance_id, rank):
                self._processes.kill(instance_id, rank)
            case EndHost():
                self._starting.clear()
                self._processes.end()
                self._hand_over()
                self._tell(HostDone(self._host))

    async def _spawn(self, ranks: list[RankSpec]) -> None:
        """Starts an instance when the process that forks ranks is ready, unless the instance is killed before."""
        await self._processes.prepare()
        if self._starting.get(ranks[0].instance_id) is ranks:
            del self._starting[ranks[0].instance_id]
            self._processes.spawn(ranks)

    def _here(self, rank: Any) -> Any:
        return replace(rank, sockets=self._folder, logs=self._logs if rank.logs is not None else None)

    def _hand_over(self) -> None:
        for path in sorted(self._logs.iterdir()):
            with path.open("rb") as file:
                while part := file.read(_PART_BYTES):
                    self._tell(KeptLog(self._host, path.name), part)
