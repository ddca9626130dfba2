"""Fills steps by vLLM's token budget: what running requests leave of it goes to prompts.

Prompts that were begun go on in their order; then those that wait begin. A prompt may take all that is left, or a limit
of its own, so that several are partly computed. Pages for the rest of each are reserved as it begins.
"""

from pdsim.core.forward_builder import Budget, ForwardBuilder, PromptT
from pdsim.core.kv_cache import KvCache
from pdsim.core.messages import PrefillChunk
from pdsim.policy.protocols import PrefillPolicy

_UNLIMITED = 1 << 62


class VllmForwardBuilder(ForwardBuilder[PromptT]):
    def __init__(
        self, *, cache: KvCache, policy: PrefillPolicy, budget_tokens: int | None, prompt_tokens: int | None
    ) -> None:
        """budget_tokens: of one step (max_num_batched_tokens), None for any number.

        prompt_tokens: of one prompt in a step (long_prefill_token_threshold), None for as many.
        """
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget_tokens, max_prefill_tokens=_UNLIMITED)
        self.spare_tokens = 0
        self._prompt_tokens = _UNLIMITED if prompt_tokens is None else prompt_tokens
        self._partials: dict[int, PromptT] = {}
        """Begun prompts with tokens that no step has yet, in the order in which they began."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def last_partial(self) -> PromptT | None:
        return next(reversed(self._partials.values()), None)

    def stop(self, request: PromptT) -> None:
        self._partials.pop(request.request_id, None)

    def _is_full(self, budget: Budget) -> bool:
        return budget.is_spent

    def _go_on(self, budget: Budget, chunks: list[PrefillChunk]) -> None:
        for partial in list(self._partials.values()):
            limit = min(budget.chunk_tokens, self._room_of(partial, budget))
            if not self._compute(partial, limit, budget, chunks):
                budget.reserved_tokens += partial.num_tokens - partial.num_scheduled_tokens + self.page_size

    def _compute(self, request: PromptT, limit: int, budget: Budget, chunks: list[PrefillChunk]) -> bool:
        """Add a chunk of at most limit tokens, if any, and open its pages before the next prompt is looked at."""
        num_left = request.num_tokens - request.num_scheduled_tokens
        num_tokens = min(num_left, limit, self._prompt_tokens)
        if num_tokens <= 0:
            return False
        is_last = num_tokens == num_left
        if is_last:
            self._partials.pop(request.request_id, None)
        else:
            self._partials[request.request_id] = request
        chunks.append(PrefillChunk(request.request_id, request.num_scheduled_tokens, num_tokens, is_last))
        request.num_scheduled_tokens += num_tokens
        self.begun[request.request_id] = request
        budget.chunk_tokens -= num_tokens
        budget.reserved_tokens += self.page_size + (request.num_growth_tokens if is_last else num_left - num_tokens)
        num_pages = -(-request.num_scheduled_tokens // self.page_size) - len(request.lease.table)
        self._cache.grow(request.lease, num_pages)
        return True

    def _open_pages(self, chunks: list[PrefillChunk]) -> None:
        """They are open."""
