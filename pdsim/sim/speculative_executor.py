"""Which drafted tokens are accepted, in place of a draft model and the model that verifies it."""

from collections.abc import Callable, Iterator, Mapping

from pdsim.core.messages import DecodeStep, PrefillStep, StepResult, Verified
from pdsim.core.sequence import Spans
from pdsim.sim.executor import Executor


class SpeculativeExecutor(Executor):
    """Each step gives each sequence the next number of its stream, as long as it lacks so many tokens."""

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
