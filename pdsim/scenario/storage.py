"""Memory and drives behind the prefix caches."""

from pydantic import Field

from pdsim.core.host_cache import PrefetchPolicy, WritePolicy
from pdsim.scenario.fields import Bandwidth, Duration, Rate, Section, Size


class HostCacheSettings(Section):
    """Host memory behind the prefix cache: SGLang's HiCache (--enable-hierarchical-cache). In simulation only."""

    size: Size | None = Field(default=None, ge=0)
    """Memory for the KV of each GPU (--hicache-size); None: twice its pool (--hicache-ratio 2)."""
    write: WritePolicy = "write_through"
    """Rule for copying KV there: write_through, write_through_selective or write_back (--hicache-write-policy)."""


class StorageSettings(Section):
    """Drives behind the host caches (--hicache-storage-backend): of each server, or a store such as Mooncake's.

    The defaults are round figures of a fast PCIe 4.0 drive; nothing was measured.
    """

    shared: bool = False
    """True: all instances have the same store; false: each server has its own."""
    drives: int = Field(default=1, ge=1)
    """Drives of each server; of a shared store, or nodes that lend it memory."""
    size: Size = 3_840_000_000_000
    """Size of one drive."""
    read_bandwidth: Bandwidth = Field(default=6.9e9, gt=0)
    """Read bandwidth of one drive."""
    write_bandwidth: Bandwidth = Field(default=4.1e9, gt=0)
    """Write bandwidth of one drive."""
    io_limit: Rate = Field(default=1e6, gt=0)
    """Reads and writes of one drive together, one of each page and rank."""
    client_bandwidth: Bandwidth | None = Field(default=None, gt=0)
    """Bandwidth of one instance, in each direction; None: no limit."""
    latency: Duration = 100_000
    """Time before the first byte of each batch of up to 128 pages, and of looking up as many."""
    prefetch: PrefetchPolicy = "timeout"
    """Rule for waiting for reads: best_effort, wait_complete or timeout (--hicache-storage-prefetch-policy)."""
    prefetch_threshold: int = Field(default=256, ge=1)
    """Fewer tokens are computed rather than read."""
