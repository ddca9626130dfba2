"""Built-in prefill policies: the order in which prompts are computed, and how much KV is sent after each chunk."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill, SendingPrefill

_MOST_RANKED = 128
"""Longest queue that lpm sorts. In longer queues SGLang's lpm falls back to fcfs, to bound the tree walks."""
_FEW_CACHED_TOKENS = 32
"""Maximum cached tokens of a prompt that waits for an earlier prompt with the same beginning
(IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD)."""
_ALIKE_TOKENS = 32
"""Minimum shared tokens of prompts with the same beginning (IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD)."""


@dataclass
class FirstComeFirstServed:
    """Prompts in the order in which decode granted them pages, or of arrival (SGLang's fcfs)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(request.request_id) for request in view.waiting)


@dataclass
class HighestPriorityFirst:
    """Highest priority first, and first come, first served among equals (SGLang's priority scheduling)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(r.request_id) for r in sorted(view.waiting, key=lambda request: -request.priority))


@dataclass
class ShortestPromptFirst:
    """Short prompts first. A prompt that has waited longer than patience precedes all others."""

    patience_ns: int = 10_000_000_000
    """Time after its arrival from which a prompt precedes shorter ones."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            overdue = view.now_ns - request.arrival_ns > self.patience_ns
            return (not overdue, request.num_prompt_tokens, request.request_id)

        return (Pick(request.request_id) for request in sorted(view.waiting, key=rank))


@dataclass
class LongestPrefixFirst:
    """Longest cached prefix first (SGLang's lpm). Prompts that may soon find a prefix in the cache come last.

    Of waiting prompts with the same beginning and hardly any cached tokens, the first in the queue goes ahead, and
    caches what the others share. Queues of more than 128 prompts are not sorted.
    """

    def select(self, view: PrefillView) -> Iterable[Pick]:
        waiting = list(view.waiting)
        if len(waiting) <= _MOST_RANKED:
            ranks = self._ranks(waiting, view)
            waiting.sort(key=lambda request: ranks[request.request_id])
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
    """Sends each chunk as soon as it is computed, so that only the last chunk's transfer is exposed (SGLang's
    default).
    """

    cached_prefix_first: bool = True
    """True: cached pages are sent before the first forward, not with the first chunk
    (SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX)."""

    def send_until(self, request: SendingPrefill) -> int:
        if request.num_computed_tokens == request.num_cached_tokens and not self.cached_prefix_first:
            return request.num_sent_tokens
        return request.num_computed_tokens


@dataclass
class WholePrompt:
    """Sends all KV after the last chunk: a single transfer, which is fully exposed."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_sent_tokens
