"""Host memory of one instance (SGLang's HiCache, L2): a second prefix cache with its own pages.

KV is written to host memory
  write_through             when it is first inserted as part of a whole prompt or output
  write_through_selective   when it is inserted again as part of a whole prompt or output
  write_back                when the GPU evicts it; tokens before it that only the GPU has are a node without pages
If host memory continues a prompt's cached prefix, the prompt loads all of this KV or nothing. Host nodes that the GPU
also has, or at which a prefetch begins, are locked. Other host nodes can be evicted, leaves first. Host memory may in
turn read from storage: Prefetcher. Law: tests/laws/test_host_cache.py.
"""

from collections.abc import Sequence
from typing import Literal

from pdsim.core import messages as m
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache, path_to
from pdsim.dataclass import dataclass
from pdsim.policy.protocols import EvictionPolicy
from pdsim.policy.views import TokenSequence

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

LEAST_TOKENS = 10
"""Minimum number of tokens to load from host memory. If fewer could be loaded, none is loaded: prefill computes them,
and sends them if decode lacks them (SGLang 0.5.12, hiradix_cache.py, load_back_threshold)."""
_NEVER = 1 << 62
_INSERTS: dict[WritePolicy, int] = {"write_through": 1, "write_through_selective": 2, "write_back": _NEVER}
"""Number of inserts of a whole prompt or output after which a node is written to host memory, for each write policy
(SGLang 0.5.12, hiradix_cache.py, write_through_threshold). With write_back, inserts write nothing.
"""


PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]

TIMEOUT_BASE_NS = 2_000_000_000
TIMEOUT_PER_KI_TOKEN_NS = 100_000_000
TIMEOUT_MAX_NS = 30_000_000_000
"""With the prefetch policy timeout, a prompt waits for its prefetch at most for the base time and the time per 1,024
found tokens, and never longer than this maximum in ns (SGLang 0.5.12, hicache_storage.py, PrefetchTimeoutConfig)."""
_NEVER_NS = 1 << 62


class HostCache:
    def __init__(
        self,
        pool: PagePool,
        prefix_cache: RadixCache,
        eviction: EvictionPolicy,
        write: WritePolicy,
        *,
        least_tokens: int = LEAST_TOKENS,
        stores: bool = False,
    ) -> None:
        """pool: pool of host memory. prefix_cache: the GPU's prefix cache. write: decides when KV is written to host
        memory. least_tokens: minimum number of tokens to load for a prompt. stores: True: pages that are written to
        host memory are also written to storage.
        """
        self.pool = pool
        self.tree = RadixCache(pool, prefix_cache.page_size, eviction, has_drafts=prefix_cache.has_drafts)
        self.writes_back = write == "write_back"
        self._prefix_cache = prefix_cache
        self._page_size = prefix_cache.page_size
        self._num_inserts = _INSERTS[write]
        self._least_tokens = least_tokens
        self._stores = stores
        self.retracted: dict[int, list[int]] = {}
        """Host pages of requests that decode has retracted, by request id."""
        self.copies: list[m.HostCopy] = []
        """Commands for copies and prefetches that were decided since the last call of `take_copies`, in order."""
        self._leaving: list[Node] = []
        """Host nodes of leaves that the GPU evicts at present. These host nodes stay locked until `settle`."""

    def take_copies(self) -> list[m.HostCopy]:
        copies, self.copies = self.copies, []
        return copies

    # Reading from storage.

    def reserve(self, num_pages: int) -> list[int]:
        """Reserves at most num_pages host pages, for KV from storage or of a retracted request, and evicts unlocked
        nodes if needed. Returns fewer pages if no further page is free or can be evicted.
        """
        if num_pages > self.pool.num_free:
            self.tree.evict(num_pages)
        return self.pool.allocate(min(num_pages, self.pool.num_free))

    def take(self, sequence: TokenSequence, below: Node, pages: list[int]) -> None:
        """Adds pages that were read from storage to the host tree. The pages hold the KV of the tokens of `sequence`
        that directly follow the tokens of the locked host node `below`. Frees pages whose KV the host cache has
        already. Links nodes of the GPU's tree to host nodes with the same tokens.
        """
        start, stop = below.stop, below.stop + len(pages) * self._page_size
        end, _ = self.tree.lock_path(sequence, stop)
        num_here = max(0, end.stop - start) // self._page_size
        self.pool.free(pages[:num_here])
        if end.stop < stop:
            leaf, _ = self.tree.insert(sequence, stop, pages[num_here:], end)
            self.tree.touch(leaf)
        self.tree.unlock(end)
        node, _ = self._prefix_cache.lock_path(sequence, stop)
        for step in path_to(node):
            if step.host is None:
                self._link(step)
        self._prefix_cache.unlock(node)

    # Loading.

    def num_loadable_pages(self, sequence: TokenSequence, num_shared: int, max_tokens: int) -> int:
        """Number of host pages that a prompt can load after its first num_shared pages, up to its first max_tokens
        tokens. 0 if these pages have fewer tokens than a load needs (the constructor's least_tokens). The call counts
        as an access to the host nodes.
        """
        self.tree.num_accesses = self._prefix_cache.num_accesses - 2  # one access, of what is here and what is there
        end, _ = self.tree.match(sequence, max_tokens)
        self.tree.unlock(end)
        num_pages = end.stop // self._page_size - num_shared
        return num_pages if num_pages * self._page_size >= self._least_tokens else 0

    def path_behind(self, end: Node, num_tokens: int) -> list[Node]:
        """Nodes on the path from the root to `end`, without those that end within the first num_tokens tokens."""
        return [node for node in path_to(end) if node.stop > num_tokens]

    def keep(self, node: Node, end: Node) -> None:
        """Links `node`, a node of the GPU's tree without a host node, to `end`, the host node that ends at the same
        token. Locks the host node, and copies its creation time and number of hits to the GPU node.
        """
        self.tree.lock(end)
        node.host = end
        node.born, node.num_hits = end.born, end.num_hits

    # Retracted requests.

    def retract(self, request_id: int, pages: Sequence[int]) -> bool:
        """Adds a command that copies all pages of a retracted request to host memory, which keeps them until `resume`
        or `forget`. Returns False, and copies nothing, if host memory has no room.
        """
        host_pages = self.reserve(len(pages))
        if len(host_pages) < len(pages):
            self.pool.free(host_pages)
            return False
        self.retracted[request_id] = host_pages
        self.copies.append(m.WriteBackup(tuple(pages), tuple(host_pages), blocks=True))
        return True

    def resume(self, request_id: int, pages: Sequence[int]) -> None:
        host_pages = self.retracted[request_id]
        self.forget(request_id)
        self.copies.append(m.LoadRetracted(request_id, tuple(host_pages), tuple(pages)))

    def forget(self, request_id: int) -> None:
        """Frees the host pages of a retracted request. No effect if the request has none."""
        self.pool.free(self.retracted.pop(request_id, []))

    # Writing.

    def on_insert(self, node: Node, *, is_whole: bool = True) -> None:
        """Updates the host cache after an insert into the GPU's tree that ends at a node: links the node to host
        memory's KV of the same tokens, and copies nodes to host memory that were inserted often enough. is_whole: True
        for a whole prompt or output, which counts as an insert; False for a chunk.
        """
        if node.host is None and node.parent is not None:
            self._link(node)
        if is_whole:
            for step in path_to(node):
                step.num_inserts += 1
                if step.host is None and step.num_inserts >= self._num_inserts and _follows_host(step):
                    self._write(step)

    def on_evict(self, node: Node) -> None:
        """Called before a leaf of the GPU's tree is evicted. With write_back, adds a command that copies the leaf's
        pages to host memory, if host memory lacks their KV and has room. Then calls `release`.
        """
        if self.writes_back:
            for step in path_to(node):
                if step.host is None:
                    self._write(step, pages=step is node)
            if node.host is not None and not node.host.pages:
                node.host.pages = self._copy(node) or []
        self.release(node)

    def release(self, node: Node) -> None:
        """Ends the link of a leaf, which the GPU's tree is about to evict, to its host node. The host node takes over
        the leaf's creation time, last access and number of hits. `settle` later unlocks the host node. No effect if the
        leaf has no host node.
        """
        end = node.host
        if end is None:
            return
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.host is None:
            self._write(parent)  # a split left it without a lock of its own
        node.host = None
        end.born, end.num_hits, end.last_access = node.born, node.num_hits, node.last_access
        self._leaving.append(end)

    def settle(self) -> None:
        """Unlocks the host nodes of all leaves that the GPU has just evicted. Removes those that have no pages."""
        for end in self._leaving:
            self.tree.unlock(end)
            if not end.pages:
                self.tree.remove(end)
        self._leaving.clear()

    def flush(self) -> None:
        """Evicts all host pages of unlocked host nodes: those whose KV is not also in a GPU page, and that no prefetch
        continues.
        """
        self.settle()
        self.tree.evict(self.tree.num_evictable_pages)

    def _link(self, node: Node) -> None:
        """Links a node of the GPU's tree without a host node to the host nodes that have the same tokens. Splits the
        GPU node where host nodes end.
        """
        end, _ = self.tree.lock_path(node.sequence, node.stop)
        for part in self.path_behind(end, node.start):
            self.keep(node if part.stop == node.stop else self._prefix_cache.split(node, part.stop), part)
        self.tree.unlock(end)

    def _write(self, node: Node, *, pages: bool = True) -> None:
        """Links a node of the GPU's tree to a host node that ends at the same token, and locks the host node. Makes
        this host node if there is none. pages: True: a new host node gets a copy of the node's pages; if host memory
        has no room for them, no host node is made. False: a new host node has no pages.
        """
        end, _ = self.tree.lock_path(node.sequence, node.stop)
        if end.stop < node.stop:
            host_pages = self._copy(node) if pages else []
            if host_pages is None:
                self.tree.unlock(end)
                return
            leaf, _ = self.tree.insert(node.sequence, node.stop, host_pages, end)
            self.tree.lock(leaf, below=end)
            end = leaf
        node.host = end

    def _copy(self, node: Node) -> list[int] | None:
        """Adds a command that copies a GPU node's pages to host memory. Returns the host pages. None: host memory has
        no room.
        """
        pool, num_pages = self.pool, len(node.pages)
        if num_pages > pool.num_free:
            self.tree.evict(num_pages)
        if num_pages > pool.num_free:
            return None
        host_pages = pool.allocate(num_pages)
        self.copies.append(m.WriteBackup(tuple(node.pages), tuple(host_pages), self.writes_back))
        if self._stores:
            self.copies.append(m.StoreKv(node.sequence, node.start, tuple(host_pages)))
        return host_pages


def _follows_host(node: Node) -> bool:
    """True if the parent of a node is the root or has a host node, so that a copy of the node leaves no gap in host
    memory (SGLang's backup invariant).
    """
    parent = node.parent
    return parent is not None and (parent.parent is None or parent.host is not None)


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    policy: PrefetchPolicy
    least_tokens: int
    """Minimum number of tokens for which a prefetch begins (prefetch_threshold)."""
    max_tokens: int
    """If prefetches hold at least this number of tokens, no further prefetch begins (prefetch_capacity_limit)."""


@dataclass(slots=True, eq=False)
class Prefetch:
    request_id: int
    prompt: TokenSequence
    end: Node
    """Node of the host cache's tree at which the prompt's cached prefix ends. The prefetch locks this node."""
    pages: list[int]
    """Host pages reserved for the prefetch, in the prompt's order. The host cache gets the pages that were read; the
    others become free.
    """
    begun_ns: int
    num_found: int = 0
    num_read: int = 0
    num_kept: int = 0
    """Number of the first pages with which the prefetch is done: the host cache has taken them, or has freed them
    because it had the same pages already.
    """
    is_stopped: bool = False


class Prefetcher:
    """Reads KV from storage into host memory while a prompt queues (SGLang's HiCache, L3).

    state     begins when
    begun     a prompt came, and storage may continue its cached prefix    -> PrefetchKv
    stopped   the prompt will be computed, or was given up                 -> StopPrefetch
    over      storage writes into the prefetch's pages no more             on_prefetched

    When a prefetch is stopped or over, the host cache takes the pages that were read. When the prefetch is over, its
    other pages are freed. The policy decides how long a prompt waits. best_effort: not at all. wait_complete: until all
    found pages are read. timeout: like wait_complete, but at most for a time that grows with the number of found pages.
    Law: tests/laws/test_storage.py.
    """

    def __init__(self, host: HostCache, page_size: int, limits: PrefetchLimits) -> None:
        self.under_way: dict[int, Prefetch] = {}
        self._host = host
        self._page_size = page_size
        self._limits = limits
        self._least_pages = max(1, -(-limits.least_tokens // page_size))

    def begin(self, request_id: int, prompt: TokenSequence, num_gpu_tokens: int, now_ns: int) -> None:
        """Begins to read KV of a new prompt from storage into host memory. Begins nothing if only the GPU has some of
        the prompt's cached KV, if too few pages could be read, or if the limit max_tokens is reached. num_gpu_tokens:
        number of the prompt's first tokens that the GPU has cached.
        """
        size, (end, _) = self._page_size, self._host.tree.match(prompt, len(prompt))
        num_pages = (len(prompt) - end.stop) // size
        has_all = end.stop >= num_gpu_tokens and all(node.pages for node in path_to(end))  # none on the GPU alone
        held_tokens = size * sum([len(prefetch.pages) for prefetch in self.under_way.values()])
        if has_all and num_pages >= self._least_pages and held_tokens < self._limits.max_tokens:
            pages = self._host.reserve(num_pages)
            if len(pages) >= self._least_pages:
                self.under_way[request_id] = Prefetch(request_id, prompt, end, pages, now_ns)
                limits = self._least_pages, len(pages)
                self._host.copies.append(m.PrefetchKv(request_id, prompt, end.stop, tuple(pages), *limits))
                return
            self._host.pool.free(pages)
        self._host.tree.unlock(end)

    def awaits(self, request_id: int, now_ns: int) -> bool:
        """True if a prompt must still wait for its prefetch. Otherwise returns False, and stops the prefetch if there
        is one that is not stopped.
        """
        prefetch = self.under_way.get(request_id)
        if prefetch is None or prefetch.is_stopped:
            return False
        if now_ns < self._due_ns(prefetch):
            return True
        self._stop(prefetch)
        return False

    def next_due_ns(self, now_ns: int) -> int | None:
        """Next time in ns, after now_ns, at which a prompt's wait for its prefetch reaches its limit. None: there is no
        such wait, as with best_effort and wait_complete, which have no limit.
        """
        due = [self._due_ns(prefetch) for prefetch in self.under_way.values() if not prefetch.is_stopped]
        return min([time_ns for time_ns in due if now_ns < time_ns < _NEVER_NS], default=None)

    def stop(self, request_id: int) -> None:
        """Stops the prefetch of a prompt that was given up. No effect if there is none."""
        prefetch = self.under_way.get(request_id)
        if prefetch is not None and not prefetch.is_stopped:
            self._stop(prefetch)

    def on_prefetched(self, message: m.Prefetched) -> None:
        """Notes how many pages of a prefetch storage has found and read, and frees the pages beyond those found. If the
        prefetch is over, the host cache takes the pages that were read. A stopped prefetch only frees the rest of its
        pages when it is over. Ignores reports on prefetches that began before the instance restarted.
        """
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
        """Host pages that are reserved for prefetches and that the host cache has not taken yet."""
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
        self._host.copies.append(m.StopPrefetch(prefetch.request_id))

    def _keep(self, prefetch: Prefetch) -> None:
        prefetch.num_kept = prefetch.num_read
        if prefetch.num_read:
            self._host.take(prefetch.prompt, prefetch.end, prefetch.pages[: prefetch.num_read])

    def _free(self, prefetch: Prefetch, num_pages: int) -> None:
        """Frees all pages of a prefetch except the first num_pages."""
        self._host.pool.free(prefetch.pages[num_pages:])
        prefetch.pages = prefetch.pages[:num_pages]
