"""Messages and commands of a simulation, and the objects that all its parts share: cluster, timeline, recorder,
drivers.
"""

from collections.abc import Callable
from typing import Any

from pdsim.core import messages as m
from pdsim.core.instance import Instance
from pdsim.core.journal import Entry, Recorded
from pdsim.core.messages import sender_of
from pdsim.core.transfer.transfer_plan import TransferUnit
from pdsim.metrics.recorder import Recorder
from pdsim.scenario.building.cluster import Cluster
from pdsim.sim.timeline import Timeline


class Driver:
    """Drives one instance: the interface for other parts of a simulation."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def start(self) -> None:
        raise NotImplementedError

    def post(self, message: m.Message) -> None:
        """Delivers a message. A dead instance ignores it."""
        raise NotImplementedError

    def go_at(self, pace: float) -> None:
        """Sets the speed of the instance's loop, relative to its normal speed."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kills the instance. Its running steps produce no result."""
        raise NotImplementedError

    @property
    def num_steps_done(self) -> int:
        """Number of decode steps under way that are done, and that the instance does not know of yet."""
        raise NotImplementedError


class Bus:
    """Delivers messages and carries out commands for all parts of a simulation, which the simulation connects to it."""

    def __init__(self, cluster: Cluster, recorder: Recorder, journal: Callable[[Entry], None] | None) -> None:
        self.cluster = cluster
        self.timeline = Timeline()
        self.recorder = recorder
        self.journal = journal
        """Called with every call into an instance. None: the run has no journal."""
        self.outputs = {spec.request_id: spec.output for spec in cluster.requests}
        """Outputs of all attempts. Clients add the outputs of retries."""
        self.order = {instance.instance_id: index for index, instance in enumerate(cluster.instances)}
        self.sender_ids = {instance_id: sender_of(instance_id) for instance_id in self.order}
        self.drivers: dict[str, Driver] = {}
        """Drivers of all instances; of a dead instance the driver of its last life."""
        self.agents: dict[str, Any] = {agent.instance_id: self.recorded(agent) for agent in cluster.agents}
        """Living senders and receivers."""
        self.commands: dict[type, Callable[[Any], None]] = {
            m.Send: self.send,
            m.Tell: self.deliver,
            m.WakeAt: self.wake_at,
            m.Retracted: lambda command: self.recorder.on_retracted(command.request_id, self.timeline.now_ns),
            m.AskOutput: self._put_out,
            TransferUnit: self._queue_unit,
        }
        """Handlers by type. Clients and transfers add theirs."""
        self._message_ns, self._handover_ns = cluster.message_latency_ns, cluster.handover_ns
        self._grant_ns = 0 if cluster.grant_wait_ns is None else self._message_ns + cluster.grant_wait_ns

    def recorded(self, machine: Any) -> Any:
        """The state machine, wrapped to write its calls into the journal if the run has a journal."""
        return machine if self.journal is None else Recorded(machine, self.journal)

    def instance(self, instance_id: str) -> Any:
        """The instance of this name that lives now. If the instance is dead: the one that died last."""
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
        """Gives the router a message, and carries out its answer. Called by the clients, who see the ends of
        requests.
        """
        raise NotImplementedError

    def tell_agent(self, to: str, message: m.Message) -> None:
        """Gives a living sender or receiver a message, and carries out the commands that it returns."""
        if (agent := self.agents.get(to)) is not None:
            self.carry_out(agent.on_message(message, self.timeline.now_ns))

    def _queue_unit(self, unit: TransferUnit) -> None:
        self.tell_agent(self.sender_ids[unit.source], unit)

    def on_layers(self, prefill_id: str, computed: m.LayersComputed) -> None:
        self.tell_agent(self.sender_ids[prefill_id], computed)

    def record_levels(self, instance: Instance) -> None:
        self.recorder.on_levels(instance.instance_id, instance.levels(), self.timeline.now_ns)
