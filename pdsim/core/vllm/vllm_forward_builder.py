"""Fills steps as vLLM's scheduler does: what running requests leave of a token budget goes to prompts."""

from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.messages import PrefillChunk
from pdsim.core.prefill.forward_builder import UNLIMITED, Forward, ForwardBuilder, RequestT
from pdsim.policy.protocols import PrefillPolicy


class VllmForwardBuilder(ForwardBuilder[RequestT]):
    """Prompts that were begun go on in their order; then those that wait begin.

    A prompt may take all that is left of the budget, or a limit of its own, so that several are partly computed. It
    begins if all of it fits, but no page is kept for its rest. What a step computes is shared as soon as the step is
    chosen, by prompts of the same step, too.
    """

    def __init__(
        self, *, cache: KvCache, policy: PrefillPolicy, budget_tokens: int | None, prompt_tokens: int | None
    ) -> None:
        """budget_tokens: of one step (max_num_batched_tokens), None for any number.

        prompt_tokens: of one prompt in a step (long_prefill_token_threshold), None for as many.
        """
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget_tokens, max_prefill_tokens=UNLIMITED)
        self.spare_tokens = 0
        self._prompt_tokens = UNLIMITED if prompt_tokens is None else prompt_tokens
        self._step_prompt_tokens = self._prompt_tokens
        """The same for the step that is being filled."""
        self._partials: dict[int, RequestT] = {}
        """Begun prompts with tokens that no step has yet, in the order in which they began."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def partials(self) -> list[RequestT]:
        """Prompts that the next step goes on with, in their order."""
        return list(self._partials.values())

    def stop(self, request: RequestT) -> None:
        self._partials.pop(request.request_id, None)

    def give_up(self, request: RequestT) -> None:
        """A begun prompt loses its pages. What steps have of it stays cached."""
        self.stop(request)
        del self.begun[request.request_id]
        self._cache.close(request.lease, request.sequence, 0)

    def preempt(self, request: RequestT) -> None:
        """A begun prompt loses its pages, and waits first."""
        self.give_up(request)
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = 0
        self.enqueue(request, first=True)

    def fill(
        self, now_ns: int, num_slots: int | None, *, reserved_tokens: float = 0, num_decode_tokens: int = 0
    ) -> Forward:
        """num_decode_tokens: of the step, one for each request that runs."""
        self._step_prompt_tokens = self._limit_beside(num_decode_tokens)
        return super().fill(now_ns, num_slots, reserved_tokens=reserved_tokens, num_decode_tokens=num_decode_tokens)

    def complete(self, chunk: PrefillChunk) -> RequestT:
        """A chunk was computed; what it filled is shared already."""
        request = self.begun.pop(chunk.request_id) if chunk.is_last else self.begun[chunk.request_id]
        request.num_computed_tokens += chunk.num_tokens
        return request

    def _share(self, request: RequestT, num_tokens: int, *, is_chunk: bool) -> None:
        """Others know the prompt, and nobody the outputs behind it."""
        num_prompt = min(num_tokens, request.num_prompt_tokens)
        self._cache.checkpoint(request.lease, request.prompt, num_prompt, is_chunk=is_chunk)
        if num_tokens > num_prompt:
            super()._share(request, num_tokens, is_chunk=is_chunk)

    def num_opening_pages(self, num_decode_tokens: int) -> int:
        """Pages that begun prompts open in the next step."""
        return self._goes_on(num_decode_tokens)[0]

    def leaves_tokens(self, num_decode_tokens: int) -> bool:
        """True if requests that run and begun prompts leave something of the next step's budget."""
        return self._goes_on(num_decode_tokens)[1] > 0

    def _goes_on(self, num_decode_tokens: int) -> tuple[int, int]:
        """Pages that begun prompts open in the next step, and tokens that they leave."""
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
        """Pages that so many further tokens need."""
        return -(-(request.num_scheduled_tokens + num_tokens) // self.page_size) - len(request.lease.table)

    def _limit_beside(self, num_running: int) -> int:
        """Tokens of one prompt in a step: a request that is alone keeps nobody waiting."""
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
        """A prompt that does not fit ends the choice, and nothing else."""
        return UNLIMITED

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Add a chunk of at most limit tokens, if any, and open its pages before the next prompt is looked at."""
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
        """They are open."""
