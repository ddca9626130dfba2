"""Laws that hold between any two calls into an instance: for tests, debug runs and the end of every run.

docs/invariants.md lists them with these ids. `check` raises InvariantError with the state that breaks one.
"""

from collections.abc import Iterable
from typing import Any

from pdsim.core.decode_instance import DecodeInstance
from pdsim.core.kv_cache import KvCache, Lease
from pdsim.core.pages import append_pages, count_pages, cut_pages, join_runs
from pdsim.core.prefill_instance import PrefillInstance
from pdsim.core.radix_cache import Node, RadixCache


class InvariantError(AssertionError):
    """A law is broken: a bug in the core."""


def check(instance: PrefillInstance | DecodeInstance) -> None:
    leases = held_leases(instance)
    check_cache(instance.cache, leases)
    if isinstance(instance, DecodeInstance):
        kv_tokens = sum(request.num_kv_tokens for request in instance.running)
        _require(kv_tokens == instance.batch.num_kv_tokens, "BATCH-1", "KV tokens of the batch", kv_tokens, instance)


def check_idle(instance: PrefillInstance | DecodeInstance) -> None:
    """After the last request nothing is held: every page is free or evictable, and nothing is locked."""
    check(instance)
    pool = instance.cache.pool
    _require(not held_leases(instance), "LEAK-1", "leases after the last request", held_leases(instance), instance)
    _require(instance.num_available_pages == pool.num_pages, "LEAK-2", "pages", instance.num_available_pages, pool)


def held_leases(instance: PrefillInstance | DecodeInstance) -> list[Lease]:
    if isinstance(instance, PrefillInstance):
        return [request.lease for request in instance.holding()]
    return [request.lease for request in instance.active]


def check_cache(cache: KvCache, leases: list[Lease]) -> None:
    pool, tree = cache.pool, cache.prefix_cache
    nodes = [] if tree is None else list(_nodes(tree.root))
    private = [run for lease in leases for run in cut_pages(lease.table, lease.num_shared_pages)]
    free = pool.free_runs()
    _require(count_pages(free) == pool.num_free, "PAGE-1", "free pages", count_pages(free), pool.num_free)
    try:
        owned = join_runs((*free, *(run for node in nodes for run in node.pages), *private))
    except RuntimeError as twice:
        raise InvariantError(f"PAGE-2 is broken: a page has two owners: {twice}") from twice
    all_pages = [range(1, pool.num_pages + 1)] if pool.num_pages else []
    _require(owned == all_pages, "PAGE-3", "free, cached and private pages together", owned, pool.num_pages)
    for lease in leases:
        _require(count_pages(lease.table) == lease.num_pages, "PAGE-4", "pages of a lease", lease, lease.num_pages)
    if tree is not None:
        _check_tree(tree, nodes, leases)


def _check_tree(tree: RadixCache, nodes: list[Node], leases: list[Lease]) -> None:
    locks: dict[int, int] = {}
    for lease in leases:
        node = lease.node
        path = []
        while node is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            path.append(node)
            node = node.parent
        shared: list[range] = []
        for node in reversed(path):
            append_pages(shared, node.pages)
        table: list[range] = []
        append_pages(table, cut_pages(lease.table, 0, lease.num_shared_pages))
        _require(table == shared, "TREE-1", "shared pages of a lease are its node's path", table, shared)
    for node in nodes:
        _require(node.locks == locks.get(id(node), 0), "TREE-2", "locks", node.locks, (node.start, node.stop))
        _require(node.num_pages == count_pages(node.pages), "TREE-3", "pages of a node", node.num_pages, node.pages)
        _require(node.stop - node.start == node.num_pages * tree.page_size, "TREE-4", "tokens", node.start, node.stop)
        assert node.parent is not None
        _require(node.parent.stop == node.start, "TREE-5", "a child continues its parent", node.start, node.parent.stop)
        _require(node.parent.locks >= node.locks, "TREE-6", "locks of a parent", node.parent.locks, node.locks)
    evictable = sum(node.num_pages for node in nodes if not node.locks)
    protected = sum(node.num_pages for node in nodes if node.locks)
    _require(tree.num_evictable_pages == evictable, "TREE-7", "evictable", tree.num_evictable_pages, evictable)
    _require(tree.num_protected_pages == protected, "TREE-8", "protected", tree.num_protected_pages, protected)


def _nodes(node: Node) -> Iterable[Node]:
    for child in node.children.values():
        yield child
        yield from _nodes(child)


def _require(holds: bool, law: str, what: str, found: Any, context: Any) -> None:
    if not holds:
        raise InvariantError(f"{law} is broken: {what}: found {found!r}; {context!r}")
