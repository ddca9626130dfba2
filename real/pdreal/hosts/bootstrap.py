"""Starts instances: every rank publishes its memory, and all ranks are connected before the first request.

A restarted instance goes through the same steps: its ranks say hello again, and the ranks of other instances connect to
them again. Several instances may restart at once without waiting for each other.
"""

import asyncio
from collections.abc import Iterable, Sequence
from time import monotonic_ns
from typing import Any

from pdreal.control.channel import Channel
from pdreal.control.notices import Connected, Hello, Peers
from pdreal.hosts.fleet import Fleet
from pdreal.settings.host import LaunchError

_START_S = 1800.0
"""Maximum time in s for a rank to load its model and capture CUDA graphs."""
_CONNECT_S = 60.0
_HELLO = 0

_Expected = dict[tuple[int, str], "asyncio.Future[Any]"]
"""Answers that are awaited, by (number, process). number: that of the Peers notice which the process answers, or _HELLO
for a rank's Hello. process: name of the process that answers."""


class Bootstrap:
    def __init__(self, channel: Channel, fleet: Fleet) -> None:
        self._channel = channel
        self._fleet = fleet
        self.memories: dict[str, list[dict[str, Any]]] = {}
        """For each running instance, Hello.memory of each of its ranks, in the order of ranks."""
        self._endpoints: dict[str, str] = {}
        """Latest endpoint of each process."""
        self._awaited: _Expected = {}
        self._num_peers_told = 0
        self._epoch_ns: int | None = None

    async def bring_up(self, instance_ids: Sequence[str]) -> None:
        """Starts instances and connects them with all other running instances. Raises LaunchError if one of the started
        instances ends before it is connected. If any answer is late, kills the started instances and raises
        LaunchError.
        """
        expected = self._expect(_HELLO, instance_ids)
        for instance_id in instance_ids:
            self._fleet.spawn(instance_id)
        lives = {i: self._fleet.lives[i] for i in instance_ids}
        try:
            hellos = await self._all(expected, "start", _START_S)
            for instance_id in instance_ids:
                said = [hellos[_HELLO, process] for process in self._fleet.processes(instance_id)]
                self.memories[instance_id] = [hello.memory for hello in said]
                self._endpoints |= {hello.process: hello.endpoint for hello in said}
            await self._all(self._tell_peers(instance_ids), "connect", _CONNECT_S)
        except TimeoutError as late:
            for instance_id in instance_ids:
                self._fleet.kill(instance_id)
            raise LaunchError(str(late)) from None
        if gone := [i for i in lives if i not in self.memories or self._fleet.lives[i] != lives[i]]:
            raise LaunchError(f"{', '.join(gone)} ended before all were connected")

    async def begin(self) -> int:
        """Starts the run's clock on all ranks. Returns the epoch, the clock's 0, in ns of this host's monotonic clock.
        Raises LaunchError if ranks do not answer in time.
        """
        self._epoch_ns = monotonic_ns()
        try:
            await self._all(self._tell_peers([]), "connect", _CONNECT_S)
        except TimeoutError as late:
            raise LaunchError(str(late)) from None
        return self._epoch_ns

    def _tell_peers(self, new: Sequence[str]) -> _Expected:
        self._num_peers_told += 1
        up = [i for i in self._fleet.instance_ids if i in self.memories]
        lives, memories = {i: self._fleet.lives[i] for i in up}, {i: self.memories[i] for i in up}
        endpoints = {i: self._endpoints[i] for i in up}
        for instance_id in up:
            offset_ns = self._fleet.clock_offset(instance_id).offset_ns
            epoch_ns = None if self._epoch_ns is None else self._epoch_ns + offset_ns
            peers = Peers(self._num_peers_told, lives, memories, endpoints, epoch_ns)
            for process in self._fleet.processes(instance_id):
                if instance_id in new:
                    self._channel.connect(process, self._endpoints[process])
                self._channel.send(process, peers)
        return self._expect(self._num_peers_told, up)

    def on_notice(self, notice: Hello | Connected) -> None:
        expected = self._awaited.pop((notice.number if isinstance(notice, Connected) else _HELLO, notice.process), None)
        if expected is not None and not expected.done():
            expected.set_result(notice)

    def on_death(self, instance_id: str, reason: str) -> None:
        """Stops waiting for the ranks of an instance that died, and leaves the instance out of later Peers notices. If
        the launcher waits for a rank's Hello, the wait raises LaunchError with the reason. If the launcher waits for a
        rank's answer to a Peers notice, the wait ends without an answer. reason: why the instance died.
        """
        self.memories.pop(instance_id, None)
        processes = self._fleet.processes(instance_id)
        for (number, process), expected in self._awaited.items():
            if process not in processes or expected.done():
                continue
            if number == _HELLO:
                expected.set_exception(LaunchError(f"{process} did not start: {reason}"))
            else:
                expected.set_result(None)

    def _expect(self, number: int, instance_ids: Iterable[str]) -> _Expected:
        loop = asyncio.get_running_loop()
        processes = [process for i in instance_ids for process in self._fleet.processes(i)]
        expected: _Expected = {(number, process): loop.create_future() for process in processes}
        self._awaited |= expected
        return expected

    async def _all(self, expected: _Expected, what: str, limit_s: float) -> dict[tuple[int, str], Any]:
        """Waits for all expected answers, and returns them by the keys of `expected` (see _Expected). An answer to a
        Peers notice is None if the process's instance has died. what: what the processes must do, for the message.
        limit_s: maximum time in s. Raises TimeoutError that names the late processes, or LaunchError if a process did
        not start.
        """
        try:
            async with asyncio.timeout(limit_s):
                return dict(zip(expected, await asyncio.gather(*expected.values()), strict=True))
        except TimeoutError:
            late = ", ".join(process for (_, process), future in expected.items() if future.cancelled())
            raise TimeoutError(f"{late} did not {what} within {limit_s:g} s") from None
        finally:
            for key in expected:
                self._awaited.pop(key, None)
