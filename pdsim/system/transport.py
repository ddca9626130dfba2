"""The time that a transfer engine takes for a batch of descriptors and their bytes.

A batch of n descriptors and S bytes, alone on its link, takes
  batch_ns + (1 - overlap) n descriptor_ns + max(overlap n descriptor_ns, S / bandwidth)
Of the formulas that were tried, this one predicts held-out measurements of the transfer-micro study best.
"""

from collections.abc import Mapping
from typing import Literal

from pdsim.dataclass import dataclass

Path = tuple[tuple[str, float], ...]
"""Links that a transfer crosses. Each item is a link's name and the bytes on this link per byte of the transfer: of KV
that one rank sends, or of embeddings that an encode instance sends."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links of a cluster. A transfer from one instance to another crosses the sender's way out, then the receiver's
    way in. Keys of ways_out and ways_in: names of instances. Keys of capacity: names of links.
    """

    capacity: Mapping[str, float]
    """Bandwidth of each link in bytes per second."""
    ways_out: Mapping[str, Path]
    """Path from each sending instance to the network."""
    ways_in: Mapping[str, Path]
    """Path from the network to each receiving instance."""


LinkKind = Literal["nic", "nvlink", "host"]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A transfer engine on one kind of link. `sources` names the source of each number."""

    name: str
    link: LinkKind
    """Kind of link that carries KV. host: memory copies within one machine."""
    efficiency: float = 1.0
    """Share of the link's nominal bandwidth that the engine reaches."""
    max_bandwidth: float | None = None
    """Maximum rate of the engine in bytes per second, on any link. None: no maximum."""
    batch_ns: int = 0
    """Fixed time in ns of each batch of descriptors that the engine gets in one call, before the batch's first byte
    moves.
    """
    staged_batch_ns: int | None = None
    """Fixed time in ns of each batch of descriptors of a request whose KV goes through staging memory, before the
    batch's first byte moves. None: the time is batch_ns.
    """
    descriptor_ns: float = 0.0
    """Time in ns to post one descriptor of a batch."""
    overlap: float = 0.0
    """Share of the time for posting descriptors during which bytes already move."""
    num_queues: int = 4
    """Number of transfer queues of one prefill rank. Each queue has one transfer worker."""
    queue_by: Literal["decode", "request"] = "decode"
    """Which transfers share a worker. decode: all transfers to one decode instance. request: all transfers of one
    request."""
    serial: bool = False
    """True: only one worker of a rank posts descriptors and moves bytes at a time."""
    turn_ns: int = 0
    """With serial: time in ns for which one worker posts descriptors before the next worker posts. 0: a worker posts
    all its descriptors at once."""
    loop_turn_ns: int = 0
    """With turn_ns: the workers of a prefill rank post descriptors in rounds. Each posting worker has one turn of
    turn_ns, then the rank's scheduler loop runs for this time in ns, and no worker posts. descriptor_ns already
    includes these waits of a worker that posts alone. 0: workers never wait for the loop.
    """
    slows_prefill: float = 0.0
    """Time that a transfer adds to prefill forwards on the GPU whose memory the transfer reads, divided by the
    transfer's time during such forwards.
    """
    coalesces: bool = True
    """True: the engine joins pages that are contiguous on both sides into one descriptor."""
    pushes: bool = False
    """True: a GPU kernel writes the pages into the receiver's memory. A batch of pages then counts as one descriptor,
    even if prefill and decode divide KV heads differently.
    """
    sources: dict[str, str]

    @property
    def posting_each_ns(self) -> float:
        """Time in ns per descriptor during which a batch is posted and no byte of the batch moves yet. Together with
        moving_each_ns, during which bytes move, this is descriptor_ns.
        """
        return (1 - self.overlap) * self.descriptor_ns

    @property
    def moving_each_ns(self) -> float:
        """Time in ns for posting one descriptor while bytes of its batch already move. The bytes of a batch therefore
        move for at least this time per descriptor.
        """
        return self.overlap * self.descriptor_ns

    def loop_pace(self, num_posting: int) -> float:
        """Speed of the scheduler's loop while num_posting workers post descriptors, as a share of its speed without
        posting.
        """
        return self.loop_turn_ns / (num_posting * self.turn_ns + self.loop_turn_ns) if self.loop_turn_ns else 1

    @property
    def turn_alone_ns(self) -> int:
        """Time in ns from the start of a worker's turn to the start of its next turn, if no other worker posts
        descriptors: the turn itself, and the time for which the scheduler's loop then runs (loop_turn_ns).
        """
        return self.turn_ns + self.loop_turn_ns

    def turn_beside_ns(self, num_posting: int) -> float:
        """Mean time in ns from the start of a worker's turn to the start of the next worker's turn. The workers of a
        rank take turns at posting descriptors, and after each round of turns the scheduler's loop runs for
        loop_turn_ns. num_posting: number of workers that take turns.
        """
        return self.turn_ns + self.loop_turn_ns / num_posting
