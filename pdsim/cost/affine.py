"""Times fitted to measurements: straight lines in what a forward has to do. Profiles hold their coefficients."""

from dataclasses import dataclass

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine
from pdsim.cost.work import attended_pairs
from pdsim.system.memory import Layout


@dataclass(frozen=True, kw_only=True)
class Affine:
    """A prefill forward: base + tokens + attended token pairs + prompts. A decode step: base + requests + KV tokens."""

    prefill_base_ns: float = 0
    prefill_per_token_ns: float = 0
    prefill_per_pair_ns: float = 0
    """Per pair of a new token and a token before it."""
    prefill_per_prompt_ns: float = 0
    decode_base_ns: float = 0
    decode_per_request_ns: float = 0
    decode_per_context_token_ns: float = 0
    """For each request that reads it."""
    decode_per_distinct_token_ns: float = 0
    """Once, however many requests share it."""

    def model(self, layout: Layout) -> CostModel:
        del layout
        return self

    def prefill_ns(self, step: PrefillStep) -> int:
        duration = (
            self.prefill_base_ns
            + self.prefill_per_token_ns * sum(chunk.num_tokens for chunk in step.chunks)
            + self.prefill_per_pair_ns * sum(attended_pairs(chunk) for chunk in step.chunks)
            + self.prefill_per_prompt_ns * len(step.chunks)
        )
        return max(1, round(duration))

    def decode_line(self, num_requests: int) -> DecodeLine:
        base_ns = self.decode_base_ns + self.decode_per_request_ns * num_requests
        return DecodeLine.of_ns(max(1, base_ns), self.decode_per_context_token_ns, self.decode_per_distinct_token_ns)
