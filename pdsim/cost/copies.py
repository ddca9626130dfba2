"""Durations of KV copies other than transfers: to host memory, to storage behind it, and through staging buffers."""

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Costs of copying the KV of retracted requests to host memory and back, layer by layer over the host link.

    The costs are those of one rank; all ranks copy their shares at the same time.
    """

    page_bytes: int
    num_planes: int
    """Copies per request: one of K and one of V in every layer."""
    copy_ns: int
    """Minimum time in ns of one plane's copy: its launch."""
    save_bandwidth: float
    """Rate of copies to host memory in bytes per second."""
    load_bandwidth: float
    pinning_bandwidth: float
    """Rate in bytes per second at which host memory is pinned. Memory is pinned once, before its first copy."""
    num_ranks: int = 1


class HostMemory:
    """Times the copies of one instance, one after another.

    A plane goes into pinned memory of a power of two in bytes, as in PyTorch's allocator. Memory is pinned once; later
    copies reuse free memory of the same size.
    """

    def __init__(self, costs: HostCopies) -> None:
        self._costs = costs
        self._held_bytes: dict[int, int] = {}
        """Bytes of each request whose KV is in host memory."""
        self._free: Counter[int] = Counter()
        """Number of free pinned allocations, each for all planes of a request, by the bytes of a plane."""

    def save_ns(self, request_id: int, num_pages: int) -> int:
        costs, num_bytes = self._costs, num_pages * self._costs.page_bytes
        self._held_bytes[request_id] = num_bytes
        copy_ns, plane_bytes = self._copy_ns(num_bytes, costs.save_bandwidth), self._plane_bytes(num_bytes)
        if self._free[plane_bytes]:
            self._free[plane_bytes] -= 1
            return copy_ns
        return copy_ns + round(1e9 * costs.num_planes * plane_bytes / costs.pinning_bandwidth)

    def load_ns(self, request_id: int) -> int:
        num_bytes = self._held_bytes[request_id]
        self.forget(request_id)
        return self._copy_ns(num_bytes, self._costs.load_bandwidth)

    def forget(self, request_id: int) -> None:
        """Drops the host copy of a request, if it has one."""
        if num_bytes := self._held_bytes.pop(request_id, 0):
            self._free[self._plane_bytes(num_bytes)] += 1

    def _plane_bytes(self, num_bytes: int) -> int:
        return 1 << (ceil(num_bytes / self._costs.num_planes) - 1).bit_length()

    def _copy_ns(self, num_bytes: int, bandwidth: float) -> int:
        return max(self._costs.num_planes * self._costs.copy_ns, round(1e9 * num_bytes / bandwidth))


class HostLink:
    """The link between one instance's GPUs and its host cache. Each direction copies one block of pages after another.

    The host cache's memory was pinned when the server started, so pinning takes no time here.
    """

    def __init__(self, costs: HostCopies) -> None:
        self._page_bytes = costs.page_bytes
        self._num_ranks = costs.num_ranks
        self._bandwidths = {"load": costs.load_bandwidth, "write": costs.save_bandwidth}
        self._free_ns = {"load": 0, "write": 0}

    def copy(self, kind: Literal["load", "write"], num_pages: int, now_ns: int) -> tuple[int, int]:
        """Start and end in ns of a copy, which begins when earlier copies in its direction are done."""
        start_ns = max(now_ns, self._free_ns[kind])
        duration_ns = max(1, round(1e9 * num_pages * self._page_bytes / self._bandwidths[kind]))
        self._free_ns[kind] = end_ns = start_ns + duration_ns
        return start_ns, end_ns

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of these pages on all ranks together."""
        return num_pages * self._page_bytes * self._num_ranks


def end_behind_load(start_ns: int, duration_ns: int, load: tuple[int, int], num_layers: int) -> int:
    """End in ns of a forward whose layers each wait for their part of a load.

    All layers take equally long, and so do all parts of the load, so the first or the last layer decides.
    """
    first_ns, last_ns = load
    behind_first = first_ns + (last_ns - first_ns) // num_layers + duration_ns
    return max(start_ns + duration_ns, behind_first, last_ns + duration_ns // num_layers)


@dataclass(frozen=True, kw_only=True)
class StagingCost:
    """Times of gather and scatter on one rank: host work per call, and one read and one write of every byte."""

    gather_host_ns: int
    scatter_host_ns: int
    gather_bandwidth: float
    """Bytes that a gather reads and writes per second."""
    scatter_bandwidth: float
    num_writers: int
    """Number of prefill ranks whose cells one decode rank scatters in one call."""

    def gather_ns(self, num_bytes: int) -> int:
        return self.gather_host_ns + round(2e9 * num_bytes / self.gather_bandwidth)

    def scatter_ns(self, num_bytes: int) -> int:
        """Time in ns of a scatter. num_bytes: bytes of one writer."""
        return self.scatter_host_ns + round(2e9 * num_bytes * self.num_writers / self.scatter_bandwidth)


@dataclass(frozen=True, kw_only=True)
class StorageCosts:
    """Times and sizes of the storage behind host caches. Bytes are those of all ranks of an instance together."""

    num_pages: int
    """Capacity of the storage in pages."""
    read_page_bytes: int
    write_page_bytes: int
    """Bytes that an instance writes for a page. Where ranks hold the same KV, one rank writes it and each rank reads
    it.
    """
    objects_per_page: int
    """Number of storage objects that hold one page, each with its own read or write."""
    read_bandwidth: float
    """Read rate of all drives together, in bytes per second."""
    write_bandwidth: float
    objects_per_s: float
    """Object reads and writes per second of all drives together."""
    client_bandwidth: float
    """Rate of one instance in bytes per second, in each direction; infinite: no limit."""
    latency_ns: int
    """Fixed latency in ns of one batch of pages (BATCH_PAGES), for a lookup, a read or a write."""

    def objects_per_byte(self, kind: str) -> float:
        return self.objects_per_page / (self.read_page_bytes if kind == "read" else self.write_page_bytes)
