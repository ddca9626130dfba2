"""Micro-batches of an instance with pipeline stages, and the order of their turns.

An instance with p stages has p micro-batches. They take turns to begin a step. A micro-batch has at most one step under
way, and results come in the order in which steps began.
"""

from collections import deque
from typing import Generic

from pdsim.core.decode.running_batch import RequestT, RunningBatch
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.messages import DecodeStep, MicroBatchStep, MixedStep, Step
from pdsim.policy.views import TokenSequence


class LateBatch(RunningBatch[RequestT]):
    """A micro-batch of vLLM. Its ended requests keep their pages until the instance has chosen its next step."""

    def __init__(self, cache: KvCache, wave_requests: float | None) -> None:
        super().__init__(cache, wave_requests)
        self.closing: list[tuple[RequestT, TokenSequence]] = []
        """Ended requests that still hold their pages, each with all its output tokens."""
        self.is_behind = False
        """True: a result of this micro-batch has come since the instance last chose a step."""

    def close(self, request: RequestT, output: TokenSequence) -> None:
        self.closing.append((request, output))

    def close_ended(self, request_id: int | None = None) -> None:
        """Ends the leases of ended requests: of the one with request_id, or of all if request_id is None. The prefix
        cache, if there is one, keeps the KV.
        """
        closing, self.closing = self.closing, []
        for request, output in closing:
            if request_id in (None, request.request_id):
                super().close(request, output)
            else:
                self.closing.append((request, output))

    def _num_cacheable(self, request: RequestT) -> int:
        """Number of the request's first tokens whose KV the prefix cache may keep. Leaves out the output of a step
        whose result vLLM handles after it has chosen the next step, because a block is cached when its tokens are known
        (0.33.0, v1/core/sched/scheduler.py:2412).
        """
        num_tokens = super()._num_cacheable(request)
        if not self.is_behind:
            return num_tokens
        return max(num_tokens - 1, min(num_tokens, request.num_scheduled_tokens))


class MicroBatches(Generic[RequestT]):
    def __init__(
        self,
        first: RunningBatch[RequestT],
        cache: KvCache,
        wave_requests: float | None,
        num_stages: int,
        make: type[RunningBatch[RequestT]] = RunningBatch,
    ) -> None:
        """make: class of the micro-batches. first: the batch that the instance would have with one stage. If `first` is
        an instance of `make`, it becomes the first micro-batch. All other micro-batches are new, with the settings of
        `first`. num_stages: number of micro-batches. wave_requests: number of requests whose attention runs at the same
        time; None: all requests of a micro-batch.
        """
        self.batches = [first] if isinstance(first, make) else []
        while len(self.batches) < num_stages:
            batch = make(cache, wave_requests)
            batch.counts_ended, batch.caches_unseen = first.counts_ended, first.caches_unseen
            batch.sorts_at_retraction = first.sorts_at_retraction
            self.batches.append(batch)
        for batch in self.batches:
            batch.is_alone = False
        self.turn = 0
        """Index of the micro-batch whose turn it is to begin a step."""
        self._under_way: deque[int] = deque()

    @property
    def is_idle(self) -> bool:
        """True if no step is under way."""
        return not self._under_way

    @property
    def must_wait(self) -> bool:
        """True if the micro-batch whose turn it is has a step under way."""
        return self.turn in self._under_way

    @property
    def num_requests(self) -> int:
        return sum([batch.num_requests for batch in self.batches])

    def requests(self) -> list[RequestT]:
        return [request for batch in self.batches for request in batch.requests()]

    def requests_beside(self, batch: RunningBatch[RequestT]) -> list[RequestT]:
        """Returns the running requests of all micro-batches except `batch`."""
        return [request for other in self.batches if other is not batch for request in other.requests()]

    def of(self, request_id: int) -> RunningBatch[RequestT] | None:
        """Returns the micro-batch of a running request. None: the request does not run."""
        return next((batch for batch in self.batches if batch.has(request_id)), None)

    def skip(self) -> None:
        """Gives the turn to the next micro-batch."""
        self.turn = (self.turn + 1) % len(self.batches)

    def begin(self, step: Step) -> Step:
        """Begins a step of the micro-batch whose turn it is, and gives the turn to the next micro-batch. Returns the
        step to execute: a prefill step unchanged; a decode step, also that of a mixed step, as a MicroBatchStep, which
        lists all running requests of the micro-batch and has max_steps 1.
        """
        batch = self.batches[self.turn]
        self._under_way.append(self.turn)
        self.skip()
        if isinstance(step, MixedStep):
            return MixedStep(step.prefill, _named(step.decode, batch))
        return _named(step, batch) if isinstance(step, DecodeStep) else step

    def end(self) -> int:
        """Ends the oldest step under way. Returns the index of its micro-batch."""
        return self._under_way.popleft()


def _named(step: DecodeStep, batch: RunningBatch[RequestT]) -> MicroBatchStep:
    sizes = (step.num_requests, step.num_context_tokens, step.num_distinct_tokens)
    return MicroBatchStep(step.step_id, batch.request_ids(), (), *sizes, 1)
