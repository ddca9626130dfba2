"""Measures the noise of a run's numbers: simulates the same requests with slightly faster and slower messages.

Because routers read loads, and requests may narrowly miss a batch, one microsecond can change the order of events. A
difference between two runs that is within this noise is not evidence of an effect.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pdsim.dataclass import dataclass
from pdsim.metrics.summary_rows import significant
from pdsim.scenario.building.cluster import Cluster

JITTERS = (-0.1, -0.05, 0.05, 0.1)
"""Changes of the message latency in repetitions of a run, as shares of the latency. With the default latency of 50 us
they are a few microseconds, as between two runs on one host.
"""
UNSTABLE = 0.02
"""A number is reported as unstable if its band is at least this wide, relative to the number. The band reaches from the
smallest to the largest value over the run itself and its repetitions with other message latencies.
"""


@dataclass(frozen=True)
class Band:
    """Smallest and largest value of one number, over the run itself and its repetitions with other message
    latencies.
    """

    base: float
    """Value of the number in the run itself."""
    least: float
    most: float

    @property
    def width(self) -> float:
        """Difference between `most` and `least`, divided by the run's own value; 0 if this value is 0."""
        return (self.most - self.least) / self.base if self.base else 0.0

    @property
    def is_unstable(self) -> bool:
        return self.width >= UNSTABLE

    def hides(self, change: float) -> bool:
        """True if a relative change does not exceed the band's relative width."""
        return abs(change) <= self.width

    def __str__(self) -> str:
        return f"{significant(self.least)} to {significant(self.most)}"


def bands(base: Mapping[str, float], repeated: Sequence[Mapping[str, float]]) -> dict[str, Band]:
    """Returns the smallest and the largest value of each number (its Band) over the run itself and its repetitions.
    base: numbers of the run itself. repeated: numbers of its repetitions.
    """
    found = {}
    for name, value in base.items():
        values = [value, *(one[name] for one in repeated)]
        found[name] = Band(value, min(values), max(values))
    return found


def jittered(build: Callable[[], Cluster]) -> Iterator[Cluster]:
    """Yields one cluster for each repetition, with another message latency. build: makes the cluster of the run itself.
    If messages take no time, all clusters are equal.
    """
    for jitter in JITTERS:
        cluster = build()
        yield replace(cluster, message_latency_ns=max(0, round(cluster.message_latency_ns * (1 + jitter))))
