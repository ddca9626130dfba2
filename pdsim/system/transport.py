"""Time that a transfer engine takes for a batch of descriptors, besides the time of its bytes on the link.

A batch of n descriptors and S bytes alone on its link takes
  batch + (1 - overlap) n descriptor + max(overlap n descriptor, S / bandwidth)
This form predicts held-out rows of the transfer-micro study best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Path = tuple[tuple[str, float], ...]
"""Links that a transfer crosses, with the number of bytes on each link per byte that one prefill rank sends."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Links by name, and the path from each prefill to each decode instance, for one prefill rank."""

    capacity: Mapping[str, float]
    """Bandwidth of each link in bytes per second."""
    ways_out: Mapping[str, Path]
    ways_in: Mapping[str, Path]
    _paths: dict[tuple[str, str], Path] = field(default_factory=dict, init=False)

    def path(self, source: str, target: str) -> Path:
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = self.ways_out[source] + self.ways_in[target]
        return path


LinkKind = Literal["nic", "nvlink", "host"]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A transfer engine over one kind of link. `sources` names the source of each number."""

    name: str
    link: LinkKind
    """Link of the GPU that carries KV. host: memory copies within one machine."""
    efficiency: float = 1.0
    """Share of the link's nominal bandwidth that the engine reaches."""
    max_bandwidth: float | None = None
    """Maximum rate of the engine in bytes per second, on any link."""
    batch_ns: int = 0
    """Time of each batch before its first byte."""
    staged_batch_ns: int | None = None
    """Time of each batch of a staged request before its first byte. None: batch_ns."""
    descriptor_ns: float = 0.0
    """Time of each descriptor of a batch."""
    overlap: float = 0.0
    """Share of the descriptors' time during which bytes move already."""
    num_queues: int = 4
    """Number of workers of one prefill rank."""
    queue_by: Literal["decode", "request"] = "decode"
    """Assignment of transfers to workers. decode: one worker for all transfers to a decode instance. request: one
    worker for each request."""
    serial: bool = False
    """True: the workers of a rank post descriptors and move bytes one at a time."""
    turn_ns: int = 0
    """With serial: time for which a worker posts before the next worker's turn. 0: a worker posts all its
    descriptors."""
    loop_turn_ns: int = 0
    """With turn_ns: time that the instance's own loop takes after each round of turns. 0: the loop takes none.
    Otherwise descriptor_ns is the time of a single worker, which waits for the loop after each turn."""
    slows_prefill: float = 0.0
    """Share of a transfer's time by which it prolongs forwards of the GPU that it reads."""
    coalesces: bool = True
    """True: the engine joins pages that are contiguous on both sides into one descriptor."""
    pushes: bool = False
    """True: a kernel writes all pages of a batch with one descriptor, for all layouts of heads."""
    sources: dict[str, str]

    def posting_ns(self, num_descriptors: int) -> int:
        """Time in ns of posting descriptors before the first byte moves."""
        return round((1 - self.overlap) * self.descriptor_ns * num_descriptors)

    def loop_pace(self, num_posting: int) -> float:
        """Relative speed of an instance's loop while num_posting workers post."""
        return self.loop_turn_ns / (num_posting * self.turn_ns + self.loop_turn_ns) if self.loop_turn_ns else 1

    @property
    def turn_alone_ns(self) -> int:
        """Time in ns of a turn of a single worker, including the loop's turn after it."""
        return self.turn_ns + self.loop_turn_ns

    def turn_beside_ns(self, num_posting: int) -> float:
        """Time in ns of a turn of a worker among num_posting workers, which share the loop's turns."""
        return self.turn_ns + self.loop_turn_ns / num_posting

    def least_moving_ns(self, num_descriptors: int) -> float:
        """Minimum time in ns of moving bytes. Bytes cannot all have moved before the last descriptor is posted."""
        return self.overlap * self.descriptor_ns * num_descriptors
