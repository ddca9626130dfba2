"""The instances of a run as processes: on which host each instance runs, and how often it was started."""

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdreal.control.channel import Channel, Network
from pdreal.hosts.processes import Processes
from pdreal.hosts.remote_host import ClockOffset, HostNotice, RemoteHost
from pdreal.hosts.store import Store
from pdreal.settings.host import LOOPBACK
from pdreal.settings.options import Options
from pdreal.settings.rank import RankSpec, process_name, roles_of
from pdsim.scenario.schema import Scenario


class Fleet:
    def __init__(
        self,
        scenario: Scenario,
        options: Options,
        channel: Channel,
        network: Network | None,
        *,
        sockets: Path,
        logs: Path | None,
        loop: AbstractEventLoop,
        on_death: Callable[[str, int | str], None],
    ) -> None:
        """scenario: resolved. network: the launcher's settings, for runs on several hosts. sockets: folder for Unix
        sockets. logs: folder for logbooks; None: none are kept. on_death: called when a started instance has ended,
        with the instance and the exit code of the rank that ended first, or with the instance and the reason why the
        instance was lost.
        """
        self._scenario = scenario.model_copy(update={"workload": None})
        self._options = options
        self._channel = channel
        self._network = network
        self._sockets = sockets
        self._logs = logs
        self._on_death = on_death
        self._home = Processes(loop, self._on_exit)
        self.store = Store(self._home, loop)
        self.remote: dict[str, RemoteHost] = {}
        """Hosts other than this one, by name."""
        self._alive: set[str] = set()
        self.roles = roles_of(scenario)
        """Role of each instance, in the order of the scenario."""
        self.lives = dict.fromkeys(self.roles, -1)
        """Number of each instance's current or last life, from 0. -1: the instance was never started."""
        self._host_names = dict.fromkeys(self.roles, "")
        if options.hosts is not None and network is not None:
            self._host_names = options.hosts.placed(self.instance_ids)
            self.remote = {
                name: RemoteHost(name, entry, network, channel, self._on_exit) for name, entry in options.hosts.others
            }

    async def start(self) -> None:
        """Starts the agents of all other hosts, and the store if the scenario has storage. Raises LaunchError if a host
        or the store does not start.
        """
        if (storage := self._scenario.storage) is not None:
            address = LOOPBACK if self._network is None else self._network.address
            await self.store.start(storage.drives, storage.size, address)
        await asyncio.gather(*(host.start() for host in self.remote.values()))

    def on_notice(self, notice: HostNotice, payload: Any) -> None:
        self.remote[notice.host].on_notice(notice, payload)

    def clock_offset(self, instance_id: str) -> ClockOffset:
        """Returns the clock of the instance's host minus the clock of the launcher's host."""
        host = self.remote.get(self._host_names[instance_id])
        return ClockOffset() if host is None else host.clock

    def _host(self, instance_id: str) -> Processes | RemoteHost:
        return self.remote.get(self._host_names[instance_id], self._home)

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

    async def prepare(self, instance_id: str) -> None:
        """If the instance runs on this host, starts the process from which ranks are forked, so that `spawn` is fast.
        Agents of other hosts do this themselves.
        """
        if self._host(instance_id) is self._home:
            await self._home.prepare()

    def spawn(self, instance_id: str) -> None:
        """Starts all ranks of an instance, for the first time or again."""
        self.lives[instance_id] += 1
        self._alive.add(instance_id)
        self._host(instance_id).spawn([self._spec(instance_id, rank) for rank in range(self.tp(instance_id))])

    def kill(self, instance_id: str, rank: int | None = None) -> None:
        """Kills one rank of an instance, or all (rank: None), with SIGKILL. After the end of one rank, the others are
        killed, too. on_death is called when all processes of the instance have ended.
        """
        self._host(instance_id).kill(instance_id, rank)

    async def end(self) -> list[str]:
        """Waits for ranks that were told to exit, and kills those that do not exit in time. Then kills the store's
        processes, and ends the agents of other hosts. Returns descriptions of problems on other hosts.
        """
        self._alive.clear()
        self._home.end()
        self.store.end()
        problems = await asyncio.gather(*(host.end(self._logs) for host in self.remote.values()))
        return [problem for of_host in problems for problem in of_host]

    def _on_exit(self, instance_id: str, exit_code: int | str) -> None:
        self._alive.discard(instance_id)
        self._on_death(instance_id, exit_code)

    def _spec(self, instance_id: str, rank: int) -> RankSpec:
        """Returns the settings of a rank's process. Folders are those of this host; the agent of another host replaces
        them by its own.
        """
        neighbours = [i for i in self.roles if self._host_names[i] == self._host_names[instance_id]]
        tps = [self.tp(i) for i in neighbours]
        return RankSpec(
            scenario=self._scenario,
            options=self._options,
            instance_id=instance_id,
            role=self.roles[instance_id],
            rank=rank,
            life=self.lives[instance_id],
            slot=sum(tps[: neighbours.index(instance_id)]) + rank,
            num_slots=sum(tps),
            launcher=self._channel.endpoint,
            network=self._network,
            sockets=self._sockets,
            store=self.store.master,
            logs=self._logs,
        )
