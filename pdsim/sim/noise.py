"""How far a run's numbers move by chance: the same requests, with messages a little faster and slower.

Routers that read loads, and batches that just miss a request, turn a microsecond into another order of events. A
difference that is no larger than this says nothing about its cause.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pdsim.metrics.summary_rows import significant
from pdsim.scenario.build import Cluster

JITTERS = (-0.1, -0.05, 0.05, 0.1)
"""Relative changes of the latency of messages: some microseconds, which no host keeps from one run to the next."""
UNSTABLE = 0.02
"""Relative width from which a band is told."""


@dataclass(frozen=True)
class Band:
    """The least and the most of one number, over a run and its repetitions with other latencies."""

    base: float
    """The number of the run itself."""
    least: float
    most: float

    @property
    def width(self) -> float:
        """Relative to the run's own number; 0 if that is 0."""
        return (self.most - self.least) / self.base if self.base else 0.0

    @property
    def is_unstable(self) -> bool:
        return self.width >= UNSTABLE

    def hides(self, change: float) -> bool:
        """True for a relative change that chance alone makes, too."""
        return abs(change) <= self.width

    def __str__(self) -> str:
        return f"{significant(self.least)} to {significant(self.most)}"


def bands(base: Mapping[str, float], repeated: Sequence[Mapping[str, float]]) -> dict[str, Band]:
    """The band of each number of a run, by its own numbers and those of its repetitions."""
    found = {}
    for name, value in base.items():
        values = [value, *(one[name] for one in repeated)]
        found[name] = Band(value, min(values), max(values))
    return found


def jittered(build: Callable[[], Cluster]) -> Iterator[Cluster]:
    """A cluster for each repetition. Where messages take no time, all are alike."""
    for jitter in JITTERS:
        cluster = build()
        yield replace(cluster, message_latency_ns=max(0, round(cluster.message_latency_ns * (1 + jitter))))
