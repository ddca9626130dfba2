"""Durations of KV copies other than transfers: between GPU and host memory, between host memory and storage, and
between pages and staging buffers.
"""

from collections import Counter
from math import ceil
from typing import Literal

from pdsim.dataclass import dataclass

SLEEP_NS = 10_000_000
"""vLLM's scheduler asks whether LMCache has found a prompt's pages. Each time that the lookup has not ended yet, the
scheduler sleeps for this time in ns (LMCache 0.5.6, lmcache_async_lookup_client.py:173, 220)."""


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Costs of copying KV to host memory and back, layer by layer over the host link.

    Values are for one rank of the largest pipeline stage, except all_page_bytes. All ranks copy their shares of the KV
    at the same time.
    """

    page_bytes: int
    """Bytes of one page on this rank."""
    all_page_bytes: int
    """Bytes of one page, summed over all ranks."""
    num_planes: int
    """Number of copies per request: one of K and one of V in every layer or, with latent attention, one in every
    layer."""
    copy_ns: int
    """Minimum time in ns of one copy, however small, because the launch of a copy takes time."""
    save_bandwidth: float
    """Rate in bytes per second of copies to host memory."""
    load_bandwidth: float
    """Rate in bytes per second of copies from host memory to the GPU."""
    pinning_bandwidth: float
    """Rate in bytes per second of pinning host memory. Memory is pinned once, before its first copy."""


class HostMemory:
    """Durations of one instance's copies of retracted requests to host memory and back, one after another.

    Each copied array takes pinned memory whose size is a power of two, as in PyTorch's allocator. Memory is pinned
    once; later copies reuse free memory of the same size.
    """

    def __init__(self, costs: HostCopies) -> None:
        self._costs = costs
        self._held_bytes: dict[int, int] = {}
        """KV bytes in host memory, on one rank, by request id."""
        self._free: Counter[int] = Counter()
        """Number of free pinned allocations, by the bytes of one array. Each allocation holds all arrays of a request
        (num_planes)."""

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
        """Drops the host copy of a request. No effect if there is none."""
        if num_bytes := self._held_bytes.pop(request_id, 0):
            self._free[self._plane_bytes(num_bytes)] += 1

    def _plane_bytes(self, num_bytes: int) -> int:
        return 1 << (ceil(num_bytes / self._costs.num_planes) - 1).bit_length()

    def _copy_ns(self, num_bytes: int, bandwidth: float) -> int:
        return max(self._costs.num_planes * self._costs.copy_ns, round(1e9 * num_bytes / bandwidth))


class HostLink:
    """The link between one instance's GPUs and its host cache. Each direction copies one block of pages after another.

    The host cache's memory was pinned when the server started, so copies need no time for pinning.
    """

    def __init__(self, costs: HostCopies) -> None:
        self._page_bytes = costs.page_bytes
        self._all_page_bytes = costs.all_page_bytes
        self._bandwidths = {"load": costs.load_bandwidth, "write": costs.save_bandwidth}
        self._free_ns = {"load": 0, "write": 0}

    def copy(self, kind: Literal["load", "write"], num_pages: int, now_ns: int) -> tuple[int, int]:
        """Returns start and end in ns of a copy that is queued at now_ns. kind: load copies to the GPU, write to the
        host cache. The copy starts when earlier copies in the same direction have ended.
        """
        start_ns = max(now_ns, self._free_ns[kind])
        duration_ns = max(1, round(1e9 * num_pages * self._page_bytes / self._bandwidths[kind]))
        self._free_ns[kind] = end_ns = start_ns + duration_ns
        return start_ns, end_ns

    def num_bytes(self, num_pages: int) -> int:
        """Bytes of num_pages pages, summed over all ranks."""
        return num_pages * self._all_page_bytes


def end_behind_load(start_ns: int, duration_ns: int, load: tuple[int, int], num_layers: int) -> int:
    """Returns the end in ns of a forward in which each layer waits until that layer's KV is loaded. start_ns,
    duration_ns: start of the forward, and its duration without waiting. load: start and end in ns of the load.

    All layers take equally long to load and to compute, so either the first or the last layer determines the end.
    """
    first_ns, last_ns = load
    behind_first = first_ns + (last_ns - first_ns) // num_layers + duration_ns
    return max(start_ns + duration_ns, behind_first, last_ns + duration_ns // num_layers)


def end_of_saves(end_ns: int, save: tuple[int, int], num_layers: int) -> int:
    """Returns the time in ns at which a forward and its saves have ended. The KV of each layer is saved as soon as the
    layer is computed. end_ns: time at which the computation ends. save: start and end in ns of the saves if no save had
    to wait for a layer's computation.

    All layers take equally long to compute and to save, so either the first or the last layer determines the end.
    """
    first_ns, last_ns = save
    return max(end_ns + (last_ns - first_ns) // num_layers, last_ns)


@dataclass(frozen=True, kw_only=True)
class StagingCost:
    """Times of gathering and scattering KV on one rank. Each call has fixed host work, and reads and writes every byte
    once.
    """

    gather_host_ns: int
    """Host work in ns of one gather: a copy from pages into the staging buffer."""
    scatter_host_ns: int
    """Host work in ns of one scatter: a copy from the staging ring into pages."""
    gather_bandwidth: float
    """Number of bytes per second that a gather reads and writes, both added up."""
    scatter_bandwidth: float
    """Number of bytes per second that a scatter reads and writes, both added up."""
    num_writers: int
    """Number of prefill ranks that write to one decode rank. In one call, the decode rank scatters one cell from each
    of these ranks.
    """

    def gather_ns(self, num_bytes: int) -> int:
        return self.gather_host_ns + round(2e9 * num_bytes / self.gather_bandwidth)

    def scatter_ns(self, num_bytes: int) -> int:
        """Returns the time in ns in which a decode rank scatters the cells of num_writers prefill ranks. num_bytes:
        bytes of one cell.
        """
        return self.scatter_host_ns + round(2e9 * num_bytes * self.num_writers / self.scatter_bandwidth)


@dataclass(frozen=True, kw_only=True)
class StorageCosts:
    """Times and sizes of one store that host caches read and write: the store of one server, or the store that all
    servers share. Bytes are summed over all ranks of an instance.
    """

    num_pages: int
    """Capacity of the store, in pages."""
    read_page_bytes: int
    """Bytes that the ranks of an instance together read from storage for one page."""
    write_page_bytes: int
    """Bytes that the ranks of an instance together write to storage for one page. If several ranks hold the same KV,
    one rank writes it. In SGLang each of these ranks reads it, in LMCache one rank.
    """
    read_page_objects: int
    """Number of reads that bring one page to all ranks of an instance."""
    write_page_objects: int
    """Number of writes that bring one page of an instance to storage."""
    read_bandwidth: float
    """Read rate of all drives together in bytes per second."""
    write_bandwidth: float
    """Write rate of all drives together in bytes per second."""
    objects_per_s: float
    """Maximum number of object reads and writes per second, added up, of all drives together."""
    client_bandwidth: float
    """Maximum rate of one instance in bytes per second, separately for reads and for writes. Infinite: no limit."""
    latency_ns: int
    """Fixed time in ns of one batch of pages (BATCH_PAGES), for a lookup, a read or a write."""

    def objects_per_byte(self, kind: str) -> float:
        if kind == "read":
            return self.read_page_objects / self.read_page_bytes
        return self.write_page_objects / self.write_page_bytes
