"""The step loop of one instance in real time: begins the steps that the instance chooses, and continues when a message
arrives.
"""

from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pdreal.control.clock import Timeline
from pdreal.control.logbook import InstanceLog
from pdreal.control.tasks import Compute
from pdreal.rank.executor import Executor, NewToken
from pdreal.rank.group import ComputedTokens, RankGroup
from pdsim.core import messages as m
from pdsim.core.instance import instance_loop

_FEW_REQUESTS = 256


class StepLoop:
    def __init__(
        self,
        instance: Any,
        executor: Executor,
        group: RankGroup,
        timeline: Timeline,
        log: InstanceLog,
        *,
        carry_out: Callable[[Sequence[m.Command]], None],
        on_tokens: Callable[[Sequence[NewToken]], None],
        on_layers: Callable[[int, int], None] | None,
        forget: Callable[[int], None],
        flush_soon: Callable[[], None],
    ) -> None:
        """carry_out: called with the instance's commands. on_tokens: called with the new tokens of each step that made
        any. on_layers: called with a prefill step's id and the number of its layer groups that are computed. None:
        forwards have no layer groups.

        forget: called with each request that ended without a message from this instance.

        flush_soon: called when the log has new entries.
        """
        self._instance = instance
        self._executor = executor
        self._group = group
        self._timeline = timeline
        self._log = log
        self._on_tokens = on_tokens
        self._on_layers = on_layers
        self._forget = forget
        self._flush_soon = flush_soon
        self._inbox: list[m.Message] = []
        self._loop = instance_loop(instance, drain=self._drain, carry_out=carry_out, clock=timeline)
        self.num_in_flight = 0
        self._waits = False
        self._timer: TimerHandle | None = None
        self._look_around_at = _FEW_REQUESTS
        """Number of requests in the executor from which the loop looks for requests that have ended."""

    def post(self, message: m.Message) -> None:
        """Keeps a message until the instance takes messages. If the loop waits, it continues."""
        self._inbox.append(message)
        if self._waits:
            self.go_on()

    def go_on(self, _: None = None) -> None:
        """Lets the loop continue as soon as the callbacks that the event loop has queued already have run."""
        self._waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timeline.loop.call_soon(self._advance, None)

    def _drain(self) -> list[m.Message]:
        inbox, self._inbox = self._inbox, []
        return inbox

    def _advance(self, answer: m.Result | None) -> None:
        """Begins steps until the instance must wait (for a message, a time, or the end of a step), or as many steps run
        as may run at once. answer: result of a step that has ended; None: no step has ended since the last call.
        """
        while True:
            asked = self._loop.send(answer)
            if self._executor.num_requests > self._look_around_at:
                self._forget_others()
            self._log.levels(self._instance)
            if isinstance(asked, m.Wait):
                if not self.num_in_flight:
                    self._begin_wait(asked)
                break
            assert not isinstance(asked, m.Pause | m.MixedStep)
            self._begin(asked)
            if self.num_in_flight == self._instance.max_steps_in_flight:
                break
            answer = None
        self._flush_soon()

    def _forget_others(self) -> None:
        """Makes the leader drop its data of requests that the instance no longer has, although no message ended them;
        for example, requests that were cancelled before they began. Called when the instance has seen all messages.
        """
        present = set(inner(self._instance).requests())
        for request_id in self._executor.others_than(present):
            self._forget(request_id)
        self._look_around_at = 2 * self._executor.num_requests + _FEW_REQUESTS

    def _begin_wait(self, wait: m.Wait) -> None:
        self._waits = True
        if self._inbox:
            self.go_on()
        elif wait.until_ns is not None:
            self._timer = self._timeline.at(wait.until_ns, self.go_on)

    def _begin(self, step: m.PureStep) -> None:
        self.num_in_flight += 1
        tell_layers = None if self._on_layers is None else partial(self._tell_layers, self._on_layers, step.step_id)
        task = Compute(self._executor.begin(step), step.step_id)
        self._group.compute(task, partial(self._on_computed, step), tell_layers)

    def _tell_layers(self, on_layers: Callable[[int, int], None], step_id: int, num_groups: int) -> None:
        """Makes the event loop call on_layers(step_id, num_groups). The thread that computes forwards calls this
        method. num_groups: number of layer groups that the forward has computed.
        """
        self._timeline.loop.call_soon_threadsafe(on_layers, step_id, num_groups)

    def _on_computed(self, step: m.PureStep, computed: ComputedTokens) -> None:
        outcome = self._executor.finish(step, computed.tokens, computed.logprobs, computed.seeds)
        self._log.step(step, outcome.result, computed.start_ns, computed.end_ns)
        if computed.expert_counts is not None:
            self._log.experts(step, computed.expert_counts)
        if outcome.new_tokens:
            self._on_tokens(outcome.new_tokens)
        self.num_in_flight -= 1
        self._advance(outcome.result)


def inner(machine: Any) -> Any:
    """Returns the state machine without the wrapper that logs its calls."""
    return getattr(machine, "inner", machine)
