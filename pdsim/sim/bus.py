"""Simulated time in integer ns, and a bus that delivers the messages and commands of a simulation.

Events of one instant run in this order:

first   messages, transfers, arrivals                            in the order in which they were scheduled
then    instances handle ended steps, and choose the next steps  by instance

Therefore the order of instances does not depend on which instance scheduled its event first.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from simpy import Environment
from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.instance import Instance
from pdsim.core.journal.calls import Entry, Recorded
from pdsim.core.messages import TransferUnit, sender_of
from pdsim.metrics.recorder import Recorder
from pdsim.scenario.building.cluster import Cluster

FIRST = EventPriority(1)
CHOICES = EventPriority(1 << 20)

Callback = Callable[[Any], None]
"""Function that an alarm calls with its payload."""


class Alarm:
    """A scheduled call of a function at one time."""

    __slots__ = ("callback", "payload")

    def __init__(self, callback: Callback, payload: Any) -> None:
        self.callback = callback
        self.payload = payload

    def cancel(self) -> None:
        """Cancels the alarm. Its time then passes without effect."""
        self.callback = _nothing


def _nothing(_: Any) -> None:
    pass


class Timeline:
    """SimPy's event queue, with delays in whole ns. Tests: tests/laws/test_alarms.py."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_events = 0
        """Number of events scheduled so far."""
        self.num_watches = 0
        """Number of scheduled readings of metrics. They do not keep a run from ending (has_ended)."""
        self._queue: list[Any] = Environment()._queue  # noqa: SLF001  not inherited, for it is compiled

    def after(self, delay_ns: int, callback: Callback, payload: Any = None, order: EventPriority = FIRST) -> Alarm:
        """Schedules a call of `callback` with `payload` after delay_ns, as SimPy's timeout does. order: priority among
        events of the same instant, lower first.
        """
        assert delay_ns >= 0, f"{callback} is due {-delay_ns} ns ago"
        alarm = Alarm(callback, payload)
        self.num_events += 1
        heappush(self._queue, (self.now_ns + delay_ns, order, self.num_events, alarm))
        return alarm

    def run_all(self) -> None:
        """Calls the callbacks of all alarms in order of time, until no alarm is left. SimPy's own loop is not needed,
        because all events here are alarms, and none can fail.
        """
        queue: list[tuple[int, EventPriority, int, Alarm]] = self._queue
        while queue:
            self.now_ns, _, _, alarm = heappop(queue)
            alarm.callback(alarm.payload)

    @property
    def is_last_now(self) -> bool:
        """True if no other event is due at the present instant."""
        return not self._queue or self._queue[0][0] > self.now_ns

    @property
    def has_ended(self) -> bool:
        """True if no event is left besides readings of metrics (num_watches). A cancelled alarm counts as an event."""
        return len(self._queue) == self.num_watches


class Driver:
    """Drives one instance of a simulation. This base class declares what other components may call."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def start(self) -> None:
        raise NotImplementedError

    def post(self, message: m.Message) -> None:
        """Delivers a message to the instance. A dead instance ignores it."""
        raise NotImplementedError

    def go_at(self, pace: float) -> None:
        """Sets the speed of the instance's loop. pace: the speed as a share of the normal speed."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kills the instance. Steps under way produce no result."""
        raise NotImplementedError

    @property
    def num_steps_done(self) -> int:
        """Number of decode steps that have ended, but whose results the instance has not seen. A driver simulates many
        steps at once, and the instance sees their results together.
        """
        raise NotImplementedError


class Bus:
    """Delivers messages and carries out commands. The simulation connects all its components to the bus, which holds
    what they share: cluster, timeline, recorder and drivers.
    """

    def __init__(self, cluster: Cluster, recorder: Recorder, journal: Callable[[Entry], None] | None) -> None:
        self.cluster = cluster
        self.timeline = Timeline()
        self.recorder = recorder
        self.journal = journal
        """Function that is called with every call into an instance. None: the run writes no journal."""
        self.outputs = {spec.request_id: spec.output for spec in cluster.requests}
        """Output tokens of each attempt (first try or retry of a request), by its id. Clients add those of retries."""
        self.order = {instance.instance_id: index for index, instance in enumerate(cluster.instances)}
        self.sender_ids = {instance_id: sender_of(instance_id) for instance_id in self.order}
        self.drivers: dict[str, Driver] = {}
        """Drivers of all instances by instance id. For a dead instance: the driver of its last life."""
        self.agents: dict[str, Any] = {agent.instance_id: self.recorded(agent) for agent in cluster.agents}
        """Living state machines beside the instances (Cluster.agents), by id."""
        self.commands: dict[type, Callable[[Any], None]] = {
            m.Send: self.send,
            m.Tell: self.deliver,
            m.WakeAt: self.wake_at,
            m.Retracted: lambda command: self.recorder.on_retracted(command.request_id, self.timeline.now_ns),
            m.AskOutput: self._put_out,
            TransferUnit: self._queue_unit,
        }
        """Handlers of commands, by type. Clients and transfers add their own."""
        self._message_ns, self._handover_ns = cluster.message_latency_ns, cluster.handover_ns
        self._grant_ns = 0 if cluster.grant_wait_ns is None else self._message_ns + cluster.grant_wait_ns

    def recorded(self, machine: Any) -> Any:
        """Wraps a state machine so that its calls go to the journal. Returns it unchanged if the run writes no
        journal.
        """
        return machine if self.journal is None else Recorded(machine, self.journal)

    def instance(self, instance_id: str) -> Any:
        """Returns the instance with this id, without the wrapper that records its calls. If the instance is dead:
        its last life.
        """
        instance = self.drivers[instance_id].instance
        return getattr(instance, "inner", instance)

    def carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            self.commands[type(command)](command)

    def send(self, command: m.Send) -> None:
        message = command.message
        if isinstance(message, m.KvGranted):
            self.recorder.on_admitted(message.request_id, message.num_cached_tokens, self.timeline.now_ns)
            self.timeline.after(self._grant_ns, self.deliver, command)
            return
        handover_ns = self._handover_ns if isinstance(message, m.KvArrived) else 0
        self.timeline.after(self._message_ns + handover_ns, self.deliver, command)

    def send_together(self, commands: list[m.Send]) -> None:
        self.timeline.after(self._message_ns, self._deliver_together, commands)

    def _deliver_together(self, commands: list[m.Send]) -> None:
        for command in commands:
            self.drivers[command.to].post(command.message)

    def deliver(self, command: m.Send | m.Tell) -> None:
        to, message = command.to, command.message
        if (driver := self.drivers.get(to)) is not None:
            driver.post(message)
        elif to == self.cluster.router.instance_id:
            self.tell_router(message)
        else:
            self.tell_agent(to, message)

    def wake_at(self, command: m.WakeAt) -> None:
        delay_ns = max(0, command.time_ns - self.timeline.now_ns)
        self.timeline.after(delay_ns, self.deliver, m.Tell(command.who, m.Woken()))

    def _put_out(self, asked: m.AskOutput) -> None:
        output = self.outputs[asked.request_id].first(asked.num_tokens)
        self.deliver(m.Tell(asked.instance_id, m.PutOut(asked.request_id, output)))

    def tell_router(self, message: m.Message) -> None:
        """Gives the router a message, and carries out the commands that it returns. Clients call this, because they see
        the ends of requests.
        """
        raise NotImplementedError

    def tell_agent(self, to: str, message: m.Message) -> None:
        """Gives a message to a state machine beside the instances, such as a sender or receiver, and carries out the
        commands that it returns. No effect if none with this id lives.
        """
        if (agent := self.agents.get(to)) is not None:
            self.carry_out(agent.on_message(message, self.timeline.now_ns))

    def _queue_unit(self, unit: TransferUnit) -> None:
        self.tell_agent(self.sender_ids[unit.source], unit)

    def on_layers(self, prefill_id: str, computed: m.LayersComputed) -> None:
        self.tell_agent(self.sender_ids[prefill_id], computed)

    def record_levels(self, instance: Instance) -> None:
        self.recorder.on_levels(instance.instance_id, instance.levels(), self.timeline.now_ns)
