"""Built-in prefill policies: the order in which prompts are computed, and how much KV is sent after each chunk."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill, SendingPrefill

_MOST_RANKED = 128
"""SGLang's lpm falls back to fcfs in longer queues, to bound the tree walks."""


@dataclass
class FirstComeFirstServed:
    """Keeps the order in which decode granted them (SGLang's fcfs)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(request.request_id) for request in view.waiting)


@dataclass
class HighestPriorityFirst:
    """Higher priorities first, each in the order in which decode granted them (SGLang's priority scheduling, fcfs)."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        return (Pick(r.request_id) for r in sorted(view.waiting, key=lambda request: -request.priority))


@dataclass
class ShortestPromptFirst:
    """Short prompts first, but nobody waits longer than patience_ns after its arrival."""

    patience_ns: int = 10_000_000_000

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            overdue = view.now_ns - request.arrival_ns > self.patience_ns
            return (not overdue, request.num_prompt_tokens, request.request_id)

        return (Pick(request.request_id) for request in sorted(view.waiting, key=rank))


@dataclass
class LongestPrefixFirst:
    """The prompt with most cached tokens first (SGLang's lpm), first come first served in long queues."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> int:
            return -view.num_cached_tokens(request)

        few = len(view.waiting) <= _MOST_RANKED
        return (Pick(request.request_id) for request in (sorted(view.waiting, key=rank) if few else view.waiting))


@dataclass
class EveryChunk:
    """Send each chunk as soon as it is computed, so that only the last one is exposed (SGLang's default)."""

    cached_prefix_first: bool = True
    """Send what the prefix cache holds before the first forward (SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX)."""

    def send_until(self, request: SendingPrefill) -> int:
        if request.num_computed_tokens == request.num_cached_tokens and not self.cached_prefix_first:
            return request.num_sent_tokens
        return request.num_computed_tokens


@dataclass
class WholePrompt:
    """Send everything after the last chunk: one transfer, wholly exposed."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_sent_tokens
