"""Drives one instance in simulated time: answers its loop."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter

from simpy.events import EventPriority

from pdsim.core.instance import Instance
from pdsim.core.loop import instance_loop
from pdsim.core.messages import (
    Cancel,
    CellScattered,
    Command,
    DecodeStep,
    KvArrived,
    KvSent,
    LayersComputed,
    LoadKv,
    Message,
    PrefillStep,
    RankObserved,
    Result,
    SaveKv,
    Verified,
    Wait,
)
from pdsim.core.transfer_plan import TransferUnit
from pdsim.cost.clock import DecodeClock
from pdsim.cost.host_memory import HostMemory
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.step_times import StepTimes
from pdsim.metrics.records import StepRecord
from pdsim.scenario.schema import HostSettings
from pdsim.sim.executor import Executor
from pdsim.sim.timeline import CHOICES, Alarm, Timeline
from pdsim.workload.request_spec import Streams


class Actor:
    """One instance and what it is doing: waiting, a forward, or a number of decode steps.

    Decode steps run as many at once as the instance allows, until a sequence ends. A message cuts them short: the
    step in progress finishes, then the instance is asked again. With single_steps, each runs alone; nothing else
    differs.
    """

    def __init__(
        self,
        timeline: Timeline,
        index: int,
        instance: Instance,
        *,
        cost: StepTimes,
        host: HostSettings,
        host_memory: HostMemory | None,
        executor: Executor,
        carry_out: Callable[[list[Command]], None],
        on_step: Callable[[PrefillStep | DecodeStep, StepRecord, Verified | None], None],
        agreement_ns: int,
        layer_groups: int,
        on_layers: Callable[[str, LayersComputed], None],
        on_choice: Callable[[Instance], None] | None,
        single_steps: bool,
    ) -> None:
        self.instance = instance
        self._instance_id = instance.instance_id
        self._timeline = timeline
        self._cost = cost
        self._on_step = on_step
        self._agreement = agreement_ns << FRACTION_BITS
        """Of its ranks, in each decode step during which KV is on its way."""
        self._layer_groups = layer_groups
        self._on_layers = on_layers
        self._on_choice = on_choice
        self._single_steps = single_steps
        self._order = EventPriority(CHOICES + index)
        self._inbox: list[Message] = []
        self._loop = instance_loop(
            instance,
            drain=self._drain,
            carry_out=self._copy if host_memory is not None else carry_out if host.is_none else self._hand_on,
            now_ns=partial(attrgetter("now_ns"), timeline),
            pauses=not host.is_none,
        )
        self._carry_out = carry_out
        self._host = host
        self._host_free_ns = 0
        """When the instance's CPU is done with launching and sending."""
        self._host_memory = host_memory
        self._copying_ns = 0
        """Before the decode step that begins."""
        self._clock = DecodeClock()
        self._executor = executor
        self._is_dead = False
        self._waits = False
        self._timer: Alarm | None = None
        self._num_in_flight = 0
        self._max_in_flight = instance.max_steps_in_flight
        self._free_ns = 0
        """When the last step that was begun ends: the next one begins behind it."""
        self._start_ns = 0
        self._num_steps = 0
        """Decode steps in progress; more than one can be cut short."""
        self._end: Alarm | None = None

    def start(self) -> None:
        self._advance(None)

    def post(self, message: Message) -> None:
        """The dead take messages too, and do nothing with them."""
        self._inbox.append(message)
        if self._waits:
            self._waits = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._wake()
        elif self._num_steps > 1:
            self._cut_short()

    def kill(self) -> None:
        """Decode steps that had ended are recorded; nothing else comes of what is under way."""
        if self._num_steps and self._timeline.now_ns > self._start_ns:
            num_steps = self._clock.steps_until(self._timeline.now_ns - self._start_ns) - 1
            if num_steps:
                assert self._end is not None
                self._record_decode(self._end.payload, num_steps, self._clock.duration_ns(num_steps))
        for alarm in (self._timer, self._end):
            if alarm is not None:
                alarm.cancel()
        self._is_dead, self._waits, self._num_steps = True, False, 0
        self._loop.close()

    def _drain(self) -> list[Message]:
        inbox, self._inbox = self._inbox, []
        if self._host_memory is not None:
            for message in inbox:
                if isinstance(message, Cancel):
                    self._host_memory.forget(message.request_id)
        return inbox

    def _advance(self, answer: Result | None) -> None:
        """Begin what the loop asks for until it must wait, for a step or for a message."""
        while not self._is_dead:
            asked = self._loop.send(answer)
            if self._on_choice is not None:
                self._on_choice(self.instance)
            if isinstance(asked, DecodeStep):
                self._begin_decode(asked)
            elif isinstance(asked, PrefillStep):
                self._begin_prefill(asked)
            elif isinstance(asked, Wait):
                if not self._num_in_flight:
                    self._begin_wait(asked)
                return
            else:
                self._go_on_later()
                return
            self._num_in_flight += 1
            if self._num_in_flight == self._max_in_flight:
                return
            if self._host_free_ns > self._timeline.now_ns:
                self._go_on_later()
                return
            answer = None

    def _on_result(self, result: Result) -> None:
        self._num_in_flight -= 1
        if self._host.result:
            self._host_free_ns = max(self._host_free_ns, self._timeline.now_ns) + self._host.result
        self._advance(result)

    def _go_on_later(self) -> None:
        """When the host has time."""
        self._timeline.after(max(0, self._host_free_ns - self._timeline.now_ns), self._advance, order=self._order)

    def _hand_on(self, commands: list[Command]) -> None:
        """Units leave the host one after another; all else at once."""
        now_ns = self._timeline.now_ns
        units = [command for command in commands if isinstance(command, TransferUnit)]
        self._carry_out([command for command in commands if not isinstance(command, TransferUnit)])
        for unit in units:
            self._host_free_ns = max(self._host_free_ns, now_ns) + self._host.send
            self._timeline.after(self._host_free_ns - now_ns, self._send_unit, unit)

    def _send_unit(self, unit: TransferUnit) -> None:
        if not self._is_dead:
            self._carry_out([unit])

    def _copy(self, commands: list[Command]) -> None:
        """KV of retracted requests goes to host memory and comes back; the loop stands still meanwhile."""
        assert self._host_memory is not None
        for command in commands:
            if isinstance(command, SaveKv):
                self._copying_ns += self._host_memory.save_ns(command.request_id, len(command.pages))
            elif isinstance(command, LoadKv):
                self._copying_ns += self._host_memory.load_ns(command.request_id)
        self._carry_out([command for command in commands if not isinstance(command, SaveKv | LoadKv)])

    # Waiting.

    def _begin_wait(self, wait: Wait) -> None:
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

    def _wake(self) -> None:
        """At the end of this instant, for more may come."""
        if self._timeline.is_last_now:
            self._advance(None)
        else:
            self._timeline.after(0, self._advance, order=self._order)

    # Prefill.

    def _begin_prefill(self, step: PrefillStep) -> None:
        now_ns = self._timeline.now_ns
        start_ns = max(now_ns + self._host.start, self._free_ns)
        self._free_ns = start_ns + self._cost.prefill_ns(step, start_ns)
        self._host_free_ns = max(self._host_free_ns, now_ns) + self._host.launch
        if self._layer_groups:
            self._announce_layers(step, start_ns)
        self._timeline.after(self._free_ns - now_ns, self._end_prefill, (step, start_ns), self._order)

    def _announce_layers(self, step: PrefillStep, start_ns: int) -> None:
        """Layers take equally long; the last group is done with the forward."""
        now_ns = self._timeline.now_ns
        for group in range(1, self._layer_groups + 1):
            done_ns = start_ns + (self._free_ns - start_ns) * group // self._layer_groups
            self._timeline.after(done_ns - now_ns, self._on_computed, LayersComputed(step.step_id, group))

    def _on_computed(self, computed: LayersComputed) -> None:
        if not self._is_dead:
            self._on_layers(self._instance_id, computed)

    def _end_prefill(self, begun: tuple[PrefillStep, int]) -> None:
        if self._is_dead:
            return
        step, start_ns = begun
        num_tokens = num_context_tokens = 0
        for chunk in step.chunks:
            num_tokens += chunk.num_tokens
            num_context_tokens += chunk.num_context_tokens
        duration_ns = self._timeline.now_ns - start_ns
        self._on_step(
            step,
            StepRecord(
                self._instance_id,
                "prefill",
                start_ns,
                duration_ns,
                duration_ns,
                1,
                len(step.chunks),
                num_tokens,
                num_context_tokens,
                0.0,
            ),
            None,
        )
        self._see_result(self._executor.prefill(step))

    def _see_result(self, result: Result) -> None:
        """As soon as the host is not launching the next forward."""
        now_ns = self._timeline.now_ns
        if self._host_free_ns > now_ns:
            self._timeline.after(self._host_free_ns - now_ns, self._see_result, result, self._order)
        else:
            self._on_result(result)

    # Decode.

    def _begin_decode(self, step: DecodeStep) -> None:
        self._start_ns = self._timeline.now_ns + self._copying_ns
        line = self._cost.decode_line(step.num_requests)
        if self._agreement and self.instance.levels().num_transferring:
            line = line._replace(base=line.base + self._agreement)
        self._clock.begin(line, step)
        num_steps = min(self._executor.begin(step), step.max_steps)
        self._run(step, 1 if self._single_steps or self._inbox else num_steps)

    def _run(self, step: DecodeStep, num_steps: int) -> None:
        self._num_steps = num_steps
        delay_ns = self._start_ns + self._clock.duration_ns(num_steps) - self._timeline.now_ns
        self._end = self._timeline.after(delay_ns, self._end_decode, step, self._order)

    def _cut_short(self) -> None:
        num_steps = self._clock.steps_until(max(0, self._timeline.now_ns - self._start_ns))
        if num_steps < self._num_steps:
            assert self._end is not None
            self._end.cancel()
            self._run(self._end.payload, num_steps)

    def _end_decode(self, step: DecodeStep) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        result = self._executor.finish(num_steps)
        verified = result if isinstance(result, Verified) else None
        self._record_decode(step, num_steps, self._timeline.now_ns - self._start_ns, verified)
        self._clock.finish(num_steps)
        self._on_result(result)

    def _record_decode(
        self, step: DecodeStep, num_steps: int, duration_ns: int, verified: Verified | None = None
    ) -> None:
        record = StepRecord(
            self._instance_id,
            "decode",
            self._start_ns,
            duration_ns,
            self._clock.first_ns,
            num_steps,
            step.num_requests,
            num_steps * step.num_requests if verified is None else sum(verified.num_tokens),
            step.num_context_tokens,
            self._clock.growth_ns,
            copying_ns=self._copying_ns,
        )
        self._copying_ns = 0
        self._on_step(step, record, verified)


class Ranks:
    """Delivers messages to instances; what every rank must see for itself, once for each rank."""

    def __init__(
        self, timeline: Timeline, num_ranks: Mapping[str, int], *, agreement_ns: int, skew_ns: int, streams: Streams
    ) -> None:
        self._timeline = timeline
        self._num_ranks = num_ranks
        self._agreement_ns = agreement_ns
        self._skew_ns = skew_ns
        self._streams = streams

    def agreement_ns(self, instance_id: str) -> int:
        """What the ranks of an instance take to agree, in each decode step during which KV is on its way."""
        return self._agreement_ns if self._num_ranks[instance_id] > 1 else 0

    def post(self, actor: Actor, instance_id: str, message: Message) -> None:
        if self._num_ranks[instance_id] == 1:
            actor.post(message)
        elif isinstance(message, KvArrived | KvSent):
            self._post_seen(actor, instance_id, message)
        elif isinstance(message, CellScattered) and message.completes is not None:
            actor.post(message._replace(completes=None))
            self._post_seen(actor, instance_id, message.completes)
        else:
            actor.post(message)

    def _post_seen(self, actor: Actor, instance_id: str, seen: KvArrived | KvSent) -> None:
        """To the instance in the life that it has now."""
        num_ranks = self._num_ranks[instance_id]
        draws = self._streams.named(f"ranks of {instance_id} for {seen.request_id}")
        for rank in range(num_ranks):
            delay_ns = self._agreement_ns + round(draws.random() * self._skew_ns)
            self._timeline.after(delay_ns, actor.post, RankObserved(rank, num_ranks, seen))
