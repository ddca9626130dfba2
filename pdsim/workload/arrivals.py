"""When requests arrive at a client that does not wait for answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol


class Arrivals(Protocol):
    """An endless sequence of arrival times in ns, never falling."""

    def times_ns(self, random: Random) -> Iterator[int]: ...


@dataclass(frozen=True)
class Gamma:
    """Gaps with a gamma distribution: burstiness 1 is Poisson, below 1 bursts, above 1 evens out."""

    rate_per_s: float
    burstiness: float = 1.0
    """The shape parameter, as in vLLM's and SGLang's clients."""

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0 or self.burstiness <= 0:
            raise ValueError(f"gamma arrivals need rate > 0 and burstiness > 0, found {self}")

    def times_ns(self, random: Random) -> Iterator[int]:
        now_s = 0.0
        while True:
            now_s += random.gammavariate(self.burstiness, 1 / (self.rate_per_s * self.burstiness))
            yield round(now_s * 1e9)


@dataclass(frozen=True)
class Poisson:
    rate_per_s: float

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0:
            raise ValueError(f"Poisson arrivals need a rate above 0, found {self.rate_per_s:g}/s")

    def times_ns(self, random: Random) -> Iterator[int]:
        now_s = 0.0
        while True:
            now_s += random.expovariate(self.rate_per_s)
            yield round(now_s * 1e9)


@dataclass(frozen=True)
class Constant:
    rate_per_s: float

    def __post_init__(self) -> None:
        if self.rate_per_s <= 0:
            raise ValueError(f"constant arrivals need a rate above 0, found {self.rate_per_s:g}/s")

    def times_ns(self, random: Random) -> Iterator[int]:
        del random
        n = 0
        while True:
            yield round(n / self.rate_per_s * 1e9)
            n += 1
