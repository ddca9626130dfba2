"""Interfaces of cost models, and the lines that describe decode steps."""

from typing import NamedTuple, Protocol

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.system.memory import Layout

FRACTION_BITS = 20
"""Decode steps are timed in 2**-20 ns, so that a step's share of one KV token is not rounded away."""


class DecodeLine(NamedTuple):
    """Duration of a decode step at one batch size: linear in the KV tokens that the batch reads, in 2**-20 ns."""

    base: int
    per_context_token: int
    """Time of a context token, counted once for each request that reads it."""
    per_distinct_token: int
    """Time of a context token, counted once for all requests that share it. With attention waves: once per wave."""

    def stretched(self, factor: float) -> "DecodeLine":
        return DecodeLine(*(round(part * factor) for part in self))

    def later(self, delay_ns: int) -> "DecodeLine":
        """The line of a step that starts delay_ns later."""
        return DecodeLine(self.base + (delay_ns << FRACTION_BITS), self.per_context_token, self.per_distinct_token)

    def plus(self, other: "DecodeLine", times: int = 1) -> "DecodeLine":
        """The sum of this line and `times` times another line."""
        return DecodeLine(*(part + times * added for part, added in zip(self, other, strict=True)))

    @classmethod
    def of_ns(cls, base_ns: float, per_context_token_ns: float, per_distinct_token_ns: float) -> "DecodeLine":
        one_ns = 1 << FRACTION_BITS
        return cls(round(base_ns * one_ns), round(per_context_token_ns * one_ns), round(per_distinct_token_ns * one_ns))


STANDING = DecodeLine(0, 0, 0)
"""Line of a step that takes no time."""

Terms = dict[str, float]
"""Parts of a duration in ns, by name, in the order in which they are printed."""


class CostModel(Protocol):
    """Times that a GPU takes for steps. They may depend on earlier steps of the model, and on nothing else."""

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        """Duration in ns of one forward that begins at start_ns, at least 1. Called once per forward, in order."""

    def decode_line(self, num_requests: int) -> DecodeLine:
        """Durations of decode steps of this batch size. Equal arguments give equal results."""

    def prefill_terms(self, step: PrefillStep) -> Terms:
        """Parts of the duration of a forward on a rested GPU."""

    def decode_terms(self, num_requests: int) -> Terms:
        """Parts of the base of a decode step's duration, without the time of its KV."""


class CostSettings(Protocol):
    """Settings of a cost model in a scenario: a dataclass that makes the cost model of an instance from its layout."""

    def model(self, layout: Layout) -> CostModel: ...


def attended_pairs(chunk: PrefillChunk) -> float:
    """Number of pairs of a new token and a token that it attends to: the context, and on average half of the chunk."""
    return chunk.num_tokens * (chunk.num_context_tokens + chunk.num_tokens / 2)


def window_pairs(chunk: PrefillChunk, window_tokens: int) -> float:
    """Number of attended pairs if each token attends only to the last window_tokens."""
    first, last = chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens
    beyond, before = max(0, last - window_tokens), max(0, first - window_tokens)
    return attended_pairs(chunk) - (beyond * beyond - before * before) / 2
