"""Drives one instance in simulated time: answers its loop's Settle, Wait and steps."""

from collections.abc import Callable, Mapping
from functools import partial

from simpy import Environment, Event

from pdsim.core.instance import Instance
from pdsim.core.loop import instance_loop
from pdsim.core.messages import Command, DecodeStep, Message, PrefillStep, Settle, StepResult, Wait
from pdsim.core.sequence import Spans
from pdsim.cost.clock import DecodeClock
from pdsim.cost.model import CostModel
from pdsim.metrics.records import StepRecord
from pdsim.sim.alarm import CHOICES, STEP_ENDS, Alarm
from pdsim.sim.decode_executor import DecodeExecutor, prefill_result


class Actor:
    """One instance and what it is doing: waiting, a forward, or a number of decode steps.

    Decode steps run as many at once as the instance allows, until a sequence ends. A message cuts them short: the step
    in progress finishes, then the instance is asked again. With single_steps, each runs alone; nothing else differs.
    """

    def __init__(
        self,
        env: Environment,
        index: int,
        instance: Instance,
        *,
        cost: CostModel,
        outputs: Mapping[int, Spans],
        carry_out: Callable[[list[Command]], None],
        on_step: Callable[[PrefillStep | DecodeStep, StepRecord], None],
        on_choice: Callable[[Instance], None] | None,
        single_steps: bool,
    ) -> None:
        self.instance = instance
        self._env = env
        self._cost = cost
        self._outputs = outputs
        self._on_step = on_step
        self._on_choice = on_choice
        self._single_steps = single_steps
        self._step_order = STEP_ENDS + index
        self._choice_order = CHOICES + index
        self._inbox: list[Message] = []
        self._loop = instance_loop(instance, drain=self._drain, carry_out=carry_out, now_ns=lambda: int(env.now))
        self._clock = DecodeClock()
        self._executor = DecodeExecutor(outputs)
        self._waits = False
        self._timer: Alarm | None = None
        self._decoding: DecodeStep | None = None
        self._num_steps = 0
        self._start_ns = 0
        self._end: Alarm | None = None

    def start(self) -> None:
        self._advance(None)

    def post(self, message: Message) -> None:
        self._inbox.append(message)
        if self._waits:
            self._wake()
        elif self._num_steps > 1:
            self._cut_short()

    def _drain(self) -> list[Message]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def _advance(self, result: StepResult | None) -> None:
        """Go on until the loop asks for something that takes time."""
        effect = self._loop.send(result)
        while True:
            match effect:
                case Settle():
                    if self._env.peek() <= self._env.now:
                        Alarm(self._env, 0, self._on_settled, order=self._choice_order)
                        return
                    effect = self._loop.send(None)
                case DecodeStep():
                    return self._start_decode(effect)
                case PrefillStep():
                    return self._start_prefill(effect)
                case Wait(until_ns):
                    return self._start_wait(until_ns)

    def _on_settled(self, _: Event) -> None:
        self._advance(None)

    # Waiting.

    def _start_wait(self, until_ns: int | None) -> None:
        if self._on_choice is not None:
            self._on_choice(self.instance)
        self._waits = True
        if until_ns is not None:
            self._timer = Alarm(self._env, max(0, until_ns - int(self._env.now)), lambda _: self._wake())

    def _wake(self) -> None:
        self._waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._advance(None)

    # Prefill.

    def _start_prefill(self, step: PrefillStep) -> None:
        if self._on_choice is not None:
            self._on_choice(self.instance)
        self._start_ns = int(self._env.now)
        Alarm(self._env, self._cost.prefill_ns(step), partial(self._end_prefill, step), order=self._step_order)

    def _end_prefill(self, step: PrefillStep, _: Event) -> None:
        record = StepRecord(
            self.instance.instance_id,
            "prefill",
            self._start_ns,
            int(self._env.now) - self._start_ns,
            1,
            len(step.chunks),
            sum(chunk.num_tokens for chunk in step.chunks),
            sum(chunk.num_context_tokens for chunk in step.chunks),
            0.0,
        )
        self._on_step(step, record)
        self._advance(prefill_result(step, self._outputs))

    # Decode.

    def _start_decode(self, step: DecodeStep) -> None:
        if self._on_choice is not None:
            self._on_choice(self.instance)
        self._clock.begin(self._cost.decode_line(step.num_requests), step)
        until_end = self._executor.begin(step)
        self._decoding = step
        self._start_ns = int(self._env.now)
        self._run(1 if self._single_steps else min(until_end, step.max_steps))

    def _run(self, num_steps: int) -> None:
        self._num_steps = num_steps
        delay_ns = self._start_ns + self._clock.duration_ns(num_steps) - int(self._env.now)
        self._end = Alarm(self._env, delay_ns, self._end_decode, order=self._step_order)

    def _cut_short(self) -> None:
        num_steps = self._clock.steps_until(int(self._env.now) - self._start_ns)
        if num_steps < self._num_steps:
            assert self._end is not None
            self._end.cancel()
            self._run(num_steps)

    def _end_decode(self, _: Event) -> None:
        step, num_steps = self._decoding, self._num_steps
        assert step is not None
        self._num_steps = 0
        record = StepRecord(
            self.instance.instance_id,
            "decode",
            self._start_ns,
            int(self._env.now) - self._start_ns,
            num_steps,
            step.num_requests,
            num_steps * step.num_requests,
            step.num_context_tokens,
            self._clock.growth_ns,
        )
        self._on_step(step, record)
        self._clock.finish(num_steps)
        self._advance(self._executor.finish(num_steps))
