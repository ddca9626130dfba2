"""Fills steps as vLLM's scheduler does: prompts get the part of a token budget that running requests leave."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdsim.core.instance import Request
from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.offload_cache import MUST_WAIT
from pdsim.core.messages import PrefillChunk
from pdsim.core.prefill.forward_builder import UNLIMITED, Forward, ForwardBuilder, RequestT
from pdsim.policy.prefill import FirstComeFirstServed, HighestPriorityFirst, LongestOutputFirst
from pdsim.policy.protocols import HoldUntil, Pick, PrefillPolicy

_FIXED_ORDERS = (FirstComeFirstServed, HighestPriorityFirst, LongestOutputFirst)


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Limits of the tokens of one step."""

    step_tokens: int | None
    """Maximum tokens of all requests in a step (max_num_batched_tokens). Running requests come first. None: no
    limit."""
    prompt_tokens: int | None = None
    """Maximum tokens of one prompt in a step (long_prefill_token_threshold). None: the rest of the step's budget."""
    has_fair_shares: bool = False
    """True: prompt_tokens is at least step_tokens divided by the number of requests
    (long_prefill_token_threshold_adaptive; vLLM 0.33.0, v1/core/sched/scheduler.py:764)."""
    prefill_interval_steps: int = 1
    """While requests decode, a prompt is computed in one of so many steps."""


class VllmForwardBuilder(ForwardBuilder[RequestT]):
    """Continues begun prompts in their order, then begins waiting prompts.

    A prompt may take all that is left of the budget, up to a limit of its own, so several prompts may be partly
    computed. A prompt is begun if all of it fits, but no pages are kept for its rest. KV of a step can be shared as
    soon as the step is chosen, also by prompts of the same step.

    A prompt that continues in host memory gets pages for what is there, and none of its tokens is computed until the
    load has ended. It then goes before prompts that wait. Meanwhile it takes no slot, and cannot be preempted. With
    LMCache such a prompt is begun in the step that waits for its load.
    """

    def __init__(self, *, cache: KvCache, policy: PrefillPolicy, budget: TokenBudget) -> None:
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget.step_tokens, max_prefill_tokens=UNLIMITED)
        self.spare_tokens = 0
        self.is_held = False
        """True: the step that is being chosen computes no prompt."""
        self._prompt_tokens = UNLIMITED if budget.prompt_tokens is None else budget.prompt_tokens
        self._has_fair_shares = budget.has_fair_shares
        self._step_prompt_tokens = self._prompt_tokens
        """Maximum tokens of one prompt in the step that is being filled."""
        self._partials: dict[int, RequestT] = {}
        """Begun prompts that have tokens in no step yet, in the order in which they began."""
        self._loading: dict[int, RequestT] = {}
        self._loaded: dict[int, RequestT] = {}
        """Prompts whose load has ended, and that no step has taken yet."""
        self._dropped: dict[int, RequestT] = {}
        """Prompts that were given up while they were loaded: their pages are still written."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def partials(self) -> list[RequestT]:
        """Prompts that the next step continues, in their order."""
        return list(self._partials.values())

    @property
    def has_work(self) -> bool:
        return bool(self._partials) or bool(self._waiting) or bool(self._loaded)

    @property
    def unbegun(self) -> list[RequestT]:
        return [*self._loaded.values(), *self._loading.values(), *self._waiting.values()]

    @property
    def num_unbegun(self) -> int:
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def keeps_order(self) -> bool:
        """True: decode steps alone do not change which prompt is next. Others must be asked in each step."""
        return isinstance(self._policy, _FIXED_ORDERS)

    @property
    def num_ready(self) -> int:
        """Number of prompts that could be begun now: those that wait for nothing but their turn."""
        return len(self._waiting) + len(self._loaded)

    @property
    def loads(self) -> list[RequestT]:
        """Prompts that hold pages for KV from host memory, and of which no forward has a token yet."""
        return [*self._loading.values(), *self._loaded.values(), *self._dropped.values()]

    def withdraw(self, request_id: int) -> RequestT | None:
        if loading := self._loading.pop(request_id, None):
            self._dropped[request_id] = loading
            return loading
        if loaded := self._loaded.pop(request_id, None):
            self._cache.drop(loaded.lease)
            return loaded
        return super().withdraw(request_id)

    def on_loaded(self, request_id: int) -> None:
        """Handles the end of a prompt's load from host memory: its KV is cached, and the prompt becomes the last of the
        begun prompts.
        """
        assert self._cache.offload is not None
        self._cache.offload.on_loaded(request_id)
        if dropped := self._dropped.pop(request_id, None):
            self._cache.drop(dropped.lease)
            return
        request = self._loaded[request_id] = self._loading.pop(request_id)
        self._share(request, len(request.lease.table) * self.page_size, is_chunk=True)

    def stop(self, request: RequestT, *, caches: bool = False) -> None:
        self._partials.pop(request.request_id, None)

    def give_up(self, request: RequestT) -> None:
        """Drops a begun prompt, which loses its pages. Its tokens that earlier steps computed stay cached."""
        self.stop(request)
        del self.begun[request.request_id]
        self._cache.close(request.lease, request.sequence, 0)

    def preempt(self, request: RequestT) -> None:
        """Preempts a begun prompt: it loses its pages, and waits first in the queue."""
        self.give_up(request)
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = 0
        self.enqueue(request, first=True)

    def fill(
        self, now_ns: int, num_slots: int | None, *, reserved_tokens: float = 0, num_decode_tokens: int = 0
    ) -> Forward:
        """Fills the next step with prompts. num_decode_tokens: tokens of the step for running requests, one each."""
        self._step_prompt_tokens = self._limit_beside(num_decode_tokens)
        begun = set(self._partials)
        forward = super().fill(now_ns, num_slots, reserved_tokens=reserved_tokens, num_decode_tokens=num_decode_tokens)
        if self._cache.chunks is not None:
            self._save_chunks(self._cache.chunks, forward.chunks, begun)
        return forward

    def _save_chunks(self, host: ChunkCache, chunks: list[PrefillChunk], begun: set[int]) -> None:
        """Saves what a step completes of prompts without outputs, those that begin in the step first.

        A prompt that begins also saves what the GPU has and host memory lacks (LMCache 0.5.6, vllm_v1_adapter.py:204).
        """
        saves = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.request_id in begun):
            request, num_before = self.begun[chunk.request_id], chunk.num_context_tokens
            if request.num_tokens == request.num_prompt_tokens:
                begins = chunk.request_id not in begun
                found = (
                    host.num_chunks(request.prompt, request.num_tokens) if begins else num_before // host.chunk_tokens
                )
                saves.append((request, found, num_before + chunk.num_tokens))
        for request, found, num_tokens in saves:
            host.save(request.prompt, found, num_tokens, request.lease.table)

    def complete(self, chunk: PrefillChunk) -> RequestT:
        """Counts a computed chunk. Its whole pages are cached already; they are stored in host memory, if there
        is any.
        """
        request = self.begun.pop(chunk.request_id) if chunk.is_last else self.begun[chunk.request_id]
        request.num_computed_tokens += chunk.num_tokens
        if self._cache.offload is not None:
            num_prompt, lease = min(request.num_computed_tokens, request.num_prompt_tokens), request.lease
            states = [one for one in self._cache.kept_states(lease) if one[0] <= num_prompt]
            self._cache.offload.store(request.request_id, request.prompt, num_prompt, lease.table, states)
        self._cache.end_chunk(request.lease)
        return request

    def _share(self, request: RequestT, num_tokens: int, *, is_chunk: bool) -> None:
        """Caches prompt and outputs so far. Other requests may share the prompt, but not the outputs."""
        num_prompt = min(num_tokens, request.num_prompt_tokens)
        self._cache.checkpoint(request.lease, request.prompt, num_prompt, is_chunk=is_chunk)
        if num_tokens > num_prompt:
            super()._share(request, num_tokens, is_chunk=is_chunk)

    def num_opening_pages(self, num_decode_tokens: int) -> int:
        """Number of pages that begun prompts need in the next step."""
        return self._goes_on(num_decode_tokens)[0]

    def leaves_tokens(self, num_decode_tokens: int) -> bool:
        """True if running requests and begun prompts leave a part of the next step's token budget."""
        return self._goes_on(num_decode_tokens)[1] > 0

    def _goes_on(self, num_decode_tokens: int) -> tuple[int, int]:
        """Number of pages that begun prompts need in the next step, and of budget tokens that they leave."""
        num_pages, num_left = 0, self._chunk_tokens - num_decode_tokens
        if self.is_held:
            return num_pages, num_left
        limit = self._limit_beside(num_decode_tokens)
        for partial in self._partials.values():
            num_tokens = self._num_chunk_tokens(partial, min(num_left, limit))
            if num_tokens <= 0:
                break
            num_left -= num_tokens
            num_pages += self._num_lacking_pages(partial, num_tokens)
        return num_pages, num_left

    def _num_chunk_tokens(self, request: RequestT, limit: int) -> int:
        """Number of tokens of the next chunk of a request. limit: tokens that the step has for it."""
        start, num_left = request.num_scheduled_tokens, request.num_tokens - request.num_scheduled_tokens
        if limit <= 0:
            return 0
        most = min(self._chunk_tokens, self._prompt_tokens)
        return self._cache.chunk_tokens(request.lease, start, min(num_left, limit), _prefill_end(request), most)

    def _num_lacking_pages(self, request: RequestT, num_tokens: int) -> int:
        """Number of further pages that num_tokens tokens of a request need."""
        start = request.num_scheduled_tokens
        num_pages = -(-(start + num_tokens) // self.page_size) - len(request.lease.table)
        return num_pages + self._cache.num_state_pages(start, start + num_tokens, _prefill_end(request))

    def _limit_beside(self, num_running: int) -> int:
        """Maximum tokens of one prompt in a step. A request that is alone has no such limit."""
        if self._prompt_tokens == UNLIMITED:
            return UNLIMITED
        num_requests = num_running + len(self.begun) + self.num_unbegun
        if num_requests <= 1:
            return UNLIMITED
        share = self._chunk_tokens // num_requests if self._has_fair_shares else 0
        return max(self._prompt_tokens, share)

    def _is_full(self, forward: Forward) -> bool:
        return forward.is_spent

    def _go_on(self, forward: Forward) -> None:
        for partial in self.partials:
            self._compute(partial, forward.chunk_tokens, forward)
        for loaded in list(self._loaded.values()):
            if forward.num_slots <= 0 or not self._compute(loaded, forward.chunk_tokens, forward):
                break
            forward.num_slots -= 1
            del self._loaded[loaded.request_id]

    def _begin(self, forward: Forward, picks: Iterable[Pick] | HoldUntil) -> None:
        super()._begin(forward, picks)
        for request_id in self._loading:
            self._waiting.pop(request_id, None)

    def _take(self, pick: Pick, forward: Forward) -> str | None:
        """Begins a prompt, or its load if it continues in host memory."""
        if not self._cache.makes_room_for_states():
            return "pages"
        request, offload = self._waiting.get(pick.request_id), self._cache.offload
        if request is None or offload is None or forward.num_slots <= 0 or pick.request_id in self.begun:
            return super()._take(pick, forward)
        lease = self._cache.open_for_load(request.sequence, request.num_tokens - 1)
        num_pages = offload.num_loadable_pages(
            request.request_id, request.sequence, lease.num_shared, request.num_tokens
        )
        if num_pages <= 0:
            self._cache.drop(lease)
            return None if num_pages == MUST_WAIT else super()._take(pick, forward)
        start = (lease.num_shared + num_pages) * self.page_size
        num_whole = -(-request.num_tokens // self.page_size) - lease.num_shared
        num_whole += self._cache.pages_per_growth - 1
        num_whole += self._cache.num_state_pages(start, request.num_tokens, _prefill_end(request))
        if num_whole > self.num_available_pages - self._num_promised_pages:
            self._cache.drop(lease)
            return "pages"
        self._cache.grow(lease, num_pages)
        pages = [*lease.table[lease.num_shared :], *self._cache.take_state(lease)]
        offload.load(request.request_id, request.sequence, lease.num_shared, pages)
        num_tokens = min(
            len(lease.table) * self.page_size, request.num_tokens - 1
        )  # the last one gives the first token
        request.lease = lease
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = num_tokens
        self._loading[request.request_id] = request
        return None

    @property
    def _num_promised_pages(self) -> int:
        """Number of pages that begun prompts and loads still need. A load begins beside these only."""
        promised = [*self._partials.values(), *self._loading.values(), *self._loaded.values()]
        return sum([-(-one.num_tokens // self.page_size) - len(one.lease.table) for one in promised])

    def _fits(self, request: RequestT, num_new: int, forward: Forward, lease: Lease) -> bool:
        if self._cache.waits(lease):
            return False
        num_tokens = request.num_tokens
        num_pages = self._cache.num_state_pages(num_tokens - num_new, num_tokens, _prefill_end(request))
        return -(-num_new // self.page_size) + num_pages <= self.num_available_pages

    def _room_tokens(self, forward: Forward) -> int:
        """No limit: a prompt that does not fit ends the choice, and has no other effect."""
        return UNLIMITED

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Adds a chunk of at most limit tokens, if any, and allocates its pages before the next prompt is tried."""
        start = request.num_scheduled_tokens
        num_tokens = self._num_chunk_tokens(request, min(limit, self._step_prompt_tokens))
        if num_tokens <= 0 or self._num_lacking_pages(request, num_tokens) > self.num_available_pages:
            return False
        end = start + num_tokens
        is_last = end == request.num_tokens
        if is_last:
            self.stop(request)
        else:
            self._partials[request.request_id] = request
        forward.chunks.append(PrefillChunk(request.request_id, start, num_tokens, is_last))
        forward.chunk_tokens -= num_tokens
        self._cache.grow(request.lease, -(-end // self.page_size) - len(request.lease.table))
        request.num_scheduled_tokens = end
        self.begun[request.request_id] = request
        self._share(request, end, is_chunk=not is_last)
        self._cache.begin_chunk(request.lease, request.prompt, start, end, _prefill_end(request))
        return True

    def _open_pages(self, chunks: list[PrefillChunk]) -> None:
        """Does nothing: the pages are allocated already."""


def _prefill_end(request: Request) -> int:
    """Number of tokens that are computed as a prompt: all but the last output of a preempted request."""
    return max(request.num_prompt_tokens, request.num_tokens - 1)
