"""How many tokens a speculative decode step gives a sequence: a property of what it writes, like its length."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import floor
from random import Random
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """At least 1 and at most draft_tokens in each step, accept_length in the mean."""

    draft_tokens: int
    accept_length: float
    draws: Literal["chain", "even"] = "chain"
    """chain: each draft token is accepted with the same probability if all before it were; even: nothing is drawn."""

    def stream(self, rng: Random) -> Iterator[int]:
        """Of one sequence, step by step, without end."""
        return self._evenly() if self.draws == "even" else self._as_chain(rng)

    def _evenly(self) -> Iterator[int]:
        for step in count():
            yield floor((step + 1) * self.accept_length) - floor(step * self.accept_length)

    def _as_chain(self, rng: Random) -> Iterator[int]:
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
