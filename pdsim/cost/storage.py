"""Times and sizes of storage behind host caches."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StorageCosts:
    """Bytes are those of all ranks of an instance together."""

    num_pages: int
    """Pages that fit."""
    read_page_bytes: int
    write_page_bytes: int
    """Less where ranks hold the same KV: one of them writes it, and each reads it."""
    objects_per_page: int
    """Reads, or writes, that a page takes."""
    read_bandwidth: float
    """Bytes per second of all drives."""
    write_bandwidth: float
    objects_per_s: float
    """Reads and writes of all drives."""
    client_bandwidth: float
    """Bytes per second of one instance, in each direction; infinite: no limit."""
    latency_ns: int
    """Time of a batch of pages before its first byte, or of looking up as many."""

    def objects_per_byte(self, kind: str) -> float:
        return self.objects_per_page / (self.read_page_bytes if kind == "read" else self.write_page_bytes)
