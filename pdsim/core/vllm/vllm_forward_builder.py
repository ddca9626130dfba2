"""Fills steps as vLLM's scheduler does: prompts get the part of a token budget that running requests leave."""

from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.messages import PrefillChunk
from pdsim.core.prefill.forward_builder import UNLIMITED, Forward, ForwardBuilder, RequestT
from pdsim.policy.protocols import PrefillPolicy


class VllmForwardBuilder(ForwardBuilder[RequestT]):
    """Continues begun prompts in their order, then begins waiting prompts.

    A prompt may take all that is left of the budget, up to a limit of its own, so several prompts may be partly
    computed. A prompt is begun if all of it fits, but no pages are kept for its rest. KV of a step can be shared as
    soon as the step is chosen, also by prompts of the same step.
    """

    def __init__(
        self, *, cache: KvCache, policy: PrefillPolicy, budget_tokens: int | None, prompt_tokens: int | None
    ) -> None:
        """budget_tokens: of one step (max_num_batched_tokens); None: no limit.

        prompt_tokens: of one prompt in a step (long_prefill_token_threshold); None: no limit.
        """
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget_tokens, max_prefill_tokens=UNLIMITED)
        self.spare_tokens = 0
        self._prompt_tokens = UNLIMITED if prompt_tokens is None else prompt_tokens
        self._step_prompt_tokens = self._prompt_tokens
        """Maximum tokens of one prompt in the step that is being filled."""
        self._partials: dict[int, RequestT] = {}
        """Begun prompts that have tokens in no step yet, in the order in which they began."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def partials(self) -> list[RequestT]:
        """Prompts that the next step continues, in their order."""
        return list(self._partials.values())

    def stop(self, request: RequestT) -> None:
        self._partials.pop(request.request_id, None)

    def give_up(self, request: RequestT) -> None:
        """Drops a begun prompt, which loses its pages. Its tokens in earlier steps stay cached."""
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
        """num_decode_tokens: tokens of the step for running requests, one each."""
        self._step_prompt_tokens = self._limit_beside(num_decode_tokens)
        return super().fill(now_ns, num_slots, reserved_tokens=reserved_tokens, num_decode_tokens=num_decode_tokens)

    def complete(self, chunk: PrefillChunk) -> RequestT:
        """Counts a computed chunk. Its whole pages are cached already."""
        request = self.begun.pop(chunk.request_id) if chunk.is_last else self.begun[chunk.request_id]
        request.num_computed_tokens += chunk.num_tokens
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
        """True if running requests and begun prompts leave a part of the next step's budget."""
        return self._goes_on(num_decode_tokens)[1] > 0

    def _goes_on(self, num_decode_tokens: int) -> tuple[int, int]:
        """Number of pages that begun prompts need in the next step, and of budget tokens that they leave."""
        num_pages, num_left = 0, self._chunk_tokens - num_decode_tokens
        limit = self._limit_beside(num_decode_tokens)
        for partial in self._partials.values():
            num_tokens = min(partial.num_tokens - partial.num_scheduled_tokens, num_left, limit)
            if num_tokens <= 0:
                break
            num_left -= num_tokens
            num_pages += self._num_lacking_pages(partial, num_tokens)
        return num_pages, num_left

    def _num_lacking_pages(self, request: RequestT, num_tokens: int) -> int:
        """Number of further pages that num_tokens tokens of a request need."""
        return -(-(request.num_scheduled_tokens + num_tokens) // self.page_size) - len(request.lease.table)

    def _limit_beside(self, num_running: int) -> int:
        """Maximum tokens of one prompt in a step. A request that is alone has no such limit."""
        is_alone = num_running + len(self.begun) + len(self._waiting) <= 1
        return UNLIMITED if is_alone else self._prompt_tokens

    def _is_full(self, forward: Forward) -> bool:
        return forward.is_spent

    def _go_on(self, forward: Forward) -> None:
        for partial in self.partials:
            self._compute(partial, forward.chunk_tokens, forward)

    def _fits(self, request: RequestT, num_new: int, forward: Forward) -> bool:
        return -(-num_new // self.page_size) <= self.num_available_pages

    def _room_tokens(self, forward: Forward) -> int:
        """No limit: a prompt that does not fit ends the choice, and has no other effect."""
        return UNLIMITED

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Adds a chunk of at most limit tokens, if any, and allocates its pages before the next prompt is tried."""
        num_left = request.num_tokens - request.num_scheduled_tokens
        num_tokens = min(num_left, limit, self._step_prompt_tokens)
        num_pages = self._num_lacking_pages(request, num_tokens)
        if num_tokens <= 0 or num_pages > self.num_available_pages:
            return False
        is_last = num_tokens == num_left
        if is_last:
            self.stop(request)
        else:
            self._partials[request.request_id] = request
        forward.chunks.append(PrefillChunk(request.request_id, request.num_scheduled_tokens, num_tokens, is_last))
        forward.chunk_tokens -= num_tokens
        self._cache.grow(request.lease, num_pages)
        request.num_scheduled_tokens += num_tokens
        self.begun[request.request_id] = request
        self._share(request, request.num_scheduled_tokens, is_chunk=not is_last)
        return True

    def _open_pages(self, chunks: list[PrefillChunk]) -> None:
        """Does nothing: the pages are allocated already."""
