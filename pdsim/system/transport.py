"""Time that a transfer engine takes for a batch of descriptors, besides the bytes on the link.

A batch of n descriptors and S bytes alone on its link takes
  batch + (1 - overlap) n descriptor + max(overlap n descriptor, S / bandwidth)
the form that predicts held-out rows of the transfer-micro study best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Path = tuple[tuple[str, float], ...]
"""Links that a transfer crosses, and how many of its bytes cross each per byte that one prefill rank sends."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Links by name, and the way from each prefill to each decode instance, for one prefill rank."""

    capacity: Mapping[str, float]
    """Bytes per second."""
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
    """An engine over one kind of link; `sources` says where each number comes from."""

    name: str
    link: LinkKind
    """Link of the GPU that carries KV; host: memory copies within one machine."""
    efficiency: float = 1.0
    """Share of the link's nominal bandwidth."""
    max_bandwidth: float | None = None
    """Bytes per second that the engine reaches at most, whatever the link."""
    batch_ns: int = 0
    """Time of each batch, before its first byte."""
    staged_batch_ns: int | None = None
    """The same of requests that go through staging memory; None: batch_ns."""
    descriptor_ns: float = 0.0
    """Time of each descriptor of a batch."""
    overlap: float = 0.0
    """The share of the descriptors' time during which bytes move already."""
    num_queues: int = 4
    """Workers of one prefill rank."""
    queue_by: Literal["decode", "request"] = "decode"
    """Worker of a transfer: one for all transfers to a decode instance, or any for each request."""
    serial: bool = False
    """The workers of a rank post descriptors and move bytes one at a time."""
    turn_ns: int = 0
    """Serial: after posting for so long a worker lets the next one post; 0: it posts all that it has."""
    loop_turn_ns: int = 0
    """Time of the instance's loop after each round of turns, with turn_ns; 0: the loop needs no turn. descriptor_ns is
    then the time of a worker alone, which waits for the loop after each turn."""
    slows_prefill: float = 0.0
    """The share of a transfer's time by which it prolongs forwards of the GPU that it reads."""
    coalesces: bool = True
    """Joins pages that follow each other on both sides into one descriptor."""
    pushes: bool = False
    """True: a kernel writes all pages of a batch with one descriptor, whatever the layout of heads."""
    sources: dict[str, str]

    def posting_ns(self, num_descriptors: int) -> int:
        """Time of posting descriptors, before the first byte moves."""
        return round((1 - self.overlap) * self.descriptor_ns * num_descriptors)

    def loop_pace(self, num_posting: int) -> float:
        """Share of its normal speed at which an instance's loop runs beside this number of posting workers."""
        return self.loop_turn_ns / (num_posting * self.turn_ns + self.loop_turn_ns) if self.loop_turn_ns else 1

    @property
    def turn_alone_ns(self) -> int:
        """Time of a turn of a worker alone, including the loop's turn after it."""
        return self.turn_ns + self.loop_turn_ns

    def turn_beside_ns(self, num_posting: int) -> float:
        """Time of a turn of a worker among this number of workers, which share the loop's turns."""
        return self.turn_ns + self.loop_turn_ns / num_posting

    def least_moving_ns(self, num_descriptors: int) -> float:
        """Bytes cannot take less than the descriptors that are posted meanwhile."""
        return self.overlap * self.descriptor_ns * num_descriptors
