"""Ends sequences in place of a model: the only reader of a request's true output length."""

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush

from pdsim.core.messages import DecodeStep, PrefillStep, Result, StepResult, Verified
from pdsim.core.sequence import Spans

_NONE_ENDED = StepResult()
"""The result of most prefill steps."""


class Executor:
    """Follows the batch of one instance by the steps it is given."""

    def __init__(self, outputs: Mapping[int, Spans]) -> None:
        self._outputs = outputs
        self._num_steps = 0
        self._ends: list[tuple[int, int]] = []
        """(step after which it ends, request), as a heap; entries of requests that left are stale."""
        self._end_of: dict[int, int] = {}
        self._remaining: dict[int, int] = {}
        """Tokens that requests still lack which left."""

    def begin(self, step: DecodeStep) -> int:
        """Take in the changes of the batch; the number of steps until the first sequence ends."""
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
        """Each prompt that is completed gets a token: the first, or where it was retracted the next."""
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
        """A request that left, if that is not known yet: the batch may tell it only with its next step."""
        end = self._end_of.pop(request_id, None)
        if end is not None:
            self._remaining[request_id] = end - self._num_steps


class RecomputingExecutor(Executor):
    """Executor of a decode instance that computes requests again: their first token came with their KV.

    Of prompts that are computed there alone, the first forward makes it.
    """

    def __init__(self, outputs: Mapping[int, Spans], local: set[int]) -> None:
        """local: requests whose prompts are computed where they are decoded, until they are."""
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


class SpeculativeExecutor(Executor):
    """Accepts drafted tokens, in place of a draft model and the model that verifies it.

    Each step gives each sequence the next number of its stream, as long as it lacks so many tokens.
    """

    def __init__(self, outputs: Mapping[int, Spans], accepted: Callable[[int], Iterator[int]]) -> None:
        """accepted: of each sequence, the tokens that its steps yield, one after another."""
        super().__init__(outputs)
        self._accepted = accepted
        self._streams: dict[int, Iterator[int]] = {}
        self._lacks: dict[int, int] = {}
        """Tokens that sequences in the batch lack, in its order."""

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

    def prefill(self, step: PrefillStep) -> StepResult:
        """Its first token counts at once: it may be retracted before a decode step, which lacks room for its drafts."""
        result = super().prefill(step)
        ended = {request_id for request_id, _ in result.ended}
        for request_id in (chunk.request_id for chunk in step.chunks if chunk.is_last):
            if request_id not in ended:
                self._remaining.setdefault(request_id, len(self._outputs[request_id]) - 1)
        return result

    def _set_aside(self, request_id: int) -> None:
        lacks = self._lacks.pop(request_id, None)
        if lacks is not None:
            self._remaining[request_id] = lacks
