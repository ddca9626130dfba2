"""Built-in transfer policies: how much KV to send after a prefill chunk."""

from dataclasses import dataclass

from pdsim.policy.views import SendingPrefill


@dataclass
class EveryChunk:
    """Send each chunk as soon as it is computed, so that only the last one is exposed (SGLang's default)."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_computed_tokens


@dataclass
class WholePrompt:
    """Send everything after the last chunk: one transfer, wholly exposed."""

    def send_until(self, request: SendingPrefill) -> int:
        return request.num_sent_tokens
