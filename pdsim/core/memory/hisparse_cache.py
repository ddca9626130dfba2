"""The KV memory of a decode instance with HiSparse: all KV in host memory, and a buffer of each request on the GPU.

The pages of the pool are in host memory. A request holds them from its admission, because prefill sends its KV there.
When the KV has arrived, the request also gets a buffer: as many GPU pages as its KV has or, if its KV fills the buffer,
the whole buffer and one page for the newest token. The buffer grows with the request, and is freed with its lease.

Source: SGLang 0.5.23, managers/hisparse_coordinator.py:878 (admit_request_direct), 937 (alloc_device_buffer), 987
(_grow_device_buffers), disaggregation/decode.py:2321. Law: tests/laws/test_hisparse.py.
"""

from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.radix_cache import PagePool
from pdsim.policy.views import TokenSequence


class BufferedLease(Lease):
    """A request's page table, whose pages are in host memory, and the number of GPU pages of the request's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_buffer_pages = 0
        """Number of GPU pages. 0: the request's KV has not arrived yet."""


class DeviceBuffers:
    """The GPU pages from which an instance gives each request a buffer. The pages are only counted and have no ids,
    because no transfer writes into them.
    """

    def __init__(self, num_pages: int, page_size: int, buffer_tokens: int) -> None:
        """buffer_tokens: tokens of a whole buffer without the page for the newest token (device_buffer_size), a
        multiple of page_size.
        """
        self.num_pages = self.num_free = num_pages
        self.buffer_tokens = buffer_tokens
        self.pages_per_buffer = buffer_tokens // page_size + 1

    def num_needed(self, num_kv_pages: int) -> int:
        """Number of GPU pages in the buffer of a request whose KV has num_kv_pages pages in host memory."""
        return num_kv_pages if num_kv_pages < self.pages_per_buffer - 1 else self.pages_per_buffer


class HiSparseCache(KvCache):
    """The KV memory of a decode instance with HiSparse. A lease holds host pages, and the number of GPU pages of the
    request's buffer. There is no prefix cache (arg_groups/hisparse_hook.py:109).
    """

    def __init__(self, pool: PagePool, page_size: int, buffers: DeviceBuffers) -> None:
        super().__init__(pool, page_size, None)
        self.buffers = buffers

    def open(self, sequence: TokenSequence, max_tokens: int) -> Lease:
        return BufferedLease()

    def open_buffer(self, lease: Lease) -> bool:
        """Allocates the GPU buffer of a request whose KV has arrived in host memory. Returns False if too few GPU pages
        are free.
        """
        assert isinstance(lease, BufferedLease)
        lacking = self.num_lacking(lease, 0)
        if lacking > self.buffers.num_free:
            return False
        self._grow_buffer(lease, lacking)
        return True

    def num_lacking(self, lease: Lease, num_new_pages: int) -> int:
        """Number of further GPU pages that a request needs if its KV grows by num_new_pages pages."""
        assert isinstance(lease, BufferedLease)
        return self.buffers.num_needed(len(lease.table) + num_new_pages) - lease.num_buffer_pages

    def grow_all(self, leases: list[Lease], num_pages: int) -> None:
        """Allocates num_pages pages of host memory, and gives them to the leases in turn, one page at a time. Then lets
        the leases' GPU buffers grow.
        """
        super().grow_all(leases, num_pages)
        for lease in leases:
            self._grow_buffer(lease, self.num_lacking(lease, 0))

    def drop(self, lease: Lease) -> None:
        assert isinstance(lease, BufferedLease)
        super().drop(lease)
        self.buffers.num_free += lease.num_buffer_pages
        lease.num_buffer_pages = 0

    def _grow_buffer(self, lease: Lease, num_pages: int) -> None:
        assert isinstance(lease, BufferedLease)
        lease.num_buffer_pages += num_pages
        self.buffers.num_free -= num_pages
