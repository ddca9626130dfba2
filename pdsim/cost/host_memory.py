"""What it takes to copy the KV of retracted requests to host memory and back, layer by layer over the host link."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostCopies:
    """Of one rank; all ranks copy their shares at the same time."""

    page_bytes: int
    num_planes: int
    """Copies that one request takes: of K and of V, in every layer."""
    copy_ns: int
    """Launching one of them, where its bytes take no longer."""
    save_bandwidth: float
    """Bytes per second."""
    load_bandwidth: float
    pinning_bandwidth: float
    """At which host memory is first made fit for copies; it stays so."""


class HostMemory:
    """Times the copies of one instance, one after another."""

    def __init__(self, costs: HostCopies) -> None:
        self._costs = costs
        self._held_bytes: dict[int, int] = {}
        """By request."""
        self._pinned_bytes = 0

    def save_ns(self, request_id: int, num_pages: int) -> int:
        of, num_bytes = self._costs, num_pages * self._costs.page_bytes
        self._held_bytes[request_id] = num_bytes
        more = max(0, sum(self._held_bytes.values()) - self._pinned_bytes)
        self._pinned_bytes += more
        return self._copy_ns(num_bytes, of.save_bandwidth) + round(1e9 * more / of.pinning_bandwidth)

    def load_ns(self, request_id: int) -> int:
        return self._copy_ns(self._held_bytes.pop(request_id), self._costs.load_bandwidth)

    def forget(self, request_id: int) -> None:
        """It was given up; of one that has nothing here, nothing."""
        self._held_bytes.pop(request_id, None)

    def _copy_ns(self, num_bytes: int, bandwidth: float) -> int:
        return max(self._costs.num_planes * self._costs.copy_ns, round(1e9 * num_bytes / bandwidth))
