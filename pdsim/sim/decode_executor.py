"""Which sequences end when, in place of a model: the only reader of a request's true output length."""

from collections.abc import Mapping
from heapq import heappop, heappush

from pdsim.core.messages import DecodeStep, PrefillStep, StepResult
from pdsim.core.sequence import Spans


class DecodeExecutor:
    """Follows the batch of one decode instance by the steps it is given."""

    def __init__(self, outputs: Mapping[int, Spans]) -> None:
        self._outputs = outputs
        self._num_steps = 0
        self._ends: list[tuple[int, int]] = []
        """(step after which it ends, request), as a heap; entries of requests that left are stale."""
        self._end_of: dict[int, int] = {}
        self._remaining: dict[int, int] = {}
        """Steps that requests still need which left."""

    def begin(self, step: DecodeStep) -> int:
        """Take in the changes of the batch; the number of steps until the first sequence ends."""
        for request_id in step.left:
            self._remaining[request_id] = self._end_of.pop(request_id) - self._num_steps
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

    def finish(self, num_steps: int) -> StepResult:
        self._num_steps += num_steps
        ended = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            end, request_id = heappop(self._ends)
            if self._end_of.get(request_id) == end:
                del self._end_of[request_id]
                ended.append((request_id, self._outputs[request_id]))
        return StepResult(num_steps, tuple(ended))


_NONE_ENDED = StepResult()


def prefill_result(step: PrefillStep, outputs: Mapping[int, Spans]) -> StepResult:
    """Sequences that consist of their first token end with it."""
    last = [chunk.request_id for chunk in step.chunks if chunk.is_last]
    ended = [(request_id, outputs[request_id]) for request_id in last if len(outputs[request_id]) == 1]
    return StepResult(1, tuple(ended)) if ended else _NONE_ENDED
