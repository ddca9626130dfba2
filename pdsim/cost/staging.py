"""What gather and scatter cost: host work of each call, and every byte read once and written once."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagingCost:
    """Of one rank, by the speed of its memory."""

    gather_host_ns: int
    scatter_host_ns: int
    gather_bandwidth: float
    """Bytes read and written per second."""
    scatter_bandwidth: float
    num_writers: int
    """Whose cells one decode rank scatters in one call."""

    def gather_ns(self, num_bytes: int) -> int:
        return self.gather_host_ns + round(2e9 * num_bytes / self.gather_bandwidth)

    def scatter_ns(self, num_bytes: int) -> int:
        """num_bytes are those of one writer."""
        return self.scatter_host_ns + round(2e9 * num_bytes * self.num_writers / self.scatter_bandwidth)
