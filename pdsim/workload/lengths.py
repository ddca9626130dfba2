"""Distributions of numbers of tokens: lengths of prompts and outputs, and tokens that a speculative decode step
yields.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from math import ceil, log, sqrt
from random import Random
from typing import Protocol

from pdsim.dataclass import dataclass


def positive(what: object, **values: float | None) -> None:
    """Raises ValueError if one of the values is below 1. `values` maps field names to values. None is accepted: it
    means "all" or "no limit". what: object whose class name begins the message.
    """
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{type(what).__name__} needs {name} >= 1, found {value:g}")


def above_zero(what: object, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{type(what).__name__} needs {name} > 0, found {value:g}")


class Lengths(Protocol):
    """A distribution of numbers of tokens. All values are at least 1."""

    def sampler(self, random: Random) -> Callable[[], int]: ...


@dataclass(frozen=True)
class Fixed:
    """All lengths are equal. An integer in a scenario means this distribution."""

    tokens: int
    """Length in tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"expected a number of at least 1, found {self.tokens}")

    def sampler(self, random: Random) -> Callable[[], int]:
        del random
        return repeat(self.tokens).__next__


@dataclass(frozen=True)
class Uniform:
    """All integers from low to high, both included, are equally likely."""

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
    """Normal distribution as in AIPerf: values below 0 are drawn again, and values are rounded up to at least 1."""

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
    """Lognormal distribution: many short lengths and few very long lengths, as in prompts of chats and documents. Mean
    and standard deviation are those of the lengths, not of their logarithms.
    """

    mean: float
    """Mean length in tokens."""
    stddev: float
    """Standard deviation of the lengths in tokens."""
    most: int | None = None
    """Maximum length in tokens, which replaces longer lengths. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.stddev, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        variance = log(1 + (self.stddev / self.mean) ** 2)
        mu, sigma = log(self.mean) - variance / 2, sqrt(variance)
        return _rounded(lambda: random.lognormvariate(mu, sigma), self.most)


@dataclass(frozen=True)
class GammaLengths:
    """Gamma distribution, never below 0. Exponential if stddev equals mean; close to normal if stddev is far below
    mean.
    """

    mean: float
    """Mean length in tokens."""
    stddev: float
    """Standard deviation of the lengths in tokens."""
    most: int | None = None
    """Maximum length in tokens; longer values are set to it. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.stddev, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        shape = (self.mean / self.stddev) ** 2
        return _rounded(lambda: random.gammavariate(shape, self.mean / shape), self.most)


@dataclass(frozen=True)
class Exponential:
    """Exponential distribution of lengths: a text ends with the same probability after each token."""

    mean: float
    """Mean length in tokens."""
    most: int | None = None
    """Maximum length in tokens; longer values are set to it. None: no limit."""

    def __post_init__(self) -> None:
        _spread(self, self.mean, self.mean, self.most)

    def sampler(self, random: Random) -> Callable[[], int]:
        return _rounded(lambda: random.expovariate(1 / self.mean), self.most)


@dataclass(frozen=True)
class Mixed:
    """A mixture of distributions. Each length comes from one of them, drawn at random."""

    parts: tuple[Lengths, ...]
    """The distributions of the mixture."""
    shares: tuple[float, ...]
    """Weight of each distribution. Only the ratios of the weights count."""

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
    """Returns a function that rounds values of `draw` to whole numbers between 1 and `most`."""
    if most is None:
        return lambda: max(1, round(draw()))
    return lambda: min(most, max(1, round(draw())))


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Number of tokens that a speculative decode step yields for one sequence: between 1 and draft_tokens,
    accept_length on average.
    """

    draft_tokens: int
    """Number of tokens that a step verifies for each sequence: the sequence's last token, then the drafts."""
    accept_length: float
    """Mean number of tokens that a step yields for each sequence."""

    def stream(self, rng: Random) -> Iterator[int]:
        """Yields the number of tokens of each step of one sequence. Each draft token is accepted with equal
        probability, if all draft tokens before it were accepted.
        """
        probability = chain_probability(self.draft_tokens, self.accept_length)
        while True:
            num_tokens = 1
            while num_tokens < self.draft_tokens and rng.random() < probability:
                num_tokens += 1
            yield num_tokens


def chain_probability(draft_tokens: int, accept_length: float) -> float:
    """Returns the probability p for which 1 + p + p^2 + ... + p^(draft_tokens - 1) equals accept_length."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(middle**k for k in range(draft_tokens)) < accept_length:
            low = middle
        else:
            high = middle
    return high
