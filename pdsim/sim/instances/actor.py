"""Drives one instance in simulated time: runs the steps that its loop asks for, and returns their results."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from math import ceil
from operator import attrgetter
from typing import Any

from simpy.events import EventPriority

from pdsim.core import messages as m
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.instance import Instance, instance_loop
from pdsim.core.invariants import AnyInstance
from pdsim.core.messages import TransferUnit
from pdsim.core.vllm.vllm_prefill_instance import VllmPrefillInstance
from pdsim.cost.copies import HostMemory
from pdsim.dataclass import dataclass
from pdsim.scenario.sections.cost import HostSettings
from pdsim.sim.bus import CHOICES, FIRST, Alarm, Bus, Callback, Driver, Timeline
from pdsim.sim.instances.executor import DecodeRun, Executor, prefill_record
from pdsim.sim.instances.stages import MicroBatchExecutor, StagedSteps
from pdsim.sim.links.cache_copies import CacheCopies


@dataclass(slots=True, eq=False)
class Waiting:
    """A callback that is due at a time of the host's clock. order: priority among events of one instant. alarm: the
    alarm that calls the callback; None: not yet set.
    """

    due_ns: int
    callback: Callback
    payload: Any
    """Argument of the callback."""
    order: EventPriority
    alarm: Alarm | None = None


class Host:
    """The CPU that runs one instance's scheduling loop. The host's clock runs slower than simulated time while other
    threads use the CPU.
    """

    def __init__(self, timeline: Timeline, settings: HostSettings) -> None:
        self.settings = settings
        self.free_ns = 0
        """Time in ns, on the host's clock, at which the loop has finished all its work: launches, sends and results."""
        self._timeline = timeline
        self._pace = 1.0
        self._since_ns = self._lost_ns = 0
        self._waiting: list[Waiting] = []

    @property
    def lost_ns(self) -> int:
        """Total time in ns that other threads have taken from the host."""
        elapsed_ns = self._timeline.now_ns - self._since_ns
        return self._lost_ns + (0 if self._pace == 1 else elapsed_ns - int(elapsed_ns * self._pace))

    @property
    def now_ns(self) -> int:
        return self._timeline.now_ns - self.lost_ns

    @property
    def is_busy(self) -> bool:
        return self.free_ns > self.now_ns

    def work(self, duration_ns: int) -> None:
        self.free_ns = max(self.free_ns, self.now_ns) + duration_ns

    def wait_until(self, time_ns: int) -> None:
        """Keeps the host busy until a time in ns of the timeline."""
        self.free_ns = max(self.free_ns, time_ns - self.lost_ns)

    def when_free(self, callback: Callback, payload: Any = None, order: EventPriority = FIRST) -> None:
        self.at(self.free_ns, callback, payload, order)

    def at(self, due_ns: int, callback: Callback, payload: Any, order: EventPriority) -> None:
        """Schedules a callback at due_ns on the host's clock. payload: argument of the callback. order: priority among
        events of one instant.
        """
        waiting = Waiting(due_ns, callback, payload, order)
        self._waiting.append(waiting)
        self._set_alarm(waiting)

    def go_at(self, pace: float) -> None:
        self._lost_ns, self._since_ns, self._pace = self.lost_ns, self._timeline.now_ns, pace
        for waiting in self._waiting:
            assert waiting.alarm is not None
            waiting.alarm.cancel()
            self._set_alarm(waiting)

    def _set_alarm(self, waiting: Waiting) -> None:
        delay_ns = ceil(max(0, waiting.due_ns - self.now_ns) / self._pace)
        waiting.alarm = self._timeline.after(delay_ns, self._on_time, waiting, waiting.order)

    def _on_time(self, waiting: Waiting) -> None:
        self._waiting.remove(waiting)
        waiting.callback(waiting.payload)


@dataclass(frozen=True, slots=True)
class BegunForward:
    """A prefill forward on the GPU. The forward cannot end before the host has launched all its kernels."""

    step: m.PrefillStep
    start_ns: int
    launched_ns: int
    """Time in ns, on the host's clock, at which the host has launched the forward."""
    first_ns: int | None
    """Duration in ns on the first pipeline stage. None: there is only one stage."""
    compiling_ns: int
    """Time in ns for which the host compiled a kernel before the forward. 0: it compiled none."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Components of an actor that depend on the scenario, and observers of the run."""

    executor: Executor
    cache_copies: CacheCopies | None
    """Copies between GPU and host cache. None: the instance has no host cache."""
    on_choice: Callable[[Instance], None] | None
    """Function to call with the instance when it chooses a step or a wait, to record its levels (pages, and requests by
    state). None: levels are not recorded.
    """
    single_steps: bool
    """True: each decode step is simulated alone."""


class Actor(Driver):
    """Runs one instance. At any time the instance waits, runs forwards, or runs decode steps.

    The actor simulates many decode steps at once: as many as the instance allows, but not beyond the end of a sequence.
    When a message arrives, the actor finishes the present step and asks the instance again.
    """

    def __init__(self, bus: Bus, instance: AnyInstance, parts: Parts) -> None:
        instance_id, cluster, timeline = instance.instance_id, bus.cluster, bus.timeline
        copies = cluster.host_copies if isinstance(instance, DecodeInstance) else None
        host = cluster.hosts.get(instance_id, HostSettings())
        super().__init__(bus.recorded(instance))
        self._bus = bus
        self._timeline = timeline
        self._cost = cluster.costs[instance_id]
        self._cost.restart()
        self._forward_ns = self._cost.forward_ns
        self._executor = parts.executor
        self._carry_out = bus.carry_out
        self._on_step = bus.recorder.on_step
        self._on_choice = parts.on_choice
        self._single_steps = parts.single_steps
        self._layer_groups = 0 if cluster.interconnect is None else cluster.interconnect.layer_groups
        self._order = EventPriority(CHOICES + bus.order[instance_id])
        self._host = Host(timeline, host)
        self._host_memory = None if copies is None else HostMemory(copies)
        self._cache_copies = cache_copies = parts.cache_copies
        self._pipeline = cluster.pipelines.get(instance_id)
        """Pipeline stages. The loop gets a forward's result when the forward has left the last stage. None: no
        stages."""
        self._stage_free_ns = [] if self._pipeline is None else [0] * len(self._pipeline.layers)
        self._staged: StagedSteps | None = None
        if self._pipeline is not None and isinstance(parts.executor, MicroBatchExecutor):
            passes = (parts.executor, self._pipeline, self._stage_free_ns, self._on_step, self._on_result)
            self._staged = StagedSteps(timeline, instance_id, self._order, self._cost, *passes)
        self._decode = DecodeRun(
            timeline, instance_id, self._order, self._cost, self._executor, self._on_step, self._on_result
        )
        self._inbox: list[m.Message] = []
        self._is_read_at_once = isinstance(instance, VllmPrefillInstance)
        """True: a KV transfer begins as soon as decode has pages, without the instance's loop. vLLM's decode reads the
        KV, or a thread of prefill writes it (0.33.0, nixl/pull_worker.py:554, nixl/push_worker.py:4)."""
        carry_out = self._carry_out if host.is_none else self._hand_on
        hand_on = carry_out if copies is None else self._copy
        self._loop = instance_loop(
            self.instance,
            drain=self._drain,
            carry_out=hand_on if cache_copies is None else partial(self._copy_pages, copies=cache_copies, then=hand_on),
            clock=timeline,
            pauses=not host.is_none,
        )
        self._is_dead = False
        self._waits = False
        self._is_pausing = False
        """True: the loop waits until the host is free."""
        self._held: list[m.Result] = []
        """Results that arrived while the loop waited for the host. The host can already be free, because alarms on its
        clock are rounded up."""
        self._timer: Alarm | None = None
        self._num_in_flight = 0
        self._max_in_flight = instance.max_steps_in_flight
        self._compiling_ns = 0  # for the next forward, before it begins
        self._gpu_free_ns = 0
        """Time in ns at which the last begun forward ends or, with pipeline stages, leaves the first stage. The next
        forward cannot begin earlier."""

    def start(self) -> None:
        self._advance(None)

    def post(self, message: m.Message) -> None:
        """Delivers a message to the instance. A dead instance ignores it."""
        if self._is_read_at_once and isinstance(message, m.KvGranted):
            self._begin_read(message)
            return
        self._inbox.append(message)
        if self._waits:
            self._waits = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._timeline.is_last_now:
                self._advance(None)
            else:  # more may come in this instant
                self._timeline.after(0, self._advance, order=self._order)
        elif self._decode.num_steps > 1:
            self._decode.cut_short()

    def _begin_read(self, grant: m.KvGranted) -> None:
        if not self._is_dead:
            self._carry_out(self.instance.on_message(grant, self._timeline.now_ns))

    @property
    def num_steps_done(self) -> int:
        return self._decode.num_done

    def kill(self) -> None:
        """Kills the instance. Steps under way produce no result."""
        self._decode.kill()
        if self._staged is not None:
            self._staged.kill()
        if self._cache_copies is not None:
            self._cache_copies.kill()
        if self._timer is not None:
            self._timer.cancel()
        self._is_dead, self._waits = True, False
        self._loop.close()

    def _drain(self) -> list[m.Message]:
        inbox, self._inbox = self._inbox, []
        if self._host_memory is not None:
            for message in inbox:
                if isinstance(message, m.Cancel):
                    self._host_memory.forget(message.request_id)
        return inbox

    def _advance(self, answer: m.Result | None) -> None:
        """Begins each step that the instance's loop chooses, until it waits for a result, a message or the host.
        answer: result of the oldest step under way; None: the loop may choose another step, or its wait has ended.
        """
        self._is_pausing = False
        if self._held:
            for result in self._held:
                self._timeline.after(0, self._see_result, result, self._order)
            self._held = []
        while not self._is_dead:
            asked = self._loop.send(answer)
            if self._on_choice is not None:
                self._on_choice(self.instance)
            if isinstance(asked, m.Wait):
                if not self._num_in_flight:
                    self._begin_wait(asked)
                return
            if isinstance(asked, m.DecodeStep):
                self._begin_decode(asked)
            elif isinstance(asked, m.PrefillStep):
                self._begin_prefill(asked)
            elif isinstance(asked, m.MixedStep):
                self._begin_mixed(asked)
            else:
                self._is_pausing = True
                self._advance_later()
                return
            self._num_in_flight += 1
            if self._num_in_flight == self._max_in_flight:
                return
            if self._host.is_busy:
                self._advance_later()
                return
            answer = None

    def _advance_later(self) -> None:
        """Continues the loop as soon as the host is free."""
        self._host.when_free(self._advance, None, self._order)

    def go_at(self, pace: float) -> None:
        """Sets the speed of the instance's scheduler loop. pace: the speed as a share of the normal speed."""
        self._host.go_at(pace)

    def _on_result(self, result: m.Result) -> None:
        self._num_in_flight -= 1
        if self._host.settings.result:
            self._host.work(self._host.settings.result)
        self._advance(result)

    def _begin_wait(self, wait: m.Wait) -> None:
        if self._cache_copies is not None and self._cache_copies.sleeps:
            self._advance_later()
            return
        if self._inbox:  # what it told another state machine had an answer at once
            self._timeline.after(0, self._advance, order=self._order)
            return
        self._waits = True
        if wait.until_ns is not None:
            delay_ns = max(0, wait.until_ns - self._timeline.now_ns)
            self._timer = self._timeline.after(delay_ns, self._on_time, order=self._order)

    def _on_time(self, _: None) -> None:
        self._waits = False
        self._timer = None
        self._advance(None)

    # Commands that take the instance's time.

    def _hand_on(self, commands: list[m.Command]) -> None:
        """Hands KV to the transfer workers, one request after another. Carries out all other commands at once.

        A worker needs the interpreter's lock (GIL) once for a direct write, and twice for a gather into the staging
        buffer. After a hand-over, the loop releases the lock when it hands over the next request, or when it is done.
        """
        units = [command for command in commands if isinstance(command, TransferUnit)]
        self._carry_out([command for command in commands if not isinstance(command, TransferUnit)])
        handed: list[tuple[int, list[TransferUnit]]] = []
        for _, group in groupby(units, attrgetter("request_id")):
            self._host.work(self._host.settings.send)
            handed.append((self._host.free_ns, list(group)))
        for handed_ns, own in handed:
            num_waits = 2 if any(unit.cell is not None for unit in own) else 1
            start_ns = min(self._host.free_ns, handed_ns + num_waits * self._host.settings.send)
            for unit in own:
                self._host.at(start_ns, self._send_unit, unit, FIRST)

    def _send_unit(self, unit: TransferUnit) -> None:
        if not self._is_dead:
            self._carry_out([unit])

    def _copy(self, commands: list[m.Command]) -> None:
        """Delays the next decode step by copies of retracted requests' KV. Carries out all other commands."""
        assert self._host_memory is not None
        others: list[m.Command] = []
        for command in commands:
            if isinstance(command, m.SaveKv):
                self._decode.copying_ns += self._host_memory.save_ns(command.request_id, len(command.pages))
            elif isinstance(command, m.LoadKv):
                self._decode.copying_ns += self._host_memory.load_ns(command.request_id)
            else:
                others.append(command)
        self._carry_out(others)

    def _copy_pages(
        self, commands: list[m.Command], *, copies: CacheCopies, then: Callable[[list[m.Command]], None]
    ) -> None:
        others = copies.begin(commands)
        self._host.wait_until(copies.blocked_until_ns)
        then(others)

    def _begin_decode(self, step: m.DecodeStep) -> None:
        if self._cache_copies is not None:
            self._decode.copying_ns += max(0, self._cache_copies.blocked_until_ns - self._timeline.now_ns)
        if self._staged is not None:
            self._begin_staged(self._staged, step)
            return
        self._decode.begin(step, single=self._single_steps or bool(self._inbox))

    def _begin_mixed(self, step: m.MixedStep) -> None:
        if self._staged is not None:
            self._begin_staged(self._staged, step)
            return
        start_ns = self._decode_start_ns()
        end_ns = self._forward_end_ns(start_ns, self._cost.mixed_ns(step, start_ns))
        self._decode.begin_one(step.decode, start_ns, end_ns - start_ns, step.prefill)

    def _begin_staged(self, staged: StagedSteps, step: m.DecodeStep | m.MixedStep) -> None:
        copying_ns, self._decode.copying_ns = self._decode_start_ns() - self._timeline.now_ns, 0
        staged.begin(step, copying_ns, self.take_load())

    def take_load(self) -> tuple[int, int] | None:
        """Start and end in ns of loads from the host cache, for which the layers of the next forward wait one by one
        (`CacheCopies.take_load`). None: there are none.
        """
        return None if self._cache_copies is None else self._cache_copies.take_load()

    def _decode_start_ns(self) -> int:
        start_ns = self._timeline.now_ns + self._decode.copying_ns
        return start_ns if self._cache_copies is None else max(start_ns, self._cache_copies.blocked_until_ns)

    # Prefill.

    def _begin_prefill(self, step: m.PrefillStep) -> None:
        start_ns = self._prefill_start_ns(step)
        if self._staged is not None:
            start_ns = max(start_ns, self._stage_free_ns[0])
        duration_ns = self._forward_ns(step, start_ns)
        if self._pipeline is None:
            self._run_prefill(step, start_ns, self._forward_end_ns(start_ns, duration_ns))
        else:
            passes = (start_ns, duration_ns, step.num_tokens, self._stage_free_ns)
            end_ns = self._pipeline.pass_on(*passes, [load] if (load := self.take_load()) else ())
            self._run_prefill(step, start_ns, end_ns, self._stage_free_ns[0] - start_ns)
            self._gpu_free_ns = self._stage_free_ns[0]

    def _prefill_start_ns(self, step: m.PrefillStep) -> int:
        if self._cost.cold is not None:
            self._compiling_ns = self._cost.cold.forward_stall_ns(step)
            self._host.work(self._compiling_ns)
        start_ns = max(self._timeline.now_ns + self._compiling_ns + self._host.settings.start, self._gpu_free_ns)
        return start_ns if self._cache_copies is None else max(start_ns, self._cache_copies.blocked_until_ns)

    def _forward_end_ns(self, start_ns: int, duration_ns: int) -> int:
        if self._cache_copies is None:
            return start_ns + duration_ns
        return self._cache_copies.forward_end_ns(start_ns, duration_ns)

    def _run_prefill(self, step: m.PrefillStep, start_ns: int, end_ns: int, first_ns: int | None = None) -> None:
        now_ns = self._timeline.now_ns
        self._gpu_free_ns = end_ns
        begun = self._launched(step, start_ns, first_ns)
        for group in range(1, self._layer_groups + 1):  # layers take equally long
            done_ns = start_ns + (end_ns - start_ns) * group // self._layer_groups
            self._timeline.after(done_ns - now_ns, self._on_computed, m.LayersComputed(step.step_id, group))
        self._timeline.after(end_ns - now_ns, self._end_prefill, begun, self._order)

    def _launched(self, step: m.PrefillStep, start_ns: int, first_ns: int | None) -> BegunForward:
        if self._host.settings.launch:
            self._host.work(self._host.settings.launch)
        return BegunForward(step, start_ns, self._host.free_ns, first_ns, self._compiling_ns)

    def _on_computed(self, computed: m.LayersComputed) -> None:
        if not self._is_dead:
            self._bus.on_layers(self.instance.instance_id, computed)

    def _end_prefill(self, begun: BegunForward) -> None:
        if self._is_dead:
            return
        step, start_ns = begun.step, begun.start_ns
        if self._host.now_ns < begun.launched_ns:
            self._host.at(begun.launched_ns, self._end_prefill, begun, self._order)
            return
        name, duration_ns = self.instance.instance_id, self._timeline.now_ns - start_ns
        self._on_step(step, prefill_record(name, step, start_ns, duration_ns, begun.first_ns, begun.compiling_ns), None)
        self._see_result(self._executor.prefill(step))

    def _see_result(self, result: m.Result) -> None:
        """Gives a step's result to the loop. If the host is busy, the loop gets the result when the host is free."""
        if self._host.is_busy:
            self._host.when_free(self._see_result, result, self._order)
        elif self._is_pausing:
            self._held.append(result)
        else:
            self._on_result(result)
