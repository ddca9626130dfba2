"""Reads KV from storage into host memory while a prompt queues (SGLang's HiCache, L3).

begun     a prompt came, and storage may continue what is here         -> PrefetchKv
stopped   the prompt is to be computed, or was given up                -> StopPrefetch
over      nobody writes into its pages any more                        on_prefetched

The host cache takes what was read when a prefetch is stopped or over; pages that were not read are freed. A policy says
how long a prompt waits: best_effort not at all, wait_complete until all that was found is read, timeout until that or
a time that grows with what was found. Law: tests/laws/test_storage.py.
"""

from dataclasses import dataclass
from typing import Literal

from pdsim.core.host_cache import HostCache
from pdsim.core.messages import Prefetched, PrefetchKv, StopPrefetch
from pdsim.core.radix_cache import Node
from pdsim.policy.views import TokenSequence

PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]

TIMEOUT_BASE_NS = 2_000_000_000
TIMEOUT_PER_KI_TOKEN_NS = 100_000_000
TIMEOUT_MAX_NS = 30_000_000_000
"""SGLang 0.5.12, hicache_storage.py, PrefetchTimeoutConfig."""
_NEVER_NS = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    policy: PrefetchPolicy
    least_tokens: int
    """Fewer are not worth reading (prefetch_threshold)."""
    max_tokens: int
    """No prefetch begins while prefetches hold as many (prefetch_capacity_limit)."""


@dataclass(slots=True, eq=False)
class Prefetch:
    request_id: int
    prompt: TokenSequence
    end: Node
    """The end of what host memory has before it, locked."""
    pages: list[int]
    """Pages of host memory that are held for it, in order; the first of them are given to the host cache."""
    begun_ns: int
    num_found: int = 0
    num_read: int = 0
    num_kept: int = 0
    """Pages that the host cache has taken or freed."""
    is_stopped: bool = False


class Prefetcher:
    def __init__(self, host: HostCache, page_size: int, limits: PrefetchLimits) -> None:
        self.under_way: dict[int, Prefetch] = {}
        self._host = host
        self._page_size = page_size
        self._limits = limits
        self._least_pages = max(1, -(-limits.least_tokens // page_size))

    def begin(self, request_id: int, prompt: TokenSequence, num_gpu_tokens: int, now_ns: int) -> None:
        """Prefetch what continues a prompt, of which the GPU has so many tokens."""
        size, end = self._page_size, self._host.match(prompt)
        num_pages = (len(prompt) - end.stop) // size
        has_all = end.stop >= num_gpu_tokens and self._host.has_pages(end)
        held_tokens = size * sum([len(prefetch.pages) for prefetch in self.under_way.values()])
        if has_all and num_pages >= self._least_pages and held_tokens < self._limits.max_tokens:
            pages = self._host.reserve(num_pages)
            if len(pages) >= self._least_pages:
                self.under_way[request_id] = Prefetch(request_id, prompt, end, pages, now_ns)
                self._host.command(PrefetchKv(request_id, prompt, end.stop, tuple(pages), self._least_pages))
                return
            self._host.pool.free(pages)
        self._host.tree.unlock(end)

    def awaits(self, request_id: int, now_ns: int) -> bool:
        """True if a prompt is not to be computed yet. If it is, no more is read for it."""
        prefetch = self.under_way.get(request_id)
        if prefetch is None or prefetch.is_stopped:
            return False
        if now_ns < self._due_ns(prefetch):
            return True
        self._stop(prefetch)
        return False

    def next_due_ns(self, now_ns: int) -> int | None:
        """Time at which the next prompt stops waiting, whatever is read."""
        due = [self._due_ns(prefetch) for prefetch in self.under_way.values() if not prefetch.is_stopped]
        return min([time_ns for time_ns in due if now_ns < time_ns < _NEVER_NS], default=None)

    def stop(self, request_id: int) -> None:
        """The prompt was given up."""
        prefetch = self.under_way.get(request_id)
        if prefetch is not None and not prefetch.is_stopped:
            self._stop(prefetch)

    def on_prefetched(self, message: Prefetched) -> None:
        """Take a report of storage. One on a prefetch of an earlier life is ignored."""
        prefetch = self.under_way.get(message.request_id)
        if prefetch is None:
            return
        if not prefetch.is_stopped:
            prefetch.num_found, prefetch.num_read = message.num_found, message.num_read
            self._free(prefetch, message.num_found)
        if message.is_over:
            if not prefetch.is_stopped:
                self._keep(prefetch)
            self._free(prefetch, prefetch.num_kept)
            self._host.tree.unlock(prefetch.end)
            del self.under_way[message.request_id]

    def held_pages(self) -> list[int]:
        """Pages of host memory that no cache has yet."""
        return [page for prefetch in self.under_way.values() for page in prefetch.pages[prefetch.num_kept :]]

    def _due_ns(self, prefetch: Prefetch) -> int:
        if self._limits.policy == "best_effort":
            return 0
        if self._limits.policy == "wait_complete":
            return _NEVER_NS
        num_tokens = prefetch.num_found * self._page_size
        wait_ns = TIMEOUT_BASE_NS + TIMEOUT_PER_KI_TOKEN_NS * num_tokens // 1024
        return prefetch.begun_ns + min(TIMEOUT_MAX_NS, wait_ns)

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.is_stopped = True
        self._keep(prefetch)
        self._host.command(StopPrefetch(prefetch.request_id))

    def _keep(self, prefetch: Prefetch) -> None:
        prefetch.num_kept = prefetch.num_read
        if prefetch.num_read:
            self._host.take(prefetch.prompt, prefetch.end, prefetch.pages[: prefetch.num_read])

    def _free(self, prefetch: Prefetch, num_pages: int) -> None:
        """Free its pages behind so many."""
        self._host.pool.free(prefetch.pages[num_pages:])
        prefetch.pages = prefetch.pages[:num_pages]
