"""Brings instances up: every rank publishes its memory, and all are connected before a request comes.

The same for the first start of all and for one that comes back: it says hello anew, and the others connect to it anew.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic_ns
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
        self.memories: dict[str, list[dict[str, Any]]] = {}
        """By instance, of those that are there: what each of its ranks has published."""
        self._awaited: dict[tuple[type, str], asyncio.Future[Any]] = {}
        """Notices that somebody waits for, by kind and process."""
        self._one_at_a_time = asyncio.Lock()
        self._epoch_ns: int | None = None
        """When time began."""

    async def bring_up(self, instance_ids: Sequence[str]) -> None:
        """Start them and connect everybody with them. Raises LaunchError if one ends before that."""
        async with self._one_at_a_time:
            processes = [(i, process) for i in instance_ids for process in self._fleet.processes(i)]
            expected = [self._expect(Hello, process) for _, process in processes]
            for instance_id in instance_ids:
                self._fleet.spawn(instance_id)
            hellos = zip(processes, await asyncio.gather(*expected), strict=True)
            self.memories |= {i: [] for i in instance_ids}
            for (instance_id, _), hello in hellos:
                self.memories[instance_id].append(hello.memory)
            await self._connect_all(instance_ids)

    async def begin(self) -> int:
        """Let time begin, for all; when that was, by the monotonic clock in ns."""
        self._epoch_ns = monotonic_ns()
        await self._connect_all([])
        return self._epoch_ns

    async def _connect_all(self, new: Sequence[str]) -> None:
        up = [i for i in self._fleet.instance_ids if i in self.memories]
        peers = Peers({i: self._fleet.lives[i] for i in up}, {i: self.memories[i] for i in up}, self._epoch_ns)
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
        if expected is not None and not expected.done():
            expected.set_result(notice)

    def on_death(self, instance_id: str, reason: str) -> None:
        """Who waits for its hello waits in vain; nobody has to connect to it any more."""
        self.memories.pop(instance_id, None)
        for process in self._fleet.processes(instance_id):
            hello, connected = (self._awaited.pop((kind, process), None) for kind in (Hello, Connected))
            if hello is not None and not hello.done():
                hello.set_exception(LaunchError(f"{process} did not start: {reason}"))
            if connected is not None and not connected.done():
                connected.set_result(None)

    def _expect(self, kind: type, process: str) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        self._awaited[kind, process] = future
        return future
