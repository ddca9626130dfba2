"""Stands in for GPU and model in the simulator: executors decide which sequences end with each step, and a clock
decides when decode steps end.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import Final

from simpy.events import EventPriority

from pdsim.core.messages import DecodeStep, PrefillStep, Result, StepResult, Verified
from pdsim.core.sequence import Spans
from pdsim.cost.cold_server import ColdServer
from pdsim.cost.model import FRACTION_BITS, NO_TIME, DecodeLine
from pdsim.cost.step_times import StepTimes
from pdsim.metrics.records import StepRecord
from pdsim.sim.bus import Alarm, Timeline

OnStep = Callable[[PrefillStep | DecodeStep, StepRecord, Verified | None], None]

_MASK: Final = (1 << FRACTION_BITS) - 1
_NONE_ENDED = StepResult()
"""Result of a step that ends no sequence. Most prefill steps have this result."""


class Executor:
    """Stands in for a model: ends each sequence at its true output length. The rest of an instance must not read these
    lengths, because a real scheduler does not know them. outputs: tokens of the output, by request id.

    The executor follows the batch of one instance from step to step.
    """

    def __init__(self, outputs: Mapping[int, Spans]) -> None:
        self._outputs = outputs
        self._num_steps = 0
        self._ends: list[tuple[int, int]] = []
        """Heap of (number of the step that ends the request, request id). An entry is invalid if its request has left
        the batch."""
        self._end_of: dict[int, int] = {}
        self._remaining: dict[int, int] = {}
        """Number of remaining output tokens of requests that left the batch, by request id."""

    def begin(self, step: DecodeStep) -> int:
        """Updates the batch for a step that begins: removes the requests that left, and adds those that joined. Returns
        the number of steps until the first request of the batch has its last token.
        """
        for request_id in step.left:
            self._set_aside(request_id)
        for request_id in step.joined:
            remaining = self._remaining.pop(request_id, None) or len(self._outputs[request_id]) - 1
            end = self._num_steps + remaining
            self._end_of[request_id] = end
            heappush(self._ends, (end, request_id))
        end, request_id = self._ends[0]
        while self._end_of.get(request_id) != end:
            heappop(self._ends)
            end, request_id = self._ends[0]
        return end - self._num_steps

    def finish(self, num_steps: int) -> Result:
        self._num_steps += num_steps
        ended = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            end, request_id = heappop(self._ends)
            if self._end_of.get(request_id) == end:
                del self._end_of[request_id]
                ended.append((request_id, self._outputs[request_id]))
        return StepResult(num_steps, tuple(ended))

    def prefill(self, step: PrefillStep) -> StepResult:
        """Gives each completed prompt one token: its first token, or its next token after a retraction."""
        ended = []
        for request_id in (chunk.request_id for chunk in step.chunks if chunk.is_last):
            self._set_aside(request_id)
            output = self._outputs[request_id]
            remaining = self._remaining.pop(request_id, None)
            if (remaining or len(output)) == 1:
                ended.append((request_id, output))
            elif remaining is not None:
                self._remaining[request_id] = remaining - 1
        return StepResult(1, tuple(ended)) if ended else _NONE_ENDED

    def _set_aside(self, request_id: int) -> None:
        """Stores how many tokens a request still lacks when it leaves the batch. A second call for the same request
        changes nothing: `prefill` calls this method, and the next decode step may report again that the request left.
        """
        end = self._end_of.pop(request_id, None)
        if end is not None:
            self._remaining[request_id] = end - self._num_steps


class RecomputingExecutor(Executor):
    """Executor of a decode or aggregated instance of vLLM, which computes the prompt and outputs of a preempted request
    again.

    Most requests come with a first token from prefill; when such a request is computed again, the last forward makes
    the token after those that it already has. If the instance itself computes the prompt (`local`), the prompt's last
    forward makes the first token.
    """

    def __init__(self, outputs: Mapping[int, Spans], local: set[int]) -> None:
        """outputs: tokens of the output, by request id. local: ids of requests whose prompts decode or aggregated
        instances compute themselves. The executor removes an id when the prompt is computed.
        """
        super().__init__(outputs)
        self._local = local

    def prefill(self, step: PrefillStep) -> StepResult:
        for request_id in (chunk.request_id for chunk in step.chunks if chunk.is_last):
            self._set_aside(request_id)
            if request_id in self._local:
                self._local.remove(request_id)
            else:
                self._remaining.setdefault(request_id, len(self._outputs[request_id]) - 1)
        return super().prefill(step)


class CountingExecutor(Executor):
    """Executor for instances that may retract a request before its first decode step. Counts a request's first token
    when the prompt is computed; `Executor` counts it when the request joins the batch.
    """

    def prefill(self, step: PrefillStep) -> StepResult:
        result = super().prefill(step)
        ended = {request_id for request_id, _ in result.ended}
        for request_id in (chunk.request_id for chunk in step.chunks if chunk.is_last):
            if request_id not in ended:
                self._remaining.setdefault(request_id, len(self._outputs[request_id]) - 1)
        return result


class SpeculativeExecutor(CountingExecutor):
    """Takes the place of the draft model and the target model: determines how many drafts each step accepts.

    In each step, a sequence gets the next number of tokens that `accepted` yields for it, but no more than the tokens
    up to the end of its output.
    """

    def __init__(self, outputs: Mapping[int, Spans], accepted: Callable[[int], Iterator[int]]) -> None:
        """outputs: output tokens of each request, by request id. accepted: function from a request id to an iterator,
        which yields for each step the number of tokens that the step gives to the request.
        """
        super().__init__(outputs)
        self._accepted = accepted
        self._streams: dict[int, Iterator[int]] = {}
        self._lacks: dict[int, int] = {}
        """Number of output tokens that each sequence of the batch still lacks, in batch order."""

    def begin(self, step: DecodeStep) -> int:
        for request_id in step.left:
            self._set_aside(request_id)
        for request_id in step.joined:
            self._lacks[request_id] = self._remaining.pop(request_id, 0) or len(self._outputs[request_id]) - 1
            if request_id not in self._streams:
                self._streams[request_id] = self._accepted(request_id)
        return 1

    def finish(self, num_steps: int) -> Verified:
        gained, ended = [], []
        for request_id, lacks in self._lacks.items():
            num_tokens = min(next(self._streams[request_id]), lacks)
            gained.append(num_tokens)
            self._lacks[request_id] = lacks - num_tokens
            if num_tokens == lacks:
                ended.append((request_id, self._outputs[request_id]))
        for request_id, _ in ended:
            del self._lacks[request_id], self._streams[request_id]
        return Verified(tuple(gained), tuple(ended))

    def _set_aside(self, request_id: int) -> None:
        lacks = self._lacks.pop(request_id, None)
        if lacks is not None:
            self._remaining[request_id] = lacks


class DecodeClock:
    """Computes when an instance's decode steps end. Many steps that are computed at once end at the same nanosecond as
    steps that are computed one by one. Each step adds the same number of KV tokens, so the durations of steps are an
    arithmetic progression, and the time of n steps is quadratic in n. Fractions of a nanosecond are carried over to the
    next step.

    Usage: `begin` a step, read its times, `finish` it.
    """

    __slots__ = ("_carry", "_first_ns", "_fraction", "_growth")

    def __init__(self) -> None:
        self._carry = 0
        self._first_ns = 0
        """Whole ns of the first step's duration. The fraction of a ns is kept apart (_fraction), because compiled code
        multiplies small integers ten times as fast."""
        self._fraction = 0
        self._growth = 0

    def begin(self, line: DecodeLine, step: DecodeStep) -> None:
        per_context, per_distinct = line.per_context_token, line.per_distinct_token
        first = line.base + per_context * step.num_context_tokens + per_distinct * step.num_distinct_tokens
        self._first_ns, self._fraction = first >> FRACTION_BITS, first & _MASK
        self._growth = (per_context + per_distinct) * step.num_requests

    @property
    def growth_ns(self) -> float:
        """Time in ns by which each step takes longer than the step before."""
        return self._growth / (1 << FRACTION_BITS)

    @property
    def first_ns(self) -> int:
        return self._first_ns + ((self._carry + self._fraction) >> FRACTION_BITS)

    def duration_ns(self, num_steps: int) -> int:
        parts = self._carry + num_steps * self._fraction + self._growth * (num_steps * (num_steps - 1) // 2)
        return num_steps * self._first_ns + (parts >> FRACTION_BITS)

    def steps_until(self, elapsed_ns: int) -> int:
        """Returns the smallest number of steps, at least 1, that together take at least elapsed_ns."""
        need = elapsed_ns << FRACTION_BITS
        linear = (self._first_ns << FRACTION_BITS) + self._fraction - self._growth / 2
        n = ceil(
            (sqrt(linear * linear + 2.0 * self._growth * need) - linear) / self._growth
            if self._growth
            else need / linear
        )
        while n > 1 and self.duration_ns(n - 1) >= elapsed_ns:
            n -= 1
        while n < 1 or self.duration_ns(n) < elapsed_ns:
            n += 1
        return n

    def finish(self, num_steps: int) -> None:
        parts = self._carry + num_steps * self._fraction + self._growth * (num_steps * (num_steps - 1) // 2)
        self._carry = parts & _MASK


def prefill_record(
    instance_id: str,
    step: PrefillStep,
    start_ns: int,
    duration_ns: int,
    first_ns: int | None = None,
    compiling_ns: int = 0,
) -> StepRecord:
    num_tokens = num_context_tokens = 0
    for chunk in step.chunks:
        num_tokens += chunk.num_tokens
        num_context_tokens += chunk.num_context_tokens
    return StepRecord(
        instance_id,
        "prefill",
        start_ns,
        duration_ns,
        duration_ns if first_ns is None else first_ns,
        1,
        len(step.chunks),
        num_tokens,
        num_context_tokens,
        0.0,
        compiling_ns=compiling_ns,
    )


class DecodeRun:
    """The decode steps that an instance runs before its next decision. on_step: called with the instance's step, the
    record of all steps of the run, and the step's result if it verified drafts (else None). on_result: called with the
    result for the instance.
    """

    def __init__(
        self,
        timeline: Timeline,
        instance_id: str,
        order: EventPriority,
        cost: StepTimes,
        executor: Executor,
        on_step: OnStep,
        on_result: Callable[[Result], None],
    ) -> None:
        self.num_steps = 0
        """Number of steps of the present run. `cut_short` reduces it. 0: no run."""
        self.copying_ns = 0
        """Time in ns for which copies of KV delay the next run: KV of retracted requests, or cached pages."""
        self._timeline = timeline
        self._instance_id = instance_id
        self._order = order
        self._cost = cost
        self._executor = executor
        self._on_step = on_step
        self._on_result = on_result
        self._clock = DecodeClock()
        self._start_ns = 0
        self._end: Alarm | None = None
        self._prompts: PrefillStep | None = None
        """Chunks of prompts that the present step also computes. None: the step only decodes."""
        self._cold: ColdServer | None = None
        """Counts the steps of this run. None: the cost has no cold start, or `begin_one` began the run."""

    def begin(self, step: DecodeStep, *, single: bool) -> None:
        self._start_ns = self._timeline.now_ns + self.copying_ns
        line = self._cost.lines.get(step.num_requests) or self._cost.decode_line(step.num_requests)
        if self._cost.swaps is not None:
            line = self._cost.with_swaps(line, step)
        most_steps = step.max_steps
        self._cold = cold = self._cost.cold
        if cold is not None:
            num_before, stall_ns = cold.next_stall(step.num_requests)
            most_steps = min(most_steps, max(1, num_before))
            line = line if num_before else line.later(stall_ns)
        self._clock.begin(line, step)
        num_steps = min(self._executor.begin(step), most_steps)
        self._end_after(step, 1 if single else num_steps)

    def begin_one(self, step: DecodeStep, start_ns: int, duration_ns: int, prompts: PrefillStep | None = None) -> None:
        """Begins one step with a given start and duration in ns. prompts: chunks that the step also computes; None:
        none.
        """
        self._start_ns = start_ns
        self._prompts = prompts
        self._cold = None
        self._clock.begin(NO_TIME.later(duration_ns), step)
        self._executor.begin(step)
        self._end_after(step, 1)

    def _end_after(self, step: DecodeStep, num_steps: int) -> None:
        self.num_steps = num_steps
        delay_ns = self._start_ns + self._clock.duration_ns(num_steps) - self._timeline.now_ns
        self._end = self._timeline.after(delay_ns, self._on_end, step, self._order)

    @property
    def num_done(self) -> int:
        """Number of steps that have ended, but whose result the instance has not seen."""
        elapsed_ns = self._timeline.now_ns - self._start_ns
        return self._clock.steps_until(elapsed_ns) - 1 if self.num_steps > 1 and elapsed_ns > 0 else 0

    def cut_short(self) -> None:
        """Ends the run after the step that is being computed now."""
        num_steps = self._clock.steps_until(max(0, self._timeline.now_ns - self._start_ns))
        if num_steps < self.num_steps:
            assert self._end is not None
            self._end.cancel()
            self._end_after(self._end.payload, num_steps)

    def kill(self) -> None:
        """Ends the run because the instance has died. Records the steps that had ended."""
        if self._end is None or not self.num_steps:
            return
        self._end.cancel()
        self.num_steps = 0
        if self._timeline.now_ns > self._start_ns:
            num_steps = self._clock.steps_until(self._timeline.now_ns - self._start_ns) - 1
            if num_steps:
                self._record(self._end.payload, num_steps, self._clock.duration_ns(num_steps), None)

    def _on_end(self, step: DecodeStep) -> None:
        num_steps, self.num_steps = self.num_steps, 0
        result = self._executor.finish(num_steps)
        verified = result if isinstance(result, Verified) else None
        duration_ns = self._timeline.now_ns - self._start_ns
        if (prompts := self._prompts) is not None:
            self._prompts = None
            self._on_step(prompts, prefill_record(self._instance_id, prompts, self._start_ns, duration_ns), None)
            result = StepResult(1, (*result.ended, *self._executor.prefill(prompts).ended))
        self._record(step, num_steps, duration_ns, verified)
        self._clock.finish(num_steps)
        if self._cold is not None:
            self._cold.count_steps(step.num_requests, num_steps)
        self._on_result(result)

    def _record(self, step: DecodeStep, num_steps: int, duration_ns: int, verified: Verified | None) -> None:
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
            copying_ns=self.copying_ns,
        )
        self.copying_ns = 0
        self._on_step(step, record, verified)
