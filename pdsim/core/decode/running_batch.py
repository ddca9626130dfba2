"""The requests that one instance decodes, and the pages that they allocate. One call can advance the
batch by many steps.

A step gives each request one token, so a counter of the batch's steps is enough. A request keeps the length that it had
when it joined. Its phase tells in which steps it needs a new page:

  a request needs a page before step s  <=>  its KV then fills whole pages  <=>  s mod page_size == phase

Law: tests/laws/test_decode_steps.py.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import ceil
from typing import Final, Generic, NamedTuple, TypeVar

from pdsim.core.instance import PolicyError, Request
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.messages import DecodeStep, Result, StepResult, Verified
from pdsim.core.sequence import UnseenOutput
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import PreemptionPolicy
from pdsim.policy.views import DecodeView, TokenSequence

RETRACT_STEPS: Final = 20
"""After a retraction, free pages should last for this number of steps (SGLANG_RETRACT_DECODE_STEPS)."""
FOREVER: Final = 1 << 60
"""A number of steps that is higher than any run's."""
_ROUNDING = 1e-9
"""Tolerance in requests for rounding errors of wave_requests."""


@dataclass(slots=True, kw_only=True)
class RunningRequest(Request):
    """A request in the batch of a decoding instance."""

    max_output_tokens: int
    num_output_tokens: int = 0
    """Number of output tokens. Without drafts, the batch updates it only in `requests` and when the request leaves."""
    counted_at_step: int = 0
    """Number of steps that the batch had run when num_output_tokens was last updated, at first when the request joined.
    """
    output: TokenSequence | None = None
    """Output tokens that the request had at its last retraction; later tokens are not included. None: these tokens are
    unknown, there is no prefix cache, or the request was never retracted.
    """
    unseen: UnseenOutput | None = None
    """The prompt with placeholders for outputs, under which the prefix cache keeps outputs whose tokens the instance
    does not know (EngineRules.caches_unseen). None: the request has not lost its pages, or the rule is off."""
    is_aborted: bool = False
    """True: the client has aborted the request. Its next token is its last."""

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens with KV. The last output token has no KV until the next step computes it."""
        return self.num_prompt_tokens + (self.num_output_tokens - 1 if self.num_output_tokens else 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute again if the KV is lost: prompt and outputs, including the last output token."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def sequence(self) -> TokenSequence:
        if self.unseen is not None:
            return self.unseen
        return self.prompt if self.output is None else self.prompt.then(self.output)


RequestT = TypeVar("RequestT", bound=RunningRequest)


class RunningBatch(Generic[RequestT]):
    def __init__(self, cache: KvCache, wave_requests: float | None = None) -> None:
        """wave_requests: number of requests whose attention the GPU computes at once. None: all requests."""
        self.num_steps = 0
        self.num_requests = 0
        self.num_kv_tokens = 0
        """Sum of the KV tokens of all requests."""
        self.num_written_tokens = 1
        """Number of KV tokens that each request writes in one step."""
        self.num_ahead_tokens = 1
        """Number of tokens beyond its present KV for which each request needs pages before a step."""
        self._cache = cache
        self._page_size = cache.page_size
        self._wave_requests = wave_requests
        self._num_shared_pages = 0
        """Sum over all requests of the prefix cache pages that the request reads."""
        self._num_repeated: int | None = None
        """Number of tokens that each step reads more than once. None: must be counted again, because a request joined
        or left."""
        self._requests: dict[int, RequestT] = {}
        phases: list[dict[int, Lease]] = [{} for _ in range(cache.page_size)]
        self._by_phase = phases * 2
        """Leases by phase and request id, in the order in which requests joined. The list has each phase twice, so that
        the phases of page_size steps are a slice."""
        self._joined: list[int] = []
        """Ids of requests that joined since the last step. `_left` has ids of requests that left without having
        ended."""
        self._left: list[int] = []
        self.ended: list[RequestT] = []
        """Ended requests. SGLang counts these requests as running until it has chosen the next step."""
        self.counts_ended = True
        self.sorts_at_retraction = True
        self.caches_unseen = False
        self.is_alone = True
        """False: other batches read the same prefix cache."""
        self.num_aborted = 0
        """Number of running requests that are aborted."""

    def requests(self) -> list[RequestT]:
        """All requests, in the order in which they joined, with up-to-date lengths."""
        for request in self._requests.values():
            self._update(request)
        return list(self._requests.values())

    def request_ids(self) -> tuple[int, ...]:
        return tuple(self._requests)

    def has(self, request_id: int) -> bool:
        return request_id in self._requests

    def lease(self, request_id: int) -> Lease:
        return self._requests[request_id].lease

    # Coming and going.

    def join(self, request: RequestT) -> None:
        """Adds a request whose KV is complete and whose latest output token is known."""
        request.counted_at_step = self.num_steps
        self._requests[request.request_id] = request
        self._joined.append(request.request_id)
        self.num_requests += 1
        self.num_kv_tokens += request.num_kv_tokens
        self._num_shared_pages += request.lease.num_shared
        self._num_repeated = None
        self._cache.add_reader(request.lease)
        self._by_phase[self._phase(request)][request.request_id] = request.lease

    def end(self, request_id: int, output: TokenSequence) -> RequestT:
        """Removes a request that has produced its last token, and ends its lease. output: all its output tokens."""
        request = self._leave(request_id)
        self.close(request, output)
        if self.counts_ended:
            self.ended.append(request)
        return request

    def close(self, request: RequestT, output: TokenSequence) -> None:
        """Ends the lease of a request that is not in the batch. A prefix cache, if there is one, keeps the KV of prompt
        and outputs, except of the last output token, which has no KV.
        """
        if self._cache.prefix_cache is None:
            self._cache.drop(request.lease)
        else:
            sequence = request.prompt.then(output)
            self._cache.close(request.lease, sequence, self._num_cacheable(request), request.num_prompt_tokens)

    @property
    def num_opening_pages(self) -> int:
        """Number of new pages that the next step needs."""
        return len(self._due(0, 1)) * self._cache.pages_per_growth

    def fits_a_step(self) -> bool:
        """True if there are pages for the next step. Evicts cached pages if too few are free."""
        num_pages = self.num_opening_pages
        self._cache.make_free(num_pages)
        return num_pages <= self._cache.pool.num_free

    def make_room(self, policy: PreemptionPolicy, view: DecodeView, *, keeps_last: bool = False) -> Iterator[RequestT]:
        """Allocates the pages of the next step. While there are too few, retracts a request that `policy` chooses, and
        yields the request before its pages are freed. view: the instance, as the policy sees it. keeps_last: True: the
        last request stays in the batch without new pages. False: it is retracted, too.
        """
        while len(leases := self._due(0, 1)) * self._cache.pages_per_growth > self._cache.num_available_pages:
            if keeps_last and self.num_requests == 1:
                return
            yield from self._give_way(policy, view)
        if self._cache.frees_ahead and self.num_requests:
            self._cache.make_free(self.num_requests)
        if leases:
            self._cache.grow_all(leases, len(leases))

    # Running.

    def step(self, ask_again_steps: int) -> DecodeStep:
        num_context_tokens = self.num_kv_tokens + self.num_requests * self.num_written_tokens
        num_repeated = self._num_repeated
        if num_repeated is None:
            num_repeated = self._num_repeated = self._num_repeated_tokens()
        num_distinct, max_steps = num_context_tokens - num_repeated, min(self._max_steps(), ask_again_steps)
        joined, left = tuple(self._joined), tuple(self._left)
        step = DecodeStep(self.num_steps, joined, left, self.num_requests, num_context_tokens, num_distinct, max_steps)
        if self._joined or self._left:
            self._joined, self._left = [], []
        return step

    def _num_repeated_tokens(self) -> int:
        """Number of cached tokens that attention reads again in a step, although an earlier request of the same wave
        has read them in this step. Requests form waves in the order in which they joined.
        """
        size = self._wave_requests
        if not self.is_alone and (size is None or self.num_requests <= size):
            return self._cache.num_repeated_tokens([request.lease.read_node for request in self._requests.values()])
        num_repeated = self._num_shared_pages * self._page_size - self._cache.num_read_tokens
        if size is None or self.num_requests <= size or not num_repeated:
            return num_repeated
        nodes = [request.lease.read_node for request in self._requests.values()]
        ends = [ceil(wave * size - _ROUNDING) for wave in range(ceil(len(nodes) / size) + 1)]
        return sum([self._cache.num_repeated_tokens(nodes[start:end]) for start, end in pairwise(ends)])

    def advance(self, result: Result) -> None:
        """Counts the steps of a result; several steps may have been simulated at once. Allocates the pages of all these
        steps except the first, whose pages make_room has allocated.
        """
        assert isinstance(result, StepResult)
        num_steps = result.num_steps
        if num_steps > 1:
            self._open_later_pages(num_steps - 1)
        self.num_steps += num_steps
        self.num_kv_tokens += num_steps * self.num_requests

    def _max_steps(self) -> int:
        """Number of steps for which free pages surely last. Every page_size steps, each request needs one page."""
        cache = self._cache
        num_pages = cache.num_available_pages if cache.host is None else cache.num_unblocked_pages
        if cache.frees_ahead and cache.host is not None:
            num_pages = max(0, num_pages - self.num_requests)
        num_pages = max(0, num_pages - self.num_requests * (cache.pages_per_growth - 1))
        return 1 + self._page_size * (num_pages // self.num_requests)

    def _give_way(self, policy: PreemptionPolicy, view: DecodeView) -> Iterator[RequestT]:
        if self._cache.evicts_early:  # SGLang evicts before it tests whether the step fits
            self._cache.make_free(self.num_opening_pages)
        request_id = next(iter(self._requests)) if self.num_requests == 1 else policy.victim(view)
        if request_id not in self._requests:
            raise PolicyError(f"{policy}: chose request {request_id}, which does not run")
        if self.sorts_at_retraction:
            self._sort()
        request = self._take_out(request_id)
        yield request
        self._give_back(request)

    def _give_back(self, request: RequestT) -> None:
        """Frees the pages of a retracted request. If the cache evicts early, then evicts cached pages so that the other
        requests of the batch, and ended requests that SGLang still counts as running, can run for RETRACT_STEPS steps
        (managers/schedule_policy.py, 0.5.12, :1019).
        """
        self._drop(request)
        if self._cache.evicts_early:
            num_others = self.num_requests + len(self.ended)
            self._cache.make_free(-(-num_others * RETRACT_STEPS // self._page_size))

    def _sort(self) -> None:
        """Sorts requests: most outputs first, then shortest prompts first (SGLang's retract_decode)."""
        kept = sorted(self.requests(), key=lambda r: (-r.num_output_tokens, r.num_prompt_tokens))
        self._requests = {request.request_id: request for request in kept}

    def put_last(self, request_ids: Iterable[int]) -> None:
        """Moves these requests to the end of the batch, in the given order."""
        for request_id in request_ids:
            self._requests[request_id] = self._requests.pop(request_id)

    def retract(self, request_id: int) -> RequestT:
        """Removes a running request that gives way to a waiting request of higher priority, and frees its pages."""
        request = self._take_out(request_id)
        self._give_back(request)
        return request

    def abort(self, request_id: int) -> None:
        """Marks a running request as aborted. The request ends with its next token."""
        request = self._requests[request_id]
        self.num_aborted += not request.is_aborted
        request.is_aborted = True

    def take_aborted(self) -> list[RequestT]:
        """Removes and returns aborted requests whose last step has run. These requests still hold their pages."""
        aborted = [request for request in self._requests.values() if request.is_aborted]
        for request in aborted:
            self._take_out(request.request_id)
        if self.counts_ended:
            self.ended += aborted
        return aborted

    def remove(self, request_id: int) -> None:
        """Removes a request that has not ended, and frees its pages."""
        self._drop(self._take_out(request_id))

    def _drop(self, request: RequestT) -> None:
        """Frees the pages of a request that has left the batch. With EngineRules.caches_unseen, the prefix cache keeps
        the KV of the request's outputs, although their tokens are unknown.
        """
        if self.caches_unseen and self._cache.prefix_cache is not None:
            request.unseen = UnseenOutput(request.prompt, request.request_id, request.num_output_tokens)
            self._cache.close(request.lease, request.unseen, self._num_cacheable(request))
        else:
            self._cache.drop(request.lease)

    def _num_cacheable(self, request: RequestT) -> int:
        """Number of the request's first tokens whose KV the prefix cache may keep when the request leaves the batch."""
        return request.num_kv_tokens

    def _take_out(self, request_id: int) -> RequestT:
        if request_id in self._joined:
            self._joined.remove(request_id)
        else:
            self._left.append(request_id)
        return self._leave(request_id)

    def _leave(self, request_id: int) -> RequestT:
        request = self._requests.pop(request_id)
        if request.is_aborted:
            self.num_aborted -= 1
        del self._by_phase[self._phase(request)][request_id]
        self._update(request)
        self.num_requests -= 1
        self.num_kv_tokens -= request.num_kv_tokens
        self._num_shared_pages -= request.lease.num_shared
        self._num_repeated = None
        self._cache.remove_reader(request.lease)
        return request

    def _due(self, skip_steps: int, num_steps: int) -> list[Lease]:
        """Leases that need a page in the steps [skip_steps, skip_steps + num_steps), counted from the next step.
        Ordered by step. num_steps is at most page_size.
        """
        start = (self.num_steps + skip_steps) % self._page_size
        leases: list[Lease] = []
        for due in self._by_phase[start : start + num_steps]:
            for lease in due.values():
                leases.append(lease)  # noqa: PERF402  compiled, a loop is faster than +=
        return leases

    def _open_later_pages(self, num_steps: int) -> None:
        leases = self._due(1, min(num_steps, self._page_size))
        num_rounds, rest = divmod(num_steps, self._page_size)
        num_pages = num_rounds * len(leases) + len(self._due(1, rest)) if num_rounds else len(leases)
        num_ahead = self.num_requests if self._cache.frees_ahead else 0
        num_beside = self.num_requests * (self._cache.pages_per_growth - 1)
        if num_pages + num_ahead + num_beside <= self._cache.pool.num_listed:
            if leases:
                self._cache.grow_all(leases, num_pages)
            return
        for step in range(self.num_steps + 1, self.num_steps + 1 + num_steps):
            self._cache.make_free(num_ahead)
            if due := self._by_phase[step % self._page_size]:
                self._cache.grow_all(list(due.values()), len(due))

    def _phase(self, request: RequestT) -> int:
        """Step number modulo page_size at which a request needs a new page. The phase stays the same while the request
        runs.
        """
        return (request.counted_at_step - request.num_kv_tokens) % self._page_size

    def _update(self, request: RequestT) -> None:
        request.num_output_tokens += self.num_steps - request.counted_at_step
        request.counted_at_step = self.num_steps


class Drafts(NamedTuple):
    """Numbers of tokens per request in one speculative step."""

    num_verified: int
    """Number of tokens that the target model computes per request, including the last output token
    (--speculative-num-draft-tokens)."""
    num_reserved: int
    """Number of tokens per request for which a step needs pages. Draft trees need more tokens than num_verified."""


class SpeculativeBatch(RunningBatch[RequestT]):
    """A batch that verifies draft tokens in each step. Each request holds pages for two steps, because SGLang begins a
    step before it knows how many drafts the previous step accepted.
    """

    def __init__(self, cache: KvCache, drafts: Drafts, wave_requests: float | None = None) -> None:
        super().__init__(cache, wave_requests)
        self.num_written_tokens = drafts.num_verified
        self.num_ahead_tokens = 2 * drafts.num_reserved

    @property
    def num_opening_pages(self) -> int:
        return sum(self._lacking_pages())

    def make_room(self, policy: PreemptionPolicy, view: DecodeView, *, keeps_last: bool = False) -> Iterator[RequestT]:
        while self.num_opening_pages > self._cache.num_available_pages:
            if keeps_last and self.num_requests == 1:
                return
            yield from self._give_way(policy, view)
        for request, num_pages in zip(self._requests.values(), self._lacking_pages(), strict=True):
            self._cache.grow(request.lease, num_pages)

    def advance(self, result: Result) -> None:
        assert isinstance(result, Verified)
        for request, num_tokens in zip(self._requests.values(), result.num_tokens, strict=True):
            request.num_output_tokens += num_tokens
        self.num_steps += 1
        self.num_kv_tokens += sum(result.num_tokens)

    def _lacking_pages(self) -> list[int]:
        """For each request, in batch order: number of further pages that it needs for the next step."""
        return [
            max(0, -(-(request.num_kv_tokens + self.num_ahead_tokens) // self._page_size) - len(request.lease.table))
            for request in self._requests.values()
        ]

    def _max_steps(self) -> int:
        return 1

    def _sort(self) -> None:
        """Does nothing: results of speculative steps (Verified) list requests in batch order, so the order stays."""

    def _phase(self, request: RequestT) -> int:
        """Returns 0: requests need pages at irregular steps, because the number of accepted drafts varies."""
        return 0

    def _update(self, request: RequestT) -> None:
        """Does nothing: each step updates the lengths of all requests."""


def running_batch(cache: KvCache, drafts: Drafts | None, wave_requests: float | None) -> RunningBatch[RequestT]:
    if drafts is None:
        return RunningBatch(cache, wave_requests)
    return SpeculativeBatch(cache, drafts, wave_requests)


class DecodingInstance(Generic[RequestT]):
    """The part of decode and aggregated instances that preemption and admission policies see."""

    cache: KvCache
    batch: RunningBatch[RequestT]

    @property
    def num_available_pages(self) -> int:
        return self.cache.num_available_pages

    @property
    def num_ahead_tokens(self) -> int:
        return self.batch.num_ahead_tokens

    @property
    def resume_unit_tokens(self) -> int:
        return self.cache.page_size

    @property
    def num_running_tokens(self) -> int:
        tokens = self.batch.num_kv_tokens + self.batch.num_requests
        return tokens + sum([request.num_kv_tokens + 1 for request in self.batch.ended])

    @property
    def running(self) -> list[RequestT]:
        return [*self.batch.requests(), *self.batch.ended]
