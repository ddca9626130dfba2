"""Checks of laws: `check`, which only tests call, of laws that hold between any two calls into an instance, and
`check_all_idle` of laws that hold at the end of every run.

docs/invariants.md lists the laws with the ids that are used here. The checks raise InvariantError with the state that
breaks a law.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.encode.divided_requests import DividedRequests
from pdsim.core.encode.encode_instance import EncodeInstance
from pdsim.core.memory.hisparse_cache import BufferedLease, HiSparseCache
from pdsim.core.memory.host_cache import HostCache, Prefetcher
from pdsim.core.memory.hybrid_cache import HybridKvCache, HybridLease
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.kvbm_cache import KvbmCache
from pdsim.core.memory.offload_cache import OffloadCache
from pdsim.core.memory.radix_cache import Node, PagePool, RadixCache, path_to
from pdsim.core.memory.vllm_hybrid_cache import VllmHybridCache
from pdsim.core.prefill.prefill_instance import PrefillInstance
from pdsim.core.routing.router import Router
from pdsim.core.transfer.receiver import Receiver
from pdsim.core.transfer.sender import Sender
from pdsim.core.vllm.vllm_encode_instance import VllmEncodeInstance

AnyInstance = PrefillInstance | DecodeInstance | AggregatedInstance


class InvariantError(AssertionError):
    """Raised if a law is broken, which is a bug in the core."""


def check(instance: AnyInstance) -> None:
    leases = held_leases(instance)
    check_cache(instance.cache, leases)
    if isinstance(instance, DecodeInstance | AggregatedInstance):
        kv_tokens = sum(request.num_kv_tokens for request in instance.batch.requests())
        _require(kv_tokens == instance.batch.num_kv_tokens, "BATCH-1", "KV tokens of the batch", kv_tokens, instance)


def check_idle(instance: AnyInstance) -> None:
    """Raises InvariantError if an instance still holds something after the last request has ended: a lease, a page that
    is neither free nor evictable, a prefetch, pages of a retracted request, a copy or lookup of host memory, or a
    request. The check is fast enough for the end of every run.
    """
    pool = instance.cache.pool
    _require(not held_leases(instance), "LEAK-1", "leases after the last request", held_leases(instance), instance)
    _require(instance.num_available_pages == pool.num_pages, "LEAK-2", "pages", instance.num_available_pages, pool)
    prefetcher = instance.cache.prefetcher
    _require(prefetcher is None or not prefetcher.under_way, "LEAK-7", "prefetches", prefetcher, instance)
    host = instance.cache.host
    _require(host is None or not host.retracted, "LEAK-7", "retracted requests in host memory", host, instance)
    offload = instance.cache.offload
    _require(offload is None or not (offload.stores or offload.loads), "LEAK-7", "copies of blocks", offload, instance)
    chunks = instance.cache.chunks
    _require(chunks is None or not chunks.lookups, "LEAK-7", "lookups of prompts", chunks, instance)
    if isinstance(instance.cache, HiSparseCache):
        buffers = instance.cache.buffers
        _require(buffers.num_free == buffers.num_pages, "LEAK-2", "pages of buffers", buffers.num_free, instance)
    _require(not instance.requests(), "LEAK-3", "requests after the last one", instance.requests(), instance)


def check_all_idle(machines: Iterable[Any]) -> None:
    """Raises InvariantError if a state machine of a cluster still holds something of a request after the last request
    has ended. machines: instances, senders and receivers of KV, `DividedRequests` (which wait for encode instances),
    and the router.
    """
    for machine in machines:
        if isinstance(machine, AnyInstance):
            check_idle(machine)
        elif isinstance(machine, Sender):
            _require(not machine.held, "LEAK-4", "units or spans in a sender", machine.held, machine.instance_id)
        elif isinstance(machine, Receiver):
            _require(not machine.held, "LEAK-5", "requests in a receiver", machine.held, machine.instance_id)
            _require(machine.ring.num_live_bytes == 0, "LEAK-5", "ring bytes", machine.ring.num_live_bytes, machine)
        elif isinstance(machine, EncodeInstance | VllmEncodeInstance):
            _require(not machine.waiting_for(), "LEAK-8", "media in an encode instance", machine.waiting, machine)
        elif isinstance(machine, DividedRequests):
            _require(not machine.waiting, "LEAK-8", "requests without embeddings", machine.waiting, machine.instance_id)
        elif isinstance(machine, Router):
            _require(not machine.live, "LEAK-6", "requests in the router", machine.live, machine)
            for load in (load for role in machine.roles.values() for load in role.loads):
                _require(load.num_requests == load.num_tokens == 0, "LEAK-6", "load of an instance", load, machine)


def held_leases(instance: AnyInstance) -> list[Lease]:
    return [request.lease for request in instance.holding()]


def check_cache(cache: KvCache, leases: list[Lease]) -> None:
    pool, tree = cache.pool, cache.prefix_cache
    nodes = [] if tree is None else list(_nodes(tree.root))
    twins = [page for node in nodes for _, pages in node.twins for page in pages]
    private = [page for lease in leases for page in (*lease.table[lease.num_shared :], *lease.replaced)]
    in_use = {page for lease in leases for page in (*lease.table, *lease.replaced)}
    if isinstance(cache, VllmHybridCache):
        private += cache.state_pages(leases)
        in_use |= {page for state in cache.held_states(leases) for page in state.pages}
        in_use |= {-page for page in range(1, cache.num_left_pages + 1)}  # whichever these are
    _check_pool(pool, [*private, *twins], nodes)
    _require(cache.num_available_pages == pool.num_pages - len(in_use), "PAGE-3", "available", in_use, cache)
    if isinstance(cache, HiSparseCache):
        _check_buffers(cache, leases)
    if tree is None:
        return
    for lease in leases:
        shared = [page for node in path_to(lease.node) for page in _pages_of(node, lease)]
        table = lease.table[: lease.num_shared]
        _require(table == shared, "TREE-1", "shared pages of a lease are its node's path", table, shared)
    _check_tree(tree, nodes, [lease.node for lease in leases])
    if cache.host is not None:
        _check_host(cache.host, nodes, cache.prefetcher)
    if isinstance(cache.offload, KvbmCache):
        _check_kvbm(cache.offload)
    elif cache.offload is not None:
        _check_offload(cache.offload)
    if cache.chunks is not None:
        pool, places, lookups = cache.chunks.pool, cache.chunks.places, cache.chunks.lookups
        read = [place for lookup in lookups.values() for place in lookup.read]
        _check_pool(pool, [*places.values(), *read], [])
    if isinstance(cache, HybridKvCache):
        _check_states(cache, nodes, leases)


def _check_buffers(cache: HiSparseCache, leases: Sequence[Lease]) -> None:
    """Raises InvariantError if a lease of HiSparse has a wrong number of GPU pages, or if held and free GPU pages do
    not make up all GPU pages. A lease has no GPU page before its KV has arrived, and then as many as `num_needed`
    returns: one for each page of short KV, a whole buffer for longer KV.
    """
    buffers, num_held = cache.buffers, 0
    for lease in leases:
        assert isinstance(lease, BufferedLease)
        num_held += lease.num_buffer_pages
        expected = (0, buffers.num_needed(len(lease.table)))
        _require(lease.num_buffer_pages in expected, "BUFFER-1", "pages of a buffer", lease.num_buffer_pages, lease)
    _require(num_held + buffers.num_free == buffers.num_pages, "BUFFER-1", "pages of buffers", num_held, buffers)
    _require(buffers.num_free >= 0, "BUFFER-1", "free pages", buffers.num_free, buffers)


def _check_states(cache: HybridKvCache, nodes: list[Node], leases: list[Lease]) -> None:
    states = cache.states
    held = sum(lease.num_slots for lease in leases if isinstance(lease, HybridLease))
    slots = states.num_free, held, len(states.kept)
    _require(sum(slots) == states.num_slots, "STATE-1", "slots free, held and kept", slots, states.num_slots)
    _require(states.kept.keys() <= set(nodes), "STATE-2", "nodes with a state", states.kept, nodes)
    users = Counter(lease.node for lease in leases)
    counted = {node: users[node] for node in states.kept}
    _require(states.kept == counted, "STATE-3", "leases on nodes with a state", states.kept, counted)


def _check_pool(pool: PagePool, private: list[int], nodes: list[Node]) -> None:
    free = pool.free_pages()
    _require(len(free) == pool.num_free, "PAGE-1", "free pages", len(free), pool.num_free)
    owned = sorted([*free, *private, *(page for node in nodes for page in node.pages)])
    _require(owned == list(range(1, pool.num_pages + 1)), "PAGE-2", "every page has one owner", owned, pool.num_pages)


def _check_host(host: HostCache, nodes: list[Node], prefetcher: Prefetcher | None) -> None:
    """Raises InvariantError unless each host page has one owner, the host cache's tree passes `_check_tree`, and each
    node of the GPU's tree with a `host` (its node in the host cache's tree) has the same tokens as this host node.

    nodes: all nodes of the GPU's tree except the root. prefetcher: owns the host pages that are reserved for reads from
    storage; None: there is no storage.
    """
    written = [(node, node.host) for node in nodes if node.host is not None]
    in_host = list(_nodes(host.tree.root))
    held = [page for pages in host.retracted.values() for page in pages]
    held += [] if prefetcher is None else prefetcher.held_pages()
    _check_pool(host.pool, held, in_host)
    ends = [] if prefetcher is None else [prefetch.end for prefetch in prefetcher.under_way.values()]
    _check_tree(host.tree, in_host, [*(end for _, end in written), *ends], has_gaps=host.writes_back)
    known = set(map(id, in_host))
    for node, end in written:
        same = end.stop == node.stop <= node.sequence.common_prefix(0, end.sequence, 0)
        _require(same and id(end) in known, "HOST-1", "its end in host memory", (end.start, end.stop), node.stop)


def _check_offload(offload: OffloadCache) -> None:
    in_host = list(_nodes(offload.tree.root))
    _check_pool(offload.pool, [page for pages in offload.states.values() for page in pages], in_host)
    _require(offload.states.keys() <= set(in_host), "STATE-2", "nodes with a state", offload.states, in_host)
    copies = (*offload.stores.values(), *offload.loads.values())
    _check_tree(offload.tree, in_host, [copy.end for copy in copies])
    for copy in copies:
        on_path = [page for node in path_to(copy.end) for page in (*node.pages, *offload.states.get(node, ()))]
        _require(set(copy.host_pages) <= set(on_path), "HOST-2", "pages of a copy on its path", copy, on_path)


def _check_kvbm(host: KvbmCache) -> None:
    stored = [page for store in host.stores.values() for page in store.host_pages]
    _check_pool(host.pool, [*host.places.values(), *stored], [])
    loaded = {key for keys in host.loads.values() for key in keys}
    _require(host.idle.keys() == host.places.keys() - loaded, "HOST-3", "blocks to evict", host.idle, host.loads)
    _require(loaded <= host.places.keys(), "HOST-3", "blocks that are loaded", loaded, host.places)


def _check_tree(tree: RadixCache, nodes: list[Node], locked: Iterable[Node | None], *, has_gaps: bool = False) -> None:
    """Checks locks, tokens and page counts of a radix tree. nodes: all nodes except the root. locked: last node of each
    locked path. has_gaps: True: locked nodes may lack pages. Raises InvariantError.
    """
    locks = Counter(id(node) for end in locked for node in path_to(end))
    for node in nodes:
        _require(node.locks == locks[id(node)], "TREE-2", "locks", node.locks, (node.start, node.stop))
        whole = node.stop - node.start == node.num_pages * tree.page_size
        _require(whole or (has_gaps and node.locks > 0 and not node.pages), "TREE-3", "tokens", node.start, node.stop)
        assert node.parent is not None
        _require(node.parent.stop == node.start, "TREE-4", "a child continues its parent", node.start, node.parent.stop)
        _require(node.parent.locks >= node.locks, "TREE-5", "locks of a parent", node.parent.locks, node.locks)
    read = sum(node.num_pages for node in nodes if node.readers)
    _require(tree.num_read_pages == read, "TREE-7", "pages that decode steps read", tree.num_read_pages, read)
    evictable = sum(node.num_pages for node in nodes if node.locks == node.num_twins)
    _require(tree.num_evictable_pages == evictable, "TREE-6", "evictable", tree.num_evictable_pages, evictable)


def _pages_of(node: Node, lease: Lease) -> Sequence[int]:
    """Returns the pages that a lease uses for a node: the lease's own copies if it has any, else the node's pages."""
    return next((pages for holder, pages in node.twins if holder is lease), node.pages)


def _nodes(node: Node) -> Iterable[Node]:
    for child in node.children.values():
        yield child
        yield from _nodes(child)


def _require(holds: bool, law: str, what: str, found: Any, context: Any) -> None:
    if not holds:
        raise InvariantError(f"{law} is broken: {what}: found {found!r}; {context!r}")
