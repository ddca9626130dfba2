"""A cost model that is asked only for what was measured: larger and smaller steps take as long as the nearest such."""

from dataclasses import dataclass
from typing import NamedTuple

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


class Range(NamedTuple):
    """What was measured, ends included."""

    least: float
    most: float

    def nearest(self, value: float) -> float:
        return min(max(value, self.least), self.most)


@dataclass(frozen=True)
class Clamped:
    """KV tokens of decode steps are not clamped: a step's time is a line in them, which goes on."""

    model: CostModel
    new_tokens: Range
    context_tokens: Range
    """Of all prompts of a forward together."""
    batch: Range

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks)
        num_context = sum(chunk.num_context_tokens for chunk in step.chunks)
        more = self.new_tokens.nearest(num_tokens) / num_tokens
        behind = self.context_tokens.nearest(num_context) / num_context if num_context else 1
        if (more, behind) != (1, 1):
            chunks = (
                chunk._replace(
                    num_tokens=max(1, round(chunk.num_tokens * more)),
                    num_context_tokens=round(chunk.num_context_tokens * behind),
                )
                for chunk in step.chunks
            )
            step = step._replace(chunks=tuple(chunks))
        return self.model.prefill_ns(step, start_ns)

    def decode_line(self, num_requests: int) -> DecodeLine:
        return self.model.decode_line(round(self.batch.nearest(num_requests)))
