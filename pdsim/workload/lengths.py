"""Distributions of token counts: of prompts and outputs, and of a speculative decode step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Protocol


def positive(what: object, **values: float | None) -> None:
    """Counts and sizes: at least 1. None stands for "all"."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{type(what).__name__} needs {name} >= 1, found {value:g}")


def above_zero(what: object, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{type(what).__name__} needs {name} > 0, found {value:g}")


class Lengths(Protocol):
    """A distribution of token counts, at least 1."""

    def sampler(self, random: Random) -> Callable[[], int]: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same; a plain integer means this."""

    tokens: int
    """Length."""

    def __post_init__(self) -> None:
        positive(self, tokens=self.tokens)

    def sampler(self, random: Random) -> Callable[[], int]:
        del random
        return lambda: self.tokens


@dataclass(frozen=True)
class Uniform:
    """Every integer from low to high, both included, equally often."""

    low: int
    """Least."""
    high: int
    """Most."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"uniform lengths need 1 <= low <= high, found low {self.low}, high {self.high}")

    def sampler(self, random: Random) -> Callable[[], int]:
        draw, low, span = random.random, self.low, self.high - self.low + 1
        return lambda: low + int(draw() * span)


@dataclass(frozen=True)
class Normal:
    """AIPerf's law: a Gaussian, drawn again below 0, rounded up, at least 1."""

    mean: float
    """Mean."""
    stddev: float
    """Standard deviation."""

    def __post_init__(self) -> None:
        if self.mean <= 0 or self.stddev < 0:
            raise ValueError(f"normal lengths need mean > 0 and stddev >= 0, found {self.mean:g} and {self.stddev:g}")

    def sampler(self, random: Random) -> Callable[[], int]:
        def sample() -> int:
            while (value := random.gauss(self.mean, self.stddev)) < 0:
                pass
            return max(1, ceil(value))

        return sample


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Tokens that a speculative decode step gives a sequence: 1 to draft_tokens, accept_length on average."""

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
