"""Interfaces of cost models, and the steps that they time."""

from typing import NamedTuple, Protocol

from pdsim.core.messages import PrefillChunk, PrefillStep
from pdsim.system.memory import Layout

FRACTION_BITS = 20
"""Decode steps are timed in 2**-20 ns, so that a step's share of one KV token is not rounded away."""


class DecodeLine(NamedTuple):
    """Duration of a decode step at one batch size: linear in the KV tokens that the batch reads, in 2**-20 ns."""

    base: int
    per_context_token: int
    """Time of a context token, counted for each request that reads it."""
    per_distinct_token: int
    """Counted once, however many requests share it; in waves, once in each."""

    def stretched(self, factor: float) -> "DecodeLine":
        return DecodeLine(*(round(part * factor) for part in self))

    def later(self, delay_ns: int) -> "DecodeLine":
        """The line of a step that stands still for so long."""
        return DecodeLine(self.base + (delay_ns << FRACTION_BITS), self.per_context_token, self.per_distinct_token)

    def plus(self, other: "DecodeLine", times: int = 1) -> "DecodeLine":
        """The line of this and, so many times, another."""
        return DecodeLine(*(part + times * added for part, added in zip(self, other, strict=True)))

    @classmethod
    def of_ns(cls, base_ns: float, per_context_token_ns: float, per_distinct_token_ns: float) -> "DecodeLine":
        one_ns = 1 << FRACTION_BITS
        return cls(round(base_ns * one_ns), round(per_context_token_ns * one_ns), round(per_distinct_token_ns * one_ns))


STANDING = DecodeLine(0, 0, 0)
"""Line of a step that does nothing."""

Terms = dict[str, float]
"""Parts of a time in ns, by name, in the order in which they are printed."""


class CostModel(Protocol):
    """Times that a GPU takes for steps. A model may remember earlier steps, but depends on nothing else."""

    def prefill_ns(self, step: PrefillStep, start_ns: int) -> int:
        """Duration of one forward that begins at start_ns, at least 1. Called once for each, in order."""

    def decode_line(self, num_requests: int) -> DecodeLine:
        """Durations of decode steps of this batch size: equal arguments, equal answers."""

    def prefill_terms(self, step: PrefillStep) -> Terms:
        """Parts of the duration of a forward on a GPU that has rested."""

    def decode_terms(self, num_requests: int) -> Terms:
        """Parts of a decode line's base."""


class CostSettings(Protocol):
    """Settings that a scenario names: a dataclass that makes the cost model of an instance from its layout."""

    def model(self, layout: Layout) -> CostModel: ...


def attended_pairs(chunk: PrefillChunk) -> float:
    """Pairs of a new token and a token it attends to: the context, and half of the chunk itself."""
    return chunk.num_tokens * (chunk.num_context_tokens + chunk.num_tokens / 2)


def window_pairs(chunk: PrefillChunk, window_tokens: int) -> float:
    """The same where a token attends to the last window_tokens only."""
    first, last = chunk.num_context_tokens, chunk.num_context_tokens + chunk.num_tokens
    beyond, before = max(0, last - window_tokens), max(0, first - window_tokens)
    return attended_pairs(chunk) - (beyond * beyond - before * before) / 2
