"""Runs a scenario in simulated time. The simulation carries out the commands of instances and takes no decisions."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.instance import Instance, Levels
from pdsim.core.invariants import check_all_idle
from pdsim.core.journal import KILLED, Entry, Recorded
from pdsim.core.messages import receiver_of, sender_of
from pdsim.core.transfer.transfer_plan import TransferUnit
from pdsim.core.vllm.vllm_instances import VllmDecodeInstance
from pdsim.garbage import garbage_collection_paused
from pdsim.metrics.own_gaps import OwnGaps
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import RequestRecord
from pdsim.scenario.building.cluster import Cluster, build
from pdsim.scenario.building.machines import restarted
from pdsim.scenario.building.sizing import server_of
from pdsim.scenario.schema import Scenario
from pdsim.sim.clients import Clients
from pdsim.sim.faults import FaultInjector
from pdsim.sim.instances.actor import Actor
from pdsim.sim.instances.executor import Executor, RecomputingExecutor, SpeculativeExecutor
from pdsim.sim.instances.lockstep import Lockstep, Rank
from pdsim.sim.links.cache_copies import CacheCopies, Storage, StorageClient
from pdsim.sim.links.flows import Flows
from pdsim.sim.links.host_exchange import HostExchange, ServerNics
from pdsim.sim.links.network import Transfers
from pdsim.sim.result import RunResult
from pdsim.sim.scaling import Scaling
from pdsim.sim.scraping import Scraping
from pdsim.sim.timeline import CHOICES, Timeline
from pdsim.workload.request_spec import Streams


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Observers of a run. They do not change the run."""

    journal: Callable[[Entry], None] | None = None
    """Called with every call into an instance."""
    levels: bool = False
    """True: record how full each instance is whenever its loop chooses a step."""
    progress: Callable[[int], None] | None = None
    """Called from time to time with the number of ended requests."""
    ended: Callable[[RequestRecord], None] | None = None
    """Called with each ended request. An exception ends the run."""
    own_itl: bool = False
    """True: compute the percentiles of each request's own gaps between tokens."""


UNOBSERVED = Observation()


def simulate(scenario: Scenario, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> RunResult:
    """Simulates a scenario to its end. single_steps: simulate each decode step alone, which is slower and gives the
    same result.
    """
    return Simulation(build(scenario), observation, single_steps=single_steps).run()


class Simulation:
    """A cluster on a timeline: delivers messages, carries out commands, kills and restarts instances."""

    def __init__(self, cluster: Cluster, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> None:
        self.cluster = cluster
        self.timeline = Timeline()
        self.recorder = Recorder(OwnGaps() if observation.own_itl else None)
        self.outputs = {spec.request_id: spec.output for spec in cluster.requests}
        """Outputs of all attempts. Clients add the outputs of retries."""
        self._message_ns, self._handover_ns = cluster.message_latency_ns, cluster.handover_ns
        self._record = observation.journal
        self.on_levels = self._on_choice if observation.levels else None
        """Called with each instance that chooses a step. None: levels are not recorded."""
        self.single_steps = single_steps
        self.order = {instance.instance_id: index for index, instance in enumerate(cluster.instances)}
        self._lives = dict.fromkeys(self.order, 0)
        self._dead: dict[str, Any] = {}
        """Fresh state machines of dead instances, by name, which start when the instance restarts."""
        self._agents: dict[str, Any] = {agent.instance_id: self.recorded(agent) for agent in cluster.agents}
        """Living senders and receivers."""
        self.sender_ids = {instance_id: sender_of(instance_id) for instance_id in self.order}
        self.clients = Clients(self, observation.progress, observation.ended)
        self._commands: dict[type, Callable[[Any], None]] = {
            m.Send: self.send,
            m.Tell: self.deliver,
            m.WakeAt: self.wake_at,
            m.Retracted: lambda command: self.recorder.on_retracted(command.request_id, self.timeline.now_ns),
            m.AskOutput: self._put_out,
            **self.clients.commands,
        }
        self.transfers: Transfers | None = None
        if cluster.interconnect is not None:
            self.transfers = transfers = Transfers(self, cluster.interconnect)
            self._commands |= {
                TransferUnit: self._queue_unit,
                m.StartTransfer: transfers.network.start,
                m.Scatter: transfers.scatter,
                m.ReturnKv: transfers.give_back,
            }
        self._storage = self._make_storage()
        self._locksteps = self._make_locksteps()
        self.actors = {instance.instance_id: self._actor(instance) for instance in cluster.instances}
        self._scaling = None if cluster.autoscaler is None else Scaling(self, cluster.autoscaler)
        health = cluster.scenario.health
        self._faults = None if health is None else FaultInjector(self, health)

    def recorded(self, machine: Any) -> Any:
        """The state machine, wrapped to write its calls into the journal if the run has a journal."""
        return machine if self._record is None else Recorded(machine, self._record)

    def _actor(self, instance: Any) -> Actor:
        """Actor of a new or restarted instance. Host memory and warmed-up shapes of an earlier life are lost."""
        lockstep = self._locksteps.get(server_of(instance.instance_id))
        return Actor(self, instance) if lockstep is None else Rank(self, instance, lockstep)

    def _make_locksteps(self) -> dict[str, Lockstep]:
        """Locksteps of servers with data-parallel attention or over several hosts, by server."""
        num_ranks = Counter(server_of(instance_id) for instance_id in self.order)
        last = EventPriority(CHOICES + len(self.order))
        found = {server: Lockstep(self.timeline, num, last) for server, num in num_ranks.items() if num > 1}
        nics = self.cluster.host_nics
        if not nics.traffic:
            return found
        if self.transfers is None:
            flows = Flows(self.timeline, nics.capacity, HostExchange.arrived)
        else:
            flows = self.transfers.network.flows
        between = ServerNics(self.timeline, flows, nics)
        for server in dict.fromkeys(map(server_of, nics.traffic)):
            found[server] = Lockstep(self.timeline, num_ranks[server], last, between)
        return found

    def cache_copies_of(self, instance: Any) -> CacheCopies | None:
        instance_id, storage = instance.instance_id, self._storage
        if instance_id not in self.cluster.host_links:
            return None
        client = None if storage is None else StorageClient(storage, instance_id, server_of(instance_id))
        return CacheCopies(self, instance, client)

    def _make_storage(self) -> Storage | None:
        settings, costs = self.cluster.scenario.storage, self.cluster.storage
        if settings is None or costs is None:
            return None
        return Storage(
            self.timeline,
            costs,
            shared=settings.shared,
            page_size=self.cluster.scenario.page_size,
            record=self.recorder.on_host_copy,
            tell=self.deliver,
        )

    def executor_of(self, instance: Any) -> Executor:
        acceptance, streams = self.cluster.scenario.acceptance, Streams(self.cluster.scenario.seed)
        if isinstance(instance, VllmDecodeInstance):
            return RecomputingExecutor(self.outputs, self.clients.local)
        if acceptance is None:
            return Executor(self.outputs)
        return SpeculativeExecutor(self.outputs, lambda i: acceptance.stream(streams.named(f"accepted/{i}")))

    def run(self) -> RunResult:
        for actor in self.actors.values():
            actor.start()
        self.clients.start()
        if self._faults is not None:
            self._faults.start()
        if self._scaling is not None:
            self._scaling.start()
        interval_ns = self.cluster.router.metrics_interval_ns
        Scraping(self.timeline, interval_ns, self._living_levels, self._tell_metrics).start()
        with garbage_collection_paused():
            self.timeline.run_all()
        return self.result()

    def result(self) -> RunResult:
        """The result so far, also of an interrupted run."""
        ran_dry = self.timeline.has_ended
        stall: list[str] = []
        if ran_dry and self.clients.num_ended < len(self.cluster.requests):
            stall = [line for actor in self.actors.values() for line in actor.instance.waiting_for()]
        elif ran_dry:
            check_all_idle(self.machines())
        num_primes = sum(spec.primes for spec in self.cluster.requests)
        return RunResult(self.cluster.scenario, self.recorder.records, self.timeline.num_events, stall, num_primes)

    def instance(self, instance_id: str) -> Any:
        """The present instance of this name. For a dead instance: its last life."""
        instance = self.actors[instance_id].instance
        return getattr(instance, "inner", instance)

    def machines(self) -> list[Any]:
        """The state machines of all living instances, senders and receivers, and the router."""
        living = [self.instance(name) for name in self.actors if name not in self._dead]
        agents = [getattr(agent, "inner", agent) for agent in self._agents.values()]
        return [*living, *agents, self.cluster.router]

    def _living_levels(self) -> dict[str, Levels] | None:
        """None: all requests have ended."""
        if self.clients.num_ended == len(self.cluster.requests):
            return None
        return {name: self.instance(name).levels() for name in self.order if name not in self._dead}

    def _tell_metrics(self, seen: m.MetricsSeen) -> None:
        self.send(m.Send(self.cluster.router.instance_id, seen))

    # Messages and commands.

    def carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def send(self, command: m.Send) -> None:
        message = command.message
        if isinstance(message, m.KvGranted):
            self.recorder.on_admitted(message.request_id, message.num_cached_tokens, self.timeline.now_ns)
        handover_ns = self._handover_ns if isinstance(message, m.KvArrived) else 0
        self.timeline.after(self._message_ns + handover_ns, self.deliver, command)

    def send_together(self, commands: list[m.Send]) -> None:
        self.timeline.after(self._message_ns, self._deliver_together, commands)

    def _deliver_together(self, commands: list[m.Send]) -> None:
        for command in commands:
            self.actors[command.to].post(command.message)

    def deliver(self, command: m.Send | m.Tell) -> None:
        to, message = command.to, command.message
        if (actor := self.actors.get(to)) is not None:
            actor.post(message)
        elif to == self.cluster.router.instance_id:
            self.clients.tell_router(message)
        else:
            self.tell_agent(to, message)

    def wake_at(self, command: m.WakeAt) -> None:
        delay_ns = max(0, command.time_ns - self.timeline.now_ns)
        self.timeline.after(delay_ns, self.deliver, m.Tell(command.who, m.Woken()))

    def _put_out(self, asked: m.AskOutput) -> None:
        output = self.outputs[asked.request_id].first(asked.num_tokens)
        self.deliver(m.Tell(asked.instance_id, m.PutOut(asked.request_id, output)))

    def tell_agent(self, to: str, message: m.Message) -> None:
        """Gives a living sender or receiver a message, and carries out the commands that it returns."""
        if (agent := self._agents.get(to)) is not None:
            self.carry_out(agent.on_message(message, self.timeline.now_ns))

    def _queue_unit(self, unit: TransferUnit) -> None:
        self.tell_agent(self.sender_ids[unit.source], unit)

    def on_layers(self, prefill_id: str, computed: m.LayersComputed) -> None:
        self.tell_agent(self.sender_ids[prefill_id], computed)

    def _on_choice(self, instance: Instance) -> None:
        self.recorder.on_levels(instance.instance_id, instance.levels(), self.timeline.now_ns)

    # What goes wrong. Nothing of this happens unless the scenario says so.

    def kill(self, instance_id: str) -> None:
        """Kills an instance with its sender or receiver and its transfers. Later messages to it are lost."""
        self.actors[instance_id].kill()
        if self.transfers is not None:
            self.transfers.kill(instance_id)
        agents = [name for name in (sender_of(instance_id), receiver_of(instance_id)) if name in self._agents]
        for name in (instance_id, *agents):
            self._agents.pop(name, None)
            self._dead[name] = restarted(self.cluster.scenario, name)
            if self._record is not None:
                self._record(Entry(name, KILLED, (self.timeline.now_ns,), None))
        if self.on_levels is not None:
            self.on_levels(self._dead[instance_id])

    def restart(self, instance_id: str) -> None:
        """Restarts an instance with empty memory."""
        self._lives[instance_id] += 1
        if self.transfers is not None:
            self.transfers.network.revive(instance_id)
        for name in (sender_of(instance_id), receiver_of(instance_id)):
            if name in self._dead:
                self._agents[name] = self.recorded(self._dead.pop(name))
        self.actors[instance_id] = self._actor(self._dead.pop(instance_id))
        self.actors[instance_id].start()

    def life(self, instance_id: str) -> int | None:
        """Number of restarts of an instance; None if the instance is dead."""
        return None if instance_id in self._dead else self._lives[instance_id]
