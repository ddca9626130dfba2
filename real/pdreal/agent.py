"""The agent of a host (`pdreal host`): starts and ends ranks there, as a launcher elsewhere tells it.

The launcher's ticket, with the run's keys, is the first line of standard input; its end is the end of the agent.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

from pdreal.channel import LAUNCHER, Channel, Envelope, Network
from pdreal.notices import AskTime, Ended, EndHost, HostDone, HostUp, KeptLog, KillRanks, SpawnRanks, Time
from pdreal.processes import Processes
from pdreal.scratch_folder import ScratchFolder
from pdsim import __version__
from pdsim.scenario.yaml_file import ConfigError

_PART_BYTES = 4 << 20


def serve_host() -> None:
    """Returns when the launcher is done, or gone. Raises ConfigError without a ticket."""
    try:
        ticket = json.loads(sys.stdin.readline())
        if "target" in ticket:
            from pdreal.measure.target import serve_target  # noqa: PLC0415  it imports torch

            serve_target(**ticket["target"])
            return
        host, launcher = ticket.pop("host"), ticket.pop("launcher")
        network = Network(**ticket)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError("expected a launcher's ticket on standard input: `pdreal run --hosts` calls this") from None
    with ScratchFolder() as folder:
        asyncio.run(Agent(host, launcher, network, folder).live())


class Agent:
    def __init__(self, host: str, launcher: str, network: Network, folder: Path) -> None:
        self._host = host
        self._launcher = launcher
        self._network = network
        self._folder = folder
        self._logs = folder / "logs"
        self._logs.mkdir()

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 1) else is_over.set())
        self._processes = Processes(loop, lambda *exited: self._tell(Ended(self._host, *exited)))
        self._channel = Channel(self._folder, "agent", network=self._network)
        self._channel.connect(LAUNCHER, self._launcher)
        self._channel.listen(loop, self._on_envelope)
        self._tell(HostUp(self._host, self._channel.endpoint, __version__))
        await is_over.wait()
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
                self._processes.spawn([self._here(rank) for rank in payload])
            case KillRanks(instance_id, rank):
                self._processes.kill(instance_id, rank)
            case EndHost():
                self._processes.end()
                self._hand_over()
                self._tell(HostDone(self._host))

    def _here(self, rank: Any) -> Any:
        return replace(rank, sockets=self._folder, logs=self._logs if rank.logs is not None else None)

    def _hand_over(self) -> None:
        for path in sorted(self._logs.iterdir()):
            with path.open("rb") as file:
                while part := file.read(_PART_BYTES):
                    self._tell(KeptLog(self._host, path.name), part)
