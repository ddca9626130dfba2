"""Brings instances up: every rank publishes its memory, and all are connected before a request comes.

The same for the first start of all and for one that comes back: it says hello anew, and the others connect to it anew.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from pdreal.channel import Channel
from pdreal.fleet import Fleet
from pdreal.notices import Connected, Hello, Peers


class LaunchError(RuntimeError):
    """An instance did not come up."""


class Bootstrap:
    def __init__(self, channel: Channel, fleet: Fleet) -> None:
        self._channel = channel
        self._fleet = fleet
        self._memories: dict[str, list[dict[str, Any]]] = {}
        """Of instances that are up."""
        self._awaited: dict[tuple[type, str], asyncio.Future[Any]] = {}
        """Notices that somebody waits for, by kind and process."""
        self._one_at_a_time = asyncio.Lock()

    async def bring_up(self, instance_ids: Sequence[str]) -> None:
        """Start them and connect everybody with them. Raises LaunchError if one ends before that."""
        async with self._one_at_a_time:
            hellos = {i: [self._expect(Hello, process) for process in self._fleet.processes(i)] for i in instance_ids}
            for instance_id in instance_ids:
                self._fleet.spawn(instance_id)
            for instance_id, expected in hellos.items():
                self._memories[instance_id] = [hello.memory for hello in await asyncio.gather(*expected)]
            await self._connect_all(instance_ids)

    async def _connect_all(self, new: Sequence[str]) -> None:
        up = [i for i in self._fleet.instance_ids if i in self._memories]
        peers = Peers({i: self._fleet.lives[i] for i in up}, {i: self._memories[i] for i in up})
        expected = []
        for instance_id in up:
            for process in self._fleet.processes(instance_id):
                if instance_id in new:
                    self._channel.connect(process, self._fleet.lives[instance_id])
                expected.append(self._expect(Connected, process))
                self._channel.send(process, peers)
        await asyncio.gather(*expected)

    def on_notice(self, notice: Hello | Connected) -> None:
        expected = self._awaited.pop((type(notice), notice.process), None)
        if expected is not None:
            expected.set_result(notice)

    def on_death(self, instance_id: str, reason: str) -> None:
        """Who waits for its hello waits in vain; nobody has to connect to it any more."""
        self._memories.pop(instance_id, None)
        for process in self._fleet.processes(instance_id):
            if expected := self._awaited.pop((Hello, process), None):
                expected.set_exception(LaunchError(f"{process} did not start: {reason}"))
            if expected := self._awaited.pop((Connected, process), None):
                expected.set_result(None)

    def _expect(self, kind: type, process: str) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        self._awaited[kind, process] = future
        return future
