"""The KV of one rank in Mooncake's distributed store, behind its host memory (SGLang's HiCache, L3).

A page of a rank is one object: all its planes (K, V or latents of one layer), as they lie in host memory. Its name is a
hash of all tokens up to the page's end, and the rank. Ranks with latents hold the same KV: rank 0 writes it, and its
name has no rank. SGLang 0.5.23 names objects in this way, but stores K and V as two objects
(mem_cache/storage/mooncake_store/mooncake_store.py:1313, _get_mha_buffer_meta; mem_cache/hicache_storage.py:69,
is_storage_writer).
"""

import hashlib
from collections.abc import Iterator, Sequence
from time import monotonic_ns
from typing import NamedTuple

from pdreal.memory.paged_kv import HostKv
from pdreal.transports.mooncake_store import MooncakeStore
from pdsim.core.memory.prefetch_queue import BATCH_PAGES
from pdsim.policy.views import TokenSequence


class Moved(NamedTuple):
    """Pages that a rank has read or written. Start and end are times of the monotonic clock, in ns."""

    num_pages: int
    """Number of pages that were read or written."""
    start_ns: int
    end_ns: int


def page_hashes(sequence: TokenSequence, page_size: int, start_tokens: int, num_pages: int) -> list[str]:
    """Returns hashes of the num_pages pages that follow the first start_tokens tokens of a sequence. A hash is the
    SHA-256 of the hash of the page before and of the page's tokens, as 32-bit integers (SGLang 0.5.23,
    mem_cache/utils.py:116, get_hash_str). The list ends before the first page that has tokens whose ids are unknown.
    """
    digest, hashes = b"", []
    for start in range(0, start_tokens + num_pages * page_size, page_size):
        tokens = sequence.page_key(start, page_size)
        if not isinstance(tokens, bytes):
            break
        digest = hashlib.sha256(digest + tokens).digest()
        if start >= start_tokens:
            hashes.append(digest.hex())
    return hashes


class StoredKv:
    def __init__(self, host: HostKv, store: MooncakeStore, rank: int, *, is_same: bool) -> None:
        """host: memory that holds the pages. store: client of the storage. rank: index of this rank. is_same: True: all
        ranks of the instance hold the same KV.
        """
        self._store = store
        self._writes = not is_same or rank == 0
        self._begin = host.memory.data_ptr()
        self._page_bytes = host.memory[0].nbytes
        self._suffix = "" if is_same else f"_{rank}"
        store.register(host.memory)

    def num_there(self, hashes: Sequence[str]) -> int:
        """Returns how many pages the store has, counted from the first one up to a missing one."""
        num_there = 0
        for batch in _batches(hashes):
            num_there += (found := self._store.num_there(self._names(hashes[batch])))
            if found < len(hashes[batch]):
                break
        return num_there

    def read(self, hashes: Sequence[str], host_pages: Sequence[int]) -> Moved:
        """Reads pages from the store into host memory, all with one call. hashes: hash of each page to read.
        host_pages: for each of them, id of the host page to fill. In the result, num_pages is the number of pages
        before the first page that could not be read.
        """
        start_ns = monotonic_ns()
        num_read = self._store.read(self._names(hashes), self._places(host_pages), self._page_bytes)
        return Moved(num_read, start_ns, monotonic_ns())

    def write(self, hashes: Sequence[str], host_pages: Sequence[int]) -> Moved:
        """Writes pages that the store lacks, batch by batch. If the store does not take a page, the page's batch does
        not count as written, and later batches are left out (managers/cache_controller.py:1416, _page_backup). If all
        ranks hold the same KV, only rank 0 writes. Returns the number of pages that were written, with times.
        """
        start_ns, num_written = monotonic_ns(), 0
        for batch in _batches(hashes) if self._writes else ():
            names, places = self._names(hashes[batch]), self._places(host_pages[batch])
            missing = self._store.missing(names)
            if missing and not self._store.write(
                [names[i] for i in missing], [places[i] for i in missing], self._page_bytes
            ):
                break
            num_written += len(missing)
        return Moved(num_written, start_ns, monotonic_ns())

    def _names(self, hashes: Sequence[str]) -> list[str]:
        return [page_hash + self._suffix for page_hash in hashes]

    def _places(self, host_pages: Sequence[int]) -> list[int]:
        return [self._begin + page * self._page_bytes for page in host_pages]


def _batches(pages: Sequence[str]) -> Iterator[slice]:
    return (slice(i, i + BATCH_PAGES) for i in range(0, len(pages), BATCH_PAGES))
