"""Runs a scenario in simulated time: carries out what instances command, and decides nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdsim.core import messages as m
from pdsim.core.decode_instance import DecodeInstance
from pdsim.core.instance import Instance
from pdsim.core.invariants import check_all_idle
from pdsim.core.journal import KILLED, Entry, Recorded
from pdsim.core.names import receiver_of, sender_of
from pdsim.core.router import num_retries, request_of
from pdsim.core.transfer_plan import TransferUnit
from pdsim.cost.host_memory import HostMemory
from pdsim.garbage import garbage_kept
from pdsim.metrics.recorder import Recorder
from pdsim.metrics.records import RunRecords
from pdsim.metrics.run_tables import RunTables
from pdsim.metrics.summary import summarize
from pdsim.scenario.build import Cluster, build, restarted
from pdsim.scenario.outside import cost_warnings, device_of
from pdsim.scenario.schema import HostSettings, Scenario
from pdsim.sim.actor import Actor
from pdsim.sim.executor import Executor
from pdsim.sim.faults import FaultInjector, Heartbeats
from pdsim.sim.front_end import FrontEnd
from pdsim.sim.ranks import Ranks
from pdsim.sim.speculative_executor import SpeculativeExecutor
from pdsim.sim.timeline import Timeline
from pdsim.sim.transfers import Transfers
from pdsim.workload.client_driver import ClientDriver
from pdsim.workload.request_spec import RequestSpec, Streams


@dataclass
class RunResult(RunTables):
    """What a run leaves behind: records, the same as DataFrames, and its summary."""

    scenario: Scenario
    """Resolved: every default filled in."""
    records: RunRecords
    num_events: int
    stall: list[str] = field(default_factory=list)
    """Who waits for what, if the run came to a halt before its last request ended."""

    def summary(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"events": self.num_events, "stalled": bool(self.stall)}
        extra["device"] = device_of(self.scenario)
        if warnings := self.warnings():
            extra["warnings"] = warnings
        speculative = self.scenario.speculative is not None
        return {
            **self.scenario.benchmark_fields("pdsim"),
            **summarize(self.records, speculative=speculative, extra=extra),
        }

    def warnings(self) -> list[str]:
        """What of the run lies outside what its step times were measured on, in one line; none if nothing does."""
        return cost_warnings(self.scenario, self.records.steps)


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
        self._handover_ns = cluster.handover_ns
        self._num_ended = 0
        self._outputs = {spec.request_id: spec.output for spec in cluster.requests}
        self._record = observation.journal
        self._on_levels = self._on_choice if observation.levels else None
        self._single_steps = single_steps
        self._router: Any = self._recorded(cluster.router)
        self._agents: dict[str, Any] = {agent.instance_id: self._recorded(agent) for agent in cluster.agents}
        self._order = {instance.instance_id: index for index, instance in enumerate(cluster.instances)}
        self._transfers: Transfers | None = None
        if cluster.interconnect is not None:
            self._transfers = Transfers(
                self._timeline, cluster, cluster.interconnect, recorder=self._recorder, tell=self._tell_agent
            )
        ranks = cluster.scenario.network.ranks
        self._ranks: Ranks | None = None
        if ranks is not None and cluster.interconnect is not None:
            self._ranks = Ranks(
                self._timeline,
                cluster.num_ranks,
                agreement_ns=ranks.agreement,
                skew_ns=ranks.skew,
                streams=Streams(cluster.scenario.seed),
            )
        self._actors = {instance.instance_id: self._actor(instance) for instance in cluster.instances}
        health = cluster.scenario.health
        self._faults: FaultInjector | None = None
        if health is not None:
            self._monitor: Any = self._recorded(cluster.monitor)
            heartbeats = Heartbeats(self._timeline, health, life=self._life, report=self._report)
            streams = Streams(cluster.scenario.seed)
            self._faults = FaultInjector(
                self._timeline, cluster.scenario.faults, cluster=self, heartbeats=heartbeats, streams=streams
            )
        self._lives = dict.fromkeys(self._order, 0)
        self._dead: dict[str, Any] = {}
        """By name: the state machines that take their place after a restart."""
        self._live: set[int] = set()
        """Requests that clients wait for."""
        self._front_end = None
        if not cluster.front_end.is_none:
            self._front_end = FrontEnd(
                self._timeline,
                cluster.front_end,
                on_arrival=self._arrive,
                route=self._route,
                on_first_token=self._first_token,
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
            m.WakeAt: self._wake_at,
            m.FirstToken: self._streamed,
            m.Retracted: self._retracted,
            m.PrefillDone: self._prefill_done,
            m.Finished: self._finished,
            m.Failed: self._tell_router,
        }
        if self._transfers is not None:
            of = self._transfers
            self._commands |= {TransferUnit: of.plan, m.StartTransfer: of.start, m.Scatter: of.scatter}

    def _recorded(self, machine: Any) -> Any:
        return machine if self._record is None else Recorded(machine, self._record)

    def _actor(self, instance: Any) -> Actor:
        instance_id, interconnect = instance.instance_id, self._cluster.interconnect
        scenario, num_ranks = self._cluster.scenario, self._cluster.num_ranks[instance_id]
        ranks = scenario.network.ranks
        agrees = ranks is not None and interconnect is not None and num_ranks > 1
        return Actor(
            self._timeline,
            self._order[instance_id],
            self._recorded(instance),
            cost=self._cluster.costs[instance_id],
            host=self._cluster.hosts.get(instance_id, HostSettings()),
            host_memory=self._host_memory(instance),
            executor=self._executor(),
            carry_out=self._carry_out,
            on_step=self._recorder.on_step,
            agreement_ns=ranks.agreement if ranks is not None and agrees else 0,
            layer_groups=0 if interconnect is None else interconnect.layer_groups,
            on_layers=None if self._transfers is None else self._transfers.on_layers,
            on_choice=self._on_levels,
            single_steps=self._single_steps,
        )

    def _host_memory(self, instance: Instance) -> HostMemory | None:
        """Fresh in each life of a decode instance, for it is its process's."""
        copies = self._cluster.host_copies
        return HostMemory(copies) if copies is not None and isinstance(instance, DecodeInstance) else None

    def _executor(self) -> Executor:
        scenario = self._cluster.scenario
        if scenario.speculative is None:
            return Executor(self._outputs)
        acceptance, streams = scenario.speculative.acceptance(), Streams(scenario.seed)
        return SpeculativeExecutor(
            self._outputs, lambda request_id: acceptance.stream(streams.named(f"accepted/{request_id}"))
        )

    def run(self) -> RunResult:
        for actor in self._actors.values():
            actor.start()
        self._client.start()
        if self._faults is not None:
            self._faults.start()
        with garbage_kept():
            self._timeline.run_all()
        return self.result()

    def result(self) -> RunResult:
        """Also of a run that was interrupted."""
        num_unfinished = len(self._cluster.requests) - self._num_ended
        ran_dry = self._timeline.has_ended
        stall: list[str] = []
        if num_unfinished and ran_dry:
            stall = [line for actor in self._actors.values() for line in actor.instance.waiting_for()]
        elif ran_dry:
            check_all_idle(self.machines())
        return RunResult(self._cluster.scenario, self._recorder.records, self._timeline.num_events, stall)

    def instance(self, instance_id: str) -> Any:
        """As it is now; the last one of those that have died."""
        instance = self._actors[instance_id].instance
        return getattr(instance, "inner", instance)

    def machines(self) -> list[Any]:
        """All that live."""
        living = [self.instance(name) for name in self._actors if name not in self._dead]
        agents = [agent for name, agent in self._agents.items() if name not in self._dead]
        return [*living, *(getattr(agent, "inner", agent) for agent in (*agents, self._router))]

    # Clients and messages.

    def _send_request(self, spec: RequestSpec) -> None:
        if self._front_end is None:
            self._arrive(spec)
            self._route(spec)
        else:
            self._front_end.send(spec)

    def _arrive(self, spec: RequestSpec) -> None:
        self._recorder.on_arrival(spec.request_id, len(spec.prompt), len(spec.output), self._timeline.now_ns)
        self._live.add(spec.request_id)
        if self._faults is not None:
            self._faults.on_sent(spec.request_id)

    def _route(self, spec: RequestSpec) -> None:
        if spec.request_id in self._live:
            self._tell_router(m.Arrival(spec.request_id, spec.prompt, spec.max_output_tokens))

    def _carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            self._commands[type(command)](command)

    def _send(self, command: m.Send) -> None:
        message = command.message
        if isinstance(message, m.KvGranted):
            self._recorder.on_admitted(message.request_id, message.num_cached_tokens, self._timeline.now_ns)
        handover_ns = self._handover_ns if isinstance(message, m.KvArrived) else 0
        self._timeline.after(self._message_ns + handover_ns, self._deliver, command)

    def _deliver(self, command: m.Send | m.Tell) -> None:
        to, message = command
        if (actor := self._actors.get(to)) is not None:
            if self._ranks is None:
                actor.post(message)
            else:
                self._ranks.post(actor, to, message)
        elif to == self._router.instance_id:
            self._tell_router(message)
        else:
            self._tell_agent(to, message)

    def _wake_at(self, command: m.WakeAt) -> None:
        delay_ns = max(0, command.time_ns - self._timeline.now_ns)
        self._timeline.after(delay_ns, self._deliver, m.Tell(command.who, m.Woken()))

    def _tell_agent(self, to: str, message: m.Message) -> None:
        """It answers at once, whatever its instance is doing."""
        self._carry_out(self._agents[to].on_message(message, self._timeline.now_ns))

    def _deliver_all(self, commands: list[m.Send]) -> None:
        """What the router sends at one time comes at one time."""
        for to, message in commands:
            self._actors[to].post(message)

    # What becomes of requests.

    def _tell_router(self, message: m.Message) -> None:
        """It answers with attempts and their ends, and with what it decides of requests."""
        commands = self._router.on_message(message, self._timeline.now_ns)
        if not commands:
            return
        sent: list[m.Send] = []
        for command in commands:
            if isinstance(command, m.Send):
                sent.append(command)
                new = command.message
                if isinstance(new, m.NewRequest) and command.to == new.decode_id:
                    self._on_attempt(new)
            elif isinstance(command, m.Failed):
                self._end(command)
            elif isinstance(command, m.PrefillDone):
                self._answer_of_prefill(command.request_id)
            else:
                self._wake_at(command)
        if sent:
            self._timeline.after(self._message_ns, self._deliver_all, sent)

    def _on_attempt(self, new: m.NewRequest) -> None:
        if num_retries(new.request_id):
            request_id = request_of(new.request_id)
            self._outputs[new.request_id] = self._outputs[request_id]
            self._recorder.on_retry(new.request_id)
            if self._front_end is not None:
                self._front_end.on_retry(request_id)
        self._recorder.on_routed(new.request_id, new.prefill_id, new.decode_id, self._timeline.now_ns)

    def _prefill_done(self, done: m.PrefillDone) -> None:
        request_id = self._cluster.router.client_of(done.request_id)
        self._tell_router(done)
        if request_id is not None:
            self._answer_of_prefill(request_id)

    def _answer_of_prefill(self, request_id: int) -> None:
        if self._front_end is not None:
            self._front_end.on_prefill_answer(request_id)

    def _streamed(self, token: m.FirstToken) -> None:
        router = self._cluster.router
        self._recorder.on_streamed(token.request_id, self._timeline.now_ns)
        if router.retries:
            self._tell_router(token)
        request_id = router.client_of(token.request_id)
        if request_id is None:
            return
        if self._front_end is None:
            self._recorder.on_first_token(request_id, self._timeline.now_ns)
        else:
            self._front_end.on_streamed(request_id)

    def _first_token(self, request_id: int) -> None:
        self._recorder.on_first_token(request_id, self._timeline.now_ns)

    def _retracted(self, command: m.Retracted) -> None:
        self._recorder.on_retracted(command.request_id, self._timeline.now_ns)

    def _finished(self, finished: m.Finished) -> None:
        request_id = self._cluster.router.client_of(finished.request_id)
        self._tell_router(finished)
        if request_id is not None:
            self._end(m.Finished(request_id))

    def _end(self, outcome: m.Finished | m.Failed) -> None:
        """Nobody works on it any more; through the front end its client hears of it."""
        self._live.discard(outcome.request_id)
        if self._front_end is None:
            self._on_client_end(outcome)
        else:
            failed = isinstance(outcome, m.Failed)
            self._front_end.on_end(outcome.request_id, partial(self._on_client_end, outcome), failed=failed)

    def _on_client_end(self, outcome: m.Finished | m.Failed) -> None:
        self._num_ended += 1
        self._recorder.on_end(outcome, self._timeline.now_ns)
        self._client.on_end(outcome.request_id)
        if self._progress is not None and (self._num_ended % 32 == 0 or self._num_ended == len(self._cluster.requests)):
            self._progress(self._num_ended)

    def _on_choice(self, instance: Instance) -> None:
        self._recorder.on_levels(instance.instance_id, instance.levels(), self._timeline.now_ns)

    # What goes wrong. Nothing of this happens unless the scenario says so.

    def is_dead(self, instance_id: str) -> bool:
        return instance_id in self._dead

    def kill(self, instance_id: str) -> None:
        """With its sender or receiver, and all that is under way from it. What is sent to it is lost."""
        self._actors[instance_id].kill()
        if self._transfers is not None:
            self._transfers.kill(instance_id)
        agents = [name for name in (sender_of(instance_id), receiver_of(instance_id)) if name in self._agents]
        for name in (instance_id, *agents):
            self._dead[name] = restarted(self._cluster.scenario, name)
            if self._record is not None:
                self._record(Entry(name, KILLED, (self._timeline.now_ns,), None))
        self._agents |= dict.fromkeys(agents, _Nobody())
        if self._on_levels is not None:
            self._on_levels(self._dead[instance_id])

    def restart(self, instance_id: str) -> None:
        """With nothing in its memory."""
        self._lives[instance_id] += 1
        if self._transfers is not None:
            self._transfers.revive(instance_id)
        for name in (sender_of(instance_id), receiver_of(instance_id)):
            if name in self._dead:
                self._agents[name] = self._recorded(self._dead.pop(name))
        self._actors[instance_id] = self._actor(self._dead.pop(instance_id))
        self._actors[instance_id].start()

    def slow_link(self, instance_id: str, factor: float) -> None:
        assert self._transfers is not None, "an aggregated cluster has no links"
        self._transfers.slow(instance_id, factor)

    def unslow_link(self, instance_id: str, factor: float) -> None:
        assert self._transfers is not None, "an aggregated cluster has no links"
        self._transfers.unslow(instance_id, factor)

    def abort(self, request_id: int) -> None:
        """A client that waits for this request gives it up; the front end may still hold it."""
        if request_id not in self._live:
            return
        reason = "aborted by the client"
        self._tell_router(m.Cancel(request_id, reason))
        if request_id in self._live:
            self._end(m.Failed(request_id, reason))

    def _life(self, instance_id: str) -> int | None:
        return None if instance_id in self._dead else self._lives[instance_id]

    def _report(self, heartbeat: m.Heartbeat) -> None:
        for command in self._monitor.on_message(heartbeat, self._timeline.now_ns):
            self._send(command)


class _Nobody:
    """In place of a sender or receiver that died."""

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        return []
