"""Built-in transfer policies: how much KV to send after a prefill chunk."""

from dataclasses import dataclass

from pdsim.policy.views import SendingPrefill


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
