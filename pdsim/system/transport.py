"""What a transfer engine takes for a batch of descriptors, besides the bytes on the link."""

from dataclasses import dataclass
from typing import Literal

LinkKind = Literal["nic", "nvlink", "host"]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One engine over one kind of link; `sources` says where each number comes from."""

    name: str
    link: LinkKind
    """Which of the GPU's links carries KV; host: memory copies within one machine."""
    efficiency: float = 1.0
    """Of the link's nominal bandwidth."""
    max_bandwidth: float | None = None
    """Bytes per second that the engine reaches at most, whatever the link."""
    batch_ns: int = 0
    """Of each batch, before its first byte."""
    descriptor_ns: float = 0.0
    """Of each descriptor of a batch."""
    num_queues: int = 4
    """Workers of one prefill rank; the transfers to one decode instance all go through one of them."""
    coalesces: bool = True
    """Joins pages that follow each other on both sides into one descriptor."""
    sources: dict[str, str]

    def setup_ns(self, num_descriptors: int) -> int:
        return self.batch_ns + round(num_descriptors * self.descriptor_ns)
