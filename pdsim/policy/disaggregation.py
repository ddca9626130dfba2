"""Built-in rules for which prompts the decode instance computes itself."""

from dataclasses import dataclass

from pdsim.policy.views import PairView, TokenSequence


@dataclass
class PrefixBased:
    """Prompts with this many tokens that decode has not cached go to prefill (llm-d's prefix-based-pd-decider)."""

    non_cached_tokens: int
    """0: all stay on decode."""

    def __post_init__(self) -> None:
        if self.non_cached_tokens < 0:
            raise ValueError(f"non_cached_tokens is at least 0, found {self.non_cached_tokens}")

    def is_remote(self, prompt: TokenSequence, view: PairView) -> bool:
        if not self.non_cached_tokens:
            return False
        return len(prompt) - view.num_decode_cached_tokens >= self.non_cached_tokens


@dataclass
class LengthAndQueue:
    """Prompts with more uncached tokens go to prefill, unless too many wait there (Dynamo's PyDisaggregatedRouter)."""

    max_local_prefill_length: int = 1000
    """Uncached tokens that decode computes itself."""
    max_prefill_queue_size: int = 2
    """Prompts that may wait at prefill."""

    def __post_init__(self) -> None:
        if self.max_local_prefill_length < 0 or self.max_prefill_queue_size < 1:
            raise ValueError(f"needs max_local_prefill_length >= 0 and max_prefill_queue_size >= 1, found {self}")

    def is_remote(self, prompt: TokenSequence, view: PairView) -> bool:
        num_uncached = len(prompt) - view.num_decode_cached_tokens
        num_queued = sum(max(0, load.num_requests - 1) for load in view.prefill)
        return num_uncached > self.max_local_prefill_length and num_queued < self.max_prefill_queue_size
