"""Built-in prefill policies: the order in which prompts are computed, and how much KV is sent after each chunk."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdsim.policy.protocols import Pick
from pdsim.policy.views import PrefillView, QueuedPrefill, SendingPrefill

_MOST_RANKED = 128
"""SGLang's lpm falls back to fcfs in longer queues, to bound the tree walks."""


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
    """Longest time after its arrival that a prompt is passed over."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> tuple[bool, int, int]:
            overdue = view.now_ns - request.arrival_ns > self.patience_ns
            return (not overdue, request.num_prompt_tokens, request.request_id)

        return (Pick(request.request_id) for request in sorted(view.waiting, key=rank))


@dataclass
class LongestPrefixFirst:
    """The longest cached prefix first (SGLang's lpm); more than 128 prompts as fcfs."""

    def select(self, view: PrefillView) -> Iterable[Pick]:
        def rank(request: QueuedPrefill) -> int:
            return -view.num_cached_tokens(request)

        few = len(view.waiting) <= _MOST_RANKED
        return (Pick(request.request_id) for request in (sorted(view.waiting, key=rank) if few else view.waiting))


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
