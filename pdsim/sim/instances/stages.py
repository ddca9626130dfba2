"""Decode and mixed steps of instances with pipeline stages: several steps are under way at once."""

from collections.abc import Callable

from simpy.events import EventPriority

from pdsim.core.messages import DecodeStep, MixedStep, Result, StepResult
from pdsim.cost.model import FRACTION_BITS
from pdsim.cost.step_times import PipelineTimes, StepTimes
from pdsim.dataclass import dataclass
from pdsim.metrics.records import StepRecord
from pdsim.sim.bus import Timeline
from pdsim.sim.instances.executor import CountingExecutor, OnStep, prefill_record


class MicroBatchExecutor(CountingExecutor):
    """Stands in for a model with pipeline stages: counts the tokens that requests still lack, and computes none. A
    decode step names all requests of its micro-batch (`joined`), and gives each of them one token.
    """

    def decode(self, step: DecodeStep) -> StepResult:
        ended = []
        for request_id in step.joined:
            output = self._outputs[request_id]
            left = self._remaining.pop(request_id, len(output) - 1) - 1
            if left:
                self._remaining[request_id] = left
            else:
                ended.append((request_id, output))
        return StepResult(1, tuple(ended))


@dataclass(frozen=True, slots=True)
class _Begun:
    step: DecodeStep | MixedStep
    start_ns: int
    first_ns: int
    """Time in ns at which the step leaves the first stage."""
    copying_ns: int


class StagedSteps:
    """Passes the decode and mixed steps of one instance through its pipeline stages."""

    def __init__(
        self,
        timeline: Timeline,
        instance_id: str,
        order: EventPriority,
        cost: StepTimes,
        executor: MicroBatchExecutor,
        pipeline: PipelineTimes,
        free_ns: list[int],
        on_step: OnStep,
        on_result: Callable[[Result], None],
    ) -> None:
        """free_ns: times in ns at which each stage becomes free. Prefill steps change them, too. on_step, on_result:
        called with each ended step, and with its result.
        """
        self._timeline = timeline
        self._instance_id = instance_id
        self._order = order
        self._cost = cost
        self._executor = executor
        self._pipeline = pipeline
        self._free_ns = free_ns
        self._on_step = on_step
        self._on_result = on_result
        self._is_dead = False

    def begin(self, step: DecodeStep | MixedStep, copying_ns: int, load: tuple[int, int] | None) -> None:
        """Begins a step. copying_ns: time in ns that copies of KV take before the step. load: start and end in ns of
        loads of cached KV for which the step waits; None: there are none.
        """
        start_ns = max(self._timeline.now_ns + copying_ns, self._free_ns[0])
        if isinstance(step, MixedStep):
            largest_ns, num_tokens = self._cost.mixed_ns(step, start_ns), step.prefill.num_tokens
        else:
            largest_ns, num_tokens = self._decode_ns(step), step.num_requests
        loads = [] if load is None else [load]
        end_ns = self._pipeline.pass_on(start_ns, largest_ns, num_tokens, self._free_ns, loads)
        self.run(step, start_ns, self._free_ns[0], end_ns, copying_ns)

    def run(self, step: DecodeStep | MixedStep, start_ns: int, first_ns: int, end_ns: int, copying_ns: int) -> None:
        """Runs a step from start_ns to end_ns. The step leaves the first stage at first_ns. copying_ns: time in ns that
        copies of KV took before the step, for its record.
        """
        begun = _Begun(step, start_ns, first_ns, copying_ns)
        self._timeline.after(end_ns - self._timeline.now_ns, self._end, begun, self._order)

    def kill(self) -> None:
        self._is_dead = True

    def _decode_ns(self, step: DecodeStep) -> int:
        line = self._cost.decode_line(step.num_requests)
        kv = line.per_context_token * step.num_context_tokens + line.per_distinct_token * step.num_distinct_tokens
        return (line.base + kv) >> FRACTION_BITS

    def _end(self, begun: _Begun) -> None:
        if self._is_dead:
            return
        step, start_ns, first_ns = begun.step, begun.start_ns, begun.first_ns - begun.start_ns
        duration_ns = self._timeline.now_ns - start_ns
        decode = step.decode if isinstance(step, MixedStep) else step
        sizes = (1, decode.num_requests, decode.num_requests, decode.num_context_tokens, 0.0)
        copying_ns = begun.copying_ns
        row = StepRecord(self._instance_id, "decode", start_ns, duration_ns, first_ns, *sizes, copying_ns=copying_ns)
        result = self._executor.decode(decode)
        if isinstance(step, MixedStep):
            prefill = prefill_record(self._instance_id, step.prefill, start_ns, duration_ns, first_ns)
            self._on_step(step.prefill, prefill, None)
            result = StepResult(1, (*result.ended, *self._executor.prefill(step.prefill).ended))
        self._on_step(decode, row, None)
        self._on_result(result)
