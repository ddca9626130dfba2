"""Times of an instance that prefills and decodes on the same GPUs, each phase by a model of its own."""

from dataclasses import dataclass

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


@dataclass(frozen=True)
class TwoPhases:
    prefill: CostModel
    decode: CostModel

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        return self.prefill.prefill_ns(step, start_ns)

    def decode_line(self, num_requests: int) -> DecodeLine:
        return self.decode.decode_line(num_requests)
