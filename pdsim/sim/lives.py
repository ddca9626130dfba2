"""Faults kill instances and restart them with empty memory. The time between two restarts is one life of an
instance.
"""

from collections.abc import Callable
from typing import Any

from pdsim.core.instance import Instance
from pdsim.core.journal.calls import KILLED, Entry
from pdsim.core.messages import receiver_of, sender_of
from pdsim.scenario.building.machines import restarted
from pdsim.sim.bus import Bus, Driver
from pdsim.sim.links.network import Transfers


class Lives:
    def __init__(
        self,
        bus: Bus,
        transfers: Transfers | None,
        new_driver: Callable[[Any], Driver],
        on_levels: Callable[[Instance], None] | None,
    ) -> None:
        """transfers: the KV transfers of the run; None: KV is not sent. new_driver: makes the driver of a restarted
        instance. on_levels: called when an instance is killed, with the empty instance that replaces it, to record that
        queues and memory are empty; None: queues and memory are not recorded.
        """
        self.dead: dict[str, Any] = {}
        """New state machines, by id, that take the places of dead ones at the restart of their instances."""
        self._bus = bus
        self._transfers = transfers
        self._new_driver = new_driver
        self._on_levels = on_levels
        self._lives = dict.fromkeys(bus.order, 0)

    def kill(self, instance_id: str) -> None:
        """Kills an instance together with its sender or receiver, and drops its transfers. Later messages to the
        instance are lost.
        """
        self._bus.drivers[instance_id].kill()
        if self._transfers is not None:
            self._transfers.kill(instance_id)
        agents = [name for name in (sender_of(instance_id), receiver_of(instance_id)) if name in self._bus.agents]
        for name in (instance_id, *agents):
            self._bus.agents.pop(name, None)
            self.dead[name] = restarted(self._bus.cluster.scenario, name)
            if self._bus.journal is not None:
                self._bus.journal(Entry(name, KILLED, (self._bus.timeline.now_ns,), None))
        if self._on_levels is not None:
            self._on_levels(self.dead[instance_id])

    def restart(self, instance_id: str) -> None:
        """Restarts an instance with empty memory."""
        self._lives[instance_id] += 1
        if self._transfers is not None:
            self._transfers.network.revive(instance_id)
        for name in (sender_of(instance_id), receiver_of(instance_id)):
            if name in self.dead:
                self._bus.agents[name] = self._bus.recorded(self.dead.pop(name))
        self._bus.drivers[instance_id] = self._new_driver(self.dead.pop(instance_id))
        self._bus.drivers[instance_id].start()

    def life(self, instance_id: str) -> int | None:
        """Number of restarts of an instance. None: the instance is dead."""
        return None if instance_id in self.dead else self._lives[instance_id]
