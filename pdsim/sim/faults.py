"""Carries out a scenario's faults at their times, and sends heartbeats."""

from collections.abc import Callable

from pdsim.core.messages import Heartbeat
from pdsim.scenario.sections.faults import ClientAbort, ClientAborts, HealthSettings, Kill, SlowLink
from pdsim.sim.bus import Bus
from pdsim.sim.clients import Clients
from pdsim.sim.links.network import Transfers
from pdsim.sim.lives import Lives
from pdsim.workload.request_spec import Streams


class FaultInjector:
    def __init__(
        self, bus: Bus, health: HealthSettings, clients: Clients, transfers: Transfers | None, lives: Lives
    ) -> None:
        scenario = bus.cluster.scenario
        self._clients = clients
        self._transfers = transfers
        self._lives = lives
        self._timeline = bus.timeline
        self._faults = scenario.faults
        self._loading_ns = scenario.cost.host.loading
        self._heartbeats = Heartbeats(bus, health, lives)
        self._draws = Streams(scenario.seed).named("client aborts")
        clients.on_sent = self._on_sent

    def start(self) -> None:
        actions: dict[type, Callable[..., None]] = {
            Kill: self._kill,
            SlowLink: self._slow,
            ClientAbort: lambda fault: self._clients.abort(fault.abort),
        }
        for fault in self._faults:
            if not isinstance(fault, ClientAborts):
                self._timeline.after(fault.at_ns, actions[type(fault)], fault)

    def _on_sent(self, request_id: int) -> None:
        """Decides at random whether and when the client of a request aborts it."""
        for fault in self._faults:
            if isinstance(fault, ClientAborts):
                gives_up, share = self._draws.random() < fault.abort_fraction, self._draws.random()
                if gives_up:
                    self._timeline.after(round(share * fault.within_ns), self._clients.abort, request_id)

    def _kill(self, fault: Kill) -> None:
        """Kills an instance, and schedules its restart. No effect if the instance is dead already."""
        if self._lives.life(fault.kill) is None:
            return
        self._lives.kill(fault.kill)
        self._heartbeats.watch(fault.kill)
        if fault.restart_after_ns is not None:
            self._timeline.after(fault.restart_after_ns + self._loading_ns, self._restart, fault.kill)

    def _restart(self, instance_id: str) -> None:
        self._lives.restart(instance_id)
        self._heartbeats.watch(instance_id)

    def _slow(self, fault: SlowLink) -> None:
        transfers = self._transfers
        assert transfers is not None, "an aggregated cluster has no links"
        network, links = transfers.network, transfers.links_of(fault.link)
        network.slow(links, fault.bandwidth_factor)
        if fault.lasts_ns is not None:
            self._timeline.after(fault.lasts_ns, lambda _: network.unslow(links, fault.bandwidth_factor))


class Heartbeats:
    """Sends heartbeats of instances to the health monitor.

    Instances that died or restarted are asked at each interval until the monitor knows their state. Other instances are
    not asked, because their answer would not change.
    """

    def __init__(self, bus: Bus, health: HealthSettings, lives: Lives) -> None:
        self._bus = bus
        self._lives = lives
        self._timeline = bus.timeline
        self._monitor = bus.recorded(bus.cluster.monitor)
        self._interval_ns = health.heartbeat_interval
        self._max_failures = health.heartbeat_failures
        self._watched: dict[str, int] = {}
        """Instances to ask at the next heartbeat. Value: number of heartbeats since the instance died or restarted."""

    def watch(self, instance_id: str) -> None:
        """Begins to ask an instance that has just died or restarted. It is first asked at the next multiple of the
        interval, which may be now, but not at time 0. No effect if the instance is already being asked.
        """
        if instance_id not in self._watched:
            self._watched[instance_id] = 0
            now_ns = self._timeline.now_ns
            delay_ns = -now_ns % self._interval_ns if now_ns else self._interval_ns
            self._timeline.after(delay_ns, self._ask, instance_id)

    def _ask(self, instance_id: str) -> None:
        life = self._lives.life(instance_id)
        self._watched[instance_id] += 1
        if life is None and self._watched[instance_id] < self._max_failures:
            self._timeline.after(self._interval_ns, self._ask, instance_id)
        else:
            del self._watched[instance_id]
        for command in self._monitor.on_message(Heartbeat(instance_id, life), self._timeline.now_ns):
            self._bus.send(command)
