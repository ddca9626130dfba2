"""Makes go wrong what a scenario says, when it says so; and the heartbeats that find it out."""

from collections.abc import Callable, Sequence
from typing import Protocol

from pdsim.core.messages import Heartbeat
from pdsim.scenario.faults import ClientAbort, ClientAborts, Fault, HealthSettings, Kill, SlowLink
from pdsim.sim.timeline import Timeline
from pdsim.workload.request_spec import Streams


class Breakable(Protocol):
    """A running cluster, and the harm that can be done to it."""

    def is_dead(self, instance_id: str) -> bool: ...
    def kill(self, instance_id: str) -> None: ...
    def restart(self, instance_id: str) -> None: ...
    def slow_link(self, instance_id: str, factor: float) -> None: ...
    def unslow_link(self, instance_id: str, factor: float) -> None: ...
    def abort(self, request_id: int) -> None: ...


class FaultInjector:
    def __init__(
        self,
        timeline: Timeline,
        faults: Sequence[Fault],
        *,
        cluster: Breakable,
        heartbeats: "Heartbeats",
        streams: Streams,
    ) -> None:
        self._timeline = timeline
        self._faults = faults
        self._heartbeats = heartbeats
        self._cluster = cluster
        self._draws = streams.named("client aborts")

    def start(self) -> None:
        actions: dict[type, Callable[..., None]] = {
            Kill: self._kill,
            SlowLink: self._slow,
            ClientAbort: lambda fault: self._cluster.abort(fault.abort),
        }
        for fault in self._faults:
            if not isinstance(fault, ClientAborts):
                self._timeline.after(fault.at_ns, actions[type(fault)], fault)

    def on_sent(self, request_id: int) -> None:
        """A client has sent a request, and may give it up later."""
        for fault in self._faults:
            if isinstance(fault, ClientAborts):
                gives_up, share = self._draws.random() < fault.abort_fraction, self._draws.random()
                if gives_up:
                    self._timeline.after(round(share * fault.within_ns), self._cluster.abort, request_id)

    def _kill(self, fault: Kill) -> None:
        """Kills an instance. One that is dead already stays so, and comes back no sooner."""
        if self._cluster.is_dead(fault.kill):
            return
        self._cluster.kill(fault.kill)
        self._heartbeats.watch(fault.kill)
        if fault.restart_after_ns is not None:
            self._timeline.after(fault.restart_after_ns, self._restart, fault.kill)

    def _restart(self, instance_id: str) -> None:
        self._cluster.restart(instance_id)
        self._heartbeats.watch(instance_id)

    def _slow(self, fault: SlowLink) -> None:
        self._cluster.slow_link(fault.link, fault.bandwidth_factor)
        if fault.lasts_ns is not None:
            self._timeline.after(fault.lasts_ns, self._unslow, fault)

    def _unslow(self, fault: SlowLink) -> None:
        self._cluster.unslow_link(fault.link, fault.bandwidth_factor)


class Heartbeats:
    """Every interval, of every instance; left out are those whose answer would be the same as the one before.

    So only instances that died or came back are asked, until the health monitor knows all there is to know.
    """

    def __init__(
        self,
        timeline: Timeline,
        health: HealthSettings,
        *,
        life: Callable[[str], int | None],
        report: Callable[[Heartbeat], None],
    ) -> None:
        """life: of an instance, which of its lives it is in, or None if it does not answer."""
        self._timeline = timeline
        self._interval_ns = health.heartbeat_interval
        self._max_failures = health.heartbeat_failures
        self._life = life
        self._report = report
        self._watched: dict[str, int] = {}
        """Failures in a row of those that are asked at the next beat."""

    def watch(self, instance_id: str) -> None:
        if instance_id not in self._watched:
            self._watched[instance_id] = 0
            self._ask_later(instance_id)

    def _ask_later(self, instance_id: str) -> None:
        delay_ns = self._interval_ns - self._timeline.now_ns % self._interval_ns
        self._timeline.after(delay_ns, self._ask, instance_id)

    def _ask(self, instance_id: str) -> None:
        life = self._life(instance_id)
        self._watched[instance_id] += 1
        if life is None and self._watched[instance_id] < self._max_failures:
            self._ask_later(instance_id)
        else:
            del self._watched[instance_id]
        self._report(Heartbeat(instance_id, life))
