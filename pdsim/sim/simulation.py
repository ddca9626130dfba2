"""Runs a scenario in simulated time: carries out what instances command, and decides nothing."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdsim.core import messages as m
from pdsim.core.instance import Instance
from pdsim.core.invariants import check_idle
from pdsim.core.journal import Entry, Recorded
from pdsim.core.names import receiver_of, sender_of
from pdsim.core.transfer_plan import TransferUnit
from pdsim.cost.host import HostCosts
from pdsim.metrics.records import RunRecords
from pdsim.metrics.summary import summarize
from pdsim.scenario.build import Cluster, build
from pdsim.scenario.schema import Scenario
from pdsim.sim.actor import Actor
from pdsim.sim.client import ClientDriver
from pdsim.sim.front_end import FrontEnd
from pdsim.sim.network import Network, Transfer
from pdsim.sim.recorder import Recorder, transfer_record
from pdsim.sim.timeline import Timeline
from pdsim.workload.request_spec import RequestSpec, Streams


@dataclass
class RunResult:
    """What a run leaves behind."""

    scenario: Scenario
    """Resolved: every default filled in."""
    records: RunRecords
    num_events: int
    stall: list[str] = field(default_factory=list)
    """Who waits for what, if the run came to a halt before its last request ended."""

    def summary(self) -> dict[str, Any]:
        extra = {"events": self.num_events, "stalled": bool(self.stall)}
        return {**self.scenario.benchmark_fields(), **summarize(self.records, extra=extra)}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What to look at while running. None of it changes what happens."""

    journal: Callable[[Entry], None] | None = None
    """Called with every call into an instance."""
    levels: bool = False
    """Record how full each instance is, each time it chooses what to do."""
    progress: Callable[[int], None] | None = None
    """Called with the number of requests that have ended, now and then."""


UNOBSERVED = Observation()


def simulate(scenario: Scenario, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> RunResult:
    """Run to the end. single_steps runs decode steps one at a time: slower, and by law the same."""
    return Simulation(build(scenario), observation, single_steps=single_steps).run()


class Simulation:
    def __init__(self, cluster: Cluster, observation: Observation = UNOBSERVED, *, single_steps: bool = False) -> None:
        self._cluster = cluster
        self._progress = observation.progress
        self._timeline = Timeline()
        self._recorder = Recorder()
        self._message_ns = cluster.message_latency_ns
        self._num_ended = 0
        self._scatter_free_ns: dict[str, int] = {}
        interconnect = self._interconnect = cluster.interconnect
        outputs = {spec.request_id: spec.output for spec in cluster.requests}
        instances: list[Any] = list(cluster.instances)
        agents: list[Any] = list(cluster.agents)
        self._router: Any = cluster.router
        if observation.journal is not None:
            instances = [Recorded(instance, observation.journal) for instance in instances]
            agents = [Recorded(agent, observation.journal) for agent in agents]
            self._router = Recorded(cluster.router, observation.journal)
        self._agents = {agent.instance_id: agent for agent in agents}
        self._sender_of = {instance.instance_id: sender_of(instance.instance_id) for instance in instances}
        self._actors = {
            instance.instance_id: Actor(
                self._timeline,
                index,
                instance,
                cost=cluster.costs[instance.instance_id],
                host=cluster.hosts.get(instance.instance_id, HostCosts()),
                outputs=outputs,
                carry_out=self._carry_out,
                on_step=self._recorder.on_step,
                layer_groups=0 if interconnect is None else interconnect.layer_groups,
                on_layers=self._on_layers,
                on_choice=self._on_choice if observation.levels else None,
                single_steps=single_steps,
            )
            for index, instance in enumerate(instances)
        }
        self._network = None
        if interconnect is not None:
            self._network = Network(
                self._timeline,
                topology=interconnect.topology,
                transport=interconnect.transport,
                wire=interconnect.wire,
                staging=interconnect.staging,
                on_done=self._on_transfer_done,
            )
        self._front_end = None
        if not cluster.front_end.are_none:
            self._front_end = FrontEnd(
                self._timeline, cluster.front_end, route=self._route, on_first_token=self._first_token
            )
        self._client = ClientDriver(
            self._timeline,
            cluster.client,
            cluster.requests,
            streams=Streams(cluster.scenario.seed),
            send=self._send_request,
        )
        self._commands: dict[type, Callable[[Any], None]] = {
            m.Send: self._send,
            m.Tell: self._deliver,
            TransferUnit: self._plan,
            m.StartTransfer: self._start_transfer,
            m.Scatter: self._scatter,
            m.FirstToken: self._streamed,
            m.Retracted: self._retracted,
            m.PrefillDone: self._prefill_done,
            m.Finished: self._ended,
            m.Failed: self._ended,
        }

    def run(self) -> RunResult:
        """Collecting garbage in between finds none: everything that is made is kept or freed at once."""
        for actor in self._actors.values():
            actor.start()
        self._client.start()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self._timeline.run_all()
        finally:
            if was_enabled:
                gc.enable()
        return self.result()

    def result(self) -> RunResult:
        """Also of a run that was interrupted."""
        num_unfinished = len(self._cluster.requests) - self._num_ended
        ran_dry = self._timeline.has_ended
        stall: list[str] = []
        if num_unfinished and ran_dry:
            stall = [line for actor in self._actors.values() for line in actor.instance.waiting_for()]
        elif ran_dry:
            for instance in self._cluster.instances:
                check_idle(instance)
        return RunResult(self._cluster.scenario, self._recorder.records, self._timeline.num_events, stall)

    # Clients and messages.

    def _send_request(self, spec: RequestSpec) -> None:
        self._recorder.on_arrival(spec, self._timeline.now_ns)
        if self._front_end is None:
            self._route(spec)
        else:
            self._front_end.send(spec)

    def _route(self, spec: RequestSpec) -> None:
        now_ns = self._timeline.now_ns
        commands = self._router.on_message(m.Arrival(spec.request_id, spec.prompt, spec.max_output_tokens), now_ns)
        new: m.NewRequest = commands[0].message
        self._recorder.on_routed(spec.request_id, new.prefill_id, new.decode_id, now_ns)
        self._timeline.after(self._message_ns, self._deliver_all, commands)

    def _carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def _send(self, command: m.Send) -> None:
        message = command.message
        if isinstance(message, m.KvGranted):
            self._recorder.on_admitted(message.request_id, message.num_cached_tokens, self._timeline.now_ns)
        self._timeline.after(self._message_ns, self._deliver, command)

    def _deliver(self, command: m.Send | m.Tell) -> None:
        to, message = command
        if (actor := self._actors.get(to)) is not None:
            actor.post(message)
        else:
            self._tell_agent(to, message)

    def _tell_agent(self, to: str, message: m.Message) -> None:
        """It answers at once, whatever its instance is doing."""
        self._carry_out(self._agents[to].on_message(message, self._timeline.now_ns))

    def _deliver_all(self, commands: list[m.Send]) -> None:
        """What the router sends for one request leaves it at one time."""
        for to, message in commands:
            self._actors[to].post(message)

    # Transfers.

    def _plan(self, unit: TransferUnit) -> None:
        self._tell_agent(self._sender_of[unit.source], unit)

    def _start_transfer(self, command: m.StartTransfer) -> None:
        assert self._network is not None
        self._network.start(command.unit)

    def _on_transfer_done(self, transfer: Transfer) -> None:
        assert self._interconnect is not None
        unit = transfer.unit
        self._recorder.on_transfer(transfer_record(transfer, self._interconnect.wire, self._timeline.now_ns))
        self._tell_agent(self._sender_of[unit.source], m.UnitSent(unit))

    def _on_layers(self, prefill_id: str, computed: m.LayersComputed) -> None:
        self._tell_agent(self._sender_of[prefill_id], computed)

    def _scatter(self, command: m.Scatter) -> None:
        """On a stream of its own, behind the scatters before it."""
        assert self._interconnect is not None
        assert self._interconnect.staging is not None
        now_ns = self._timeline.now_ns
        start_ns = max(now_ns, self._scatter_free_ns.get(command.decode_id, 0))
        end_ns = start_ns + self._interconnect.staging.scatter_ns(command.num_bytes)
        self._scatter_free_ns[command.decode_id] = end_ns
        done = m.Tell(receiver_of(command.decode_id), m.CellScattered(command.request_id, command.cell))
        self._timeline.after(end_ns - now_ns, self._deliver, done)

    # What becomes of requests.

    def _prefill_done(self, command: m.PrefillDone) -> None:
        self._tell_router(command)
        if self._front_end is not None:
            self._front_end.on_prefill_answer(command.request_id)

    def _streamed(self, command: m.FirstToken) -> None:
        self._recorder.on_streamed(command.request_id, self._timeline.now_ns)
        if self._front_end is None:
            self._first_token(command.request_id)
        else:
            self._front_end.on_streamed(command.request_id)

    def _first_token(self, request_id: int) -> None:
        self._recorder.on_first_token(request_id, self._timeline.now_ns)

    def _retracted(self, command: m.Retracted) -> None:
        self._recorder.on_retracted(command.request_id, self._timeline.now_ns)

    def _ended(self, outcome: m.Finished | m.Failed) -> None:
        self._tell_router(outcome)
        if self._front_end is None:
            self._end(outcome)
        else:
            self._front_end.on_end(outcome.request_id, partial(self._end, outcome))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        """As the client sees it."""
        self._num_ended += 1
        self._recorder.on_end(outcome, self._timeline.now_ns)
        self._client.on_end(outcome.request_id)
        if self._progress is not None and (self._num_ended % 32 == 0 or self._num_ended == len(self._cluster.requests)):
            self._progress(self._num_ended)

    def _tell_router(self, outcome: m.Outcome) -> None:
        self._router.on_message(outcome, self._timeline.now_ns)

    def _on_choice(self, instance: Instance) -> None:
        self._recorder.on_choice(instance, self._timeline.now_ns)
