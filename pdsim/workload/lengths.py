"""Distributions of token counts: of prompts, of outputs, and of the tokens that a speculative decode step yields."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log, sqrt
from random import Random
from typing import Protocol


def positive(what: object, **values: float | None) -> None:
    """Raises ValueError for counts and sizes below 1. None stands for "all" and passes."""
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
    """All lengths are equal. A plain integer means this distribution."""

    tokens: int
    """Length in tokens."""

    def __post_init__(self) -> None:
        positive(self, tokens=self.tokens)

    def sampler(self, random: Random) -> Callable[[], int]:
        del random
        return lambda: self.tokens


@dataclass(frozen=True)
class Uniform:
    """Every integer from low to high, both included, is equally likely."""

    low: int
    """Shortest length in tokens."""
    high: int
    """Longest length in tokens."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"uniform lengths need 1 <= low <= high, found low {self.low}, high {self.high}")

    def sampler(self, random: Random) -> Callable[[], int]:
        draw, low, span = random.random, self.low, self.high - self.low + 1
        return lambda: low + int(draw() * span)


@dataclass(frozen=True)
class Normal:
    """Normal distribution as AIPerf draws it: values below 0 are drawn again, and results are rounded up to at
    least 1.
    """

    mean: float
    """Mean of the normal distribution in tokens."""
    stddev: float
    """Standard deviation of the normal distribution in tokens."""

    def __post_init__(self) -> None:
        if self.mean <= 0 or self.stddev < 0:
            raise ValueError(f"normal lengths need mean > 0 and stddev >= 0, found {self.mean:g} and {self.stddev:g}")

    def sampler(self, random: Random) -> Callable[[], int]:
        def sample() -> int:
            while (value := random.gauss(self.mean, self.stddev)) < 0:
                pass
            return max(1, ceil(value))

        return sample


@dataclass(frozen=True)
class Lognormal:
    """Lognormal: many short lengths and a long tail, as in prompts of chats and documents."""

    mean: float
    """Mean length in tokens."""
    stddev: float
    """Standard deviation of the lengths in tokens."""
    most: int | None = None
    """Longest length in tokens; longer draws get this length. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.stddev, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        variance = log(1 + (self.stddev / self.mean) ** 2)
        mu, sigma = log(self.mean) - variance / 2, sqrt(variance)
        return _rounded(lambda: random.lognormvariate(mu, sigma), self.most)


@dataclass(frozen=True)
class GammaLengths:
    """Gamma: between exponential (stddev equals mean) and normal (stddev far below mean), and never below 0."""

    mean: float
    """Mean length in tokens."""
    stddev: float
    """Standard deviation of the lengths in tokens."""
    most: int | None = None
    """Longest length in tokens; longer draws get this length. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.stddev, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        shape = (self.mean / self.stddev) ** 2
        return _rounded(lambda: random.gammavariate(shape, self.mean / shape), self.most)


@dataclass(frozen=True)
class Exponential:
    """Exponential: the length ends with equal probability at each token, as in outputs that stop at random."""

    mean: float
    """Mean length in tokens."""
    most: int | None = None
    """Longest length in tokens; longer draws get this length. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.mean, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        return _rounded(lambda: random.expovariate(1 / self.mean), self.most)


@dataclass(frozen=True)
class Mixed:
    """A mixture of distributions, each with its share of the requests."""

    parts: tuple[Lengths, ...]
    """Distributions of the mixture."""
    shares: tuple[float, ...]
    """Shares of the distributions, one each, relative to their sum."""

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.shares):
            raise ValueError(
                f"mixed lengths need a share for each part, found {len(self.parts)} and {len(self.shares)}"
            )
        if min(self.shares) < 0 or not sum(self.shares):
            raise ValueError(
                f"mixed lengths need shares, none below 0 and at least one above 0, found {list(self.shares)}"
            )

    def sampler(self, random: Random) -> Callable[[], int]:
        samplers = [part.sampler(random) for part in self.parts]
        limits = list(accumulate(self.shares))

        def sample() -> int:
            (sampler,) = random.choices(samplers, cum_weights=limits)
            return sampler()

        return sample


def _spread(what: object, mean: float, stddev: float, most: int | None) -> None:
    above_zero(what, mean=mean, stddev=stddev)
    positive(what, most=most)


def _rounded(draw: Callable[[], float], most: int | None) -> Callable[[], int]:
    """A function that draws whole numbers, at least 1 and at most `most`."""
    if most is None:
        return lambda: max(1, round(draw()))
    return lambda: min(most, max(1, round(draw())))


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Number of tokens that a speculative decode step yields for a sequence: 1 to draft_tokens, accept_length on
    average.
    """

    draft_tokens: int
    accept_length: float

    def stream(self, rng: Random) -> Iterator[int]:
        """Endless token counts of a sequence's steps. Drafted tokens are accepted one after another, each with equal
        probability.
        """
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
