"""What a speculative decode step takes: the draft model, then one forward that verifies all drafted tokens."""

from dataclasses import dataclass

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Drafted tokens pass the matrices as if each were a request; a request's KV is read once for all of its own."""

    target: CostModel
    draft_tokens: int
    draft_ns: float
    """Of all drafting in one step."""
    draft_per_request_ns: float

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        return self.target.prefill_ns(step, start_ns)

    def decode_line(self, num_requests: int) -> DecodeLine:
        drafting = DecodeLine.of_ns(self.draft_ns + self.draft_per_request_ns * num_requests, 0, 0)
        verifying = self.target.decode_line(num_requests * self.draft_tokens)
        return verifying._replace(base=verifying.base + drafting.base)
