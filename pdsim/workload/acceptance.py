"""Tokens that a speculative decode step gives a sequence: a property of what it writes, like its length."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Draws 1 to draft_tokens for each step, accept_length on average."""

    draft_tokens: int
    accept_length: float

    def stream(self, rng: Random) -> Iterator[int]:
        """Tokens of each step of a sequence, without end: drafts are accepted in turn, each with one probability."""
        probability = chain_probability(self.draft_tokens, self.accept_length)
        while True:
            num_tokens = 1
            while num_tokens < self.draft_tokens and rng.random() < probability:
                num_tokens += 1
            yield num_tokens


def chain_probability(draft_tokens: int, accept_length: float) -> float:
    """The p for which 1 + p + p^2 + ... + p^(draft_tokens - 1) is accept_length."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**k for k in range(draft_tokens)) < accept_length:
            low = middle
        else:
            high = middle
    return high
