"""Built-in prefill policies: the order in which prompts are computed, and how much KV is sent after each chunk."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill, SendingPrefill

_MOST_RANKED = 128
"""SGLang's lpm falls back to fcfs in longer queues, to bound the tree walks."""
_FEW_CACHED_TOKENS = 32
"""With no more cached, a prompt waits for one before it that begins alike (IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD)."""
_ALIKE_TOKENS = 32
"""Prompts that share so many tokens begin alike (IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD)."""


@dataclass
class FirstComeFirstServed:
    """The order of grants, or of arrival (SGLang's fcfs)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(request.request_id) for request in view.waiting)


@dataclass
class HighestPriorityFirst:
    """Highest priority first, then as fcfs (SGLang's priority scheduling)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(r.request_id) for r in sorted(view.waiting, key=lambda request: -request.priority))


@dataclass
class ShortestPromptFirst:
    """Short prompts first; one that has waited longer than its patience goes before all."""

    patience_ns: int = 10_000_000_000
    """Maximum time after its arrival for which a prompt may be passed over."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            overdue = view.now_ns - request.arrival_ns > self.patience_ns
            return (not overdue, request.num_prompt_tokens, request.request_id)

        return (Pick(request.request_id) for request in sorted(view.waiting, key=rank))


@dataclass
class LongestPrefixFirst:
    """The longest cached prefix first (SGLang's lpm), and prompts that may soon find one last.

    Of waiting prompts that begin alike and have next to nothing cached, the first in the queue goes ahead, and caches
    what the others share. The order stays for the next choice. More than 128 prompts are not sorted.
    """

    _order: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Places in the queue as it was last sorted."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        last = len(self._order)
        waiting = sorted(view.waiting, key=lambda request: self._order.get(request.request_id, last))
        if len(waiting) <= _MOST_RANKED:
            ranks = self._ranks(waiting, view)
            waiting.sort(key=lambda request: ranks[request.request_id])
        self._order = {request.request_id: place for place, request in enumerate(waiting)}
        return [Pick(request.request_id) for request in waiting]

    @staticmethod
    def _ranks(waiting: list[QueuedPrefill], view: PrefillView) -> dict[int, int]:
        ranks: dict[int, int] = {}
        first: set[Hashable] = set()
        for request in waiting:
            num_cached = view.use_cached_tokens(request)
            ranks[request.request_id] = -num_cached
            if num_cached <= _FEW_CACHED_TOKENS and request.num_prompt_tokens >= _ALIKE_TOKENS:
                beginning = request.prompt.page_key(0, _ALIKE_TOKENS)
                if beginning in first:
                    ranks[request.request_id] = 1
                first.add(beginning)
        return ranks


@dataclass
class EveryChunk:
    """Send each chunk as soon as it is computed, so that only the last one is exposed (SGLang's default)."""

    cached_prefix_first: bool = True
    """Send cached pages before the first forward, not with the first chunk
    (SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX)."""

    def send_until(self, request: SendingPrefill) -> int:
        if request.num_computed_tokens == request.num_cached_tokens and not self.cached_prefix_first:
            return request.num_sent_tokens
        return request.num_computed_tokens


@dataclass
class WholePrompt:
    """Send everything after the last chunk: one transfer, wholly exposed."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_sent_tokens
