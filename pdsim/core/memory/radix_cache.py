"""The prefix cache of one instance: a compressed trie over whole pages, whose nodes own KV pages.

A node is
  protected   if requests lock the node or a node below it
  evictable   if no request locks it, or only requests that hold their own copies of its pages
Eviction returns a node's pages to the pool, leaves first. Law: tests/laws/test_radix_cache.py.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from pdsim.core.memory.page_pool import PagePool
from pdsim.core.sequence import UnseenOutput
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.protocols import EvictionPolicy
from pdsim.policy.views import TokenSequence


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Tokens [start, stop) of an inserted sequence, with the pages that hold their KV."""

    parent: "Node | None"
    key: Hashable
    sequence: Any
    start: int
    stop: int
    pages: Sequence[int]
    born: int
    last_access: int
    num_hits: int = 0
    num_inserts: int = 0
    """Number of whole prompts and outputs that were inserted through the node. Used with host memory only."""
    locks: int = 0
    readers: int = 0
    walk: int = 0
    """Number of the last call of `num_repeated_tokens` that visited the node."""
    heap_serial: int = 0
    num_twins: int = 0
    """Number of locks whose requests hold their own copies of the node's pages, in `twins`."""
    twins: list[tuple[object, Sequence[int]]] = field(default_factory=list)
    host: "Node | None" = None
    """Node of the host cache that ends at the same token, locked for this node. None: not known to be in host
    memory."""
    children: dict[Hashable, "Node"] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return len(self.pages)


Match = tuple[Node, list[int]]
"""A cached prefix: its deepest node, and its pages in order."""


class RadixCache:
    """A prefix cache that owns the pages of its nodes, and frees them to the pool at eviction. Without a pool no pages
    are owned.

    With drafts (`has_drafts`) a token's KV includes the draft's KV, which depends on the next token. The key of a token
    is then the pair of both tokens, and the last token of a sequence has no key (SGLang's bigram keys).
    """

    def __init__(
        self, pool: PagePool | None, page_size: int, eviction: EvictionPolicy, *, has_drafts: bool = False
    ) -> None:
        self.page_size = page_size
        self.has_drafts = has_drafts
        self._num_next = int(has_drafts)
        """Number of tokens after a page that belong to its key."""
        self.uses_whole_nodes = True
        """True: a match that ends inside a node counts as an access of the whole node, as in SGLang."""
        self.evicts_pages = False
        """True: a leaf loses only as many of its last pages as are lacking, and a match is no access, as in vLLM."""
        self.evicts_by_recency = isinstance(eviction, LeastRecentlyUsed)
        self.num_evictable_pages = 0
        self.num_read_pages = 0
        """Number of pages that decode steps read, each counted once."""
        self.root = Node(None, None, None, 0, 0, [], 0, 0)
        self._pool = pool
        self._eviction = eviction
        self.num_accesses = 0
        """Even; the odd ones between them are of what was split off behind a match."""
        self._num_walks = 0
        self._heap: list[tuple[Any, int, Node]] = []
        self._serial = 0
        self._compact_above = 64

    def peek(self, sequence: TokenSequence) -> int:
        """Number of tokens of the longest cached prefix. The call changes nothing."""
        stop = self.num_cacheable(len(sequence))
        child, end = self._next(self.root, sequence, stop)
        while child is not None and end == child.stop:
            child, end = self._next(child, sequence, stop)
        return end

    def whole_nodes(self, sequence: TokenSequence) -> list[Node]:
        """The nodes, from the first, whose tokens the sequence has completely. The call changes nothing."""
        nodes: list[Node] = []
        stop = self.num_cacheable(len(sequence))
        child, end = self._next(self.root, sequence, stop)
        while child is not None and end == child.stop:
            nodes.append(child)
            child, end = self._next(child, sequence, stop)
        return nodes

    def places(self, sequence: TokenSequence) -> tuple[int, ...]:
        """Path of the longest cached prefix: the place of each node among its siblings, by age."""
        siblings = [(node, node.parent.children.values()) for node in self.whole_nodes(sequence) if node.parent]
        return tuple([list(among).index(node) for node, among in siblings])

    def split_at_match(self, sequence: TokenSequence, max_tokens: int) -> Node:
        """The node that ends where the longest cached prefix of at most max_tokens ends, in whole pages. A node that
        matches in part is split there, and both parts count as accessed.
        """
        stop = self.num_cacheable(min(max_tokens, len(sequence)))
        node = self.root
        child, end = self._next(node, sequence, stop)
        while child is not None and end == child.stop:
            node = child
            child, end = self._next(node, sequence, stop)
        if child is None:
            return node
        head = self.split(child, end)
        head.last_access = child.last_access = self.num_accesses + 1
        self._offer(child)
        return head

    def match(self, sequence: TokenSequence, max_tokens: int) -> Match:
        """The longest cached prefix of at most max_tokens, in whole pages, locked. A partly matching node is split."""
        node, pages = self._descend(self.root, sequence, self.num_cacheable(min(max_tokens, len(sequence))))
        self.lock(node)
        if not self.evicts_pages:
            self.touch(node)
        return node, pages

    def lock_path(self, sequence: TokenSequence, num_tokens: int) -> Match:
        """Locks and returns the cached prefix of at most num_tokens, in whole pages. The call does not count as an
        access.
        """
        node, pages = self._descend(self.root, sequence, num_tokens)
        self.lock(node)
        return node, pages

    def insert(self, sequence: TokenSequence, num_tokens: int, pages: Sequence[int], below: Node) -> Match:
        """Caches the first num_tokens (a result of num_cacheable), of which `below` already covers the beginning.

        `pages` hold the tokens after `below`. The tree takes the pages of tokens that it had not cached; the first
        pages, of tokens that it had, stay the caller's. Returns the last node, and the tree's pages in place of the
        caller's. The caller calls `touch`.
        """
        node, found = self._descend(below, sequence, num_tokens)
        if node.stop < num_tokens:
            key, now = self._key(sequence, node.stop), self.num_accesses + 1
            own = pages[len(found) :] if found else pages
            leaf = Node(node, key, sequence, node.stop, num_tokens, own, now, now)
            node.children[key] = leaf
            if not node.num_twins:
                node.heap_serial = 0
            self.num_evictable_pages += len(own)
            node = leaf
        return node, found

    def touch(self, node: Node, hits_behind: int | None = None) -> None:
        """Counts an access to the path that ends in node, and a hit of each node on it that ends after hits_behind
        tokens. None: no hits, because the lookup may be repeated or have no effect.
        """
        self.num_accesses += 2
        step: Node | None = node
        while step is not None:
            step.last_access = self.num_accesses
            if hits_behind is not None and step.stop > hits_behind:
                step.num_hits += 1
            step = step.parent
        self._offer(node)

    def lock(self, node: Node, below: Node | None = None) -> None:
        """Locks the path to node, or its part after `below`."""
        step: Node | None = node
        while step is not below and step is not None:
            if step.locks == step.num_twins:
                self.num_evictable_pages -= len(step.pages)
                step.heap_serial = 0
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            assert step.locks > 0, f"node [{step.start}, {step.stop}) unlocked more often than locked"
            step.locks -= 1
            if step.locks == step.num_twins:
                self.num_evictable_pages += len(step.pages)
                self._offer(step)
            step = step.parent

    def keep_twins(self, node: Node, below: Node, holder: object, pages: Sequence[int]) -> None:
        """Records that the holder of a lock has its own copies of the pages of the first nodes after `below`."""
        path = path_to(node)
        start = 0
        for step in path[path.index(below) + 1 if below.parent is not None else 0 :]:
            if start == len(pages):
                break
            step.twins.append((holder, pages[start : start + len(step.pages)]))
            step.num_twins += 1
            start += len(step.pages)
            if step.locks == step.num_twins:
                self.num_evictable_pages += len(step.pages)
                self._offer(step)

    def drop_twins(self, node: Node, holder: object) -> None:
        """Frees the page copies that a lock's holder has of nodes on the path to node."""
        step: Node | None = node
        while step is not None:
            for twin in step.twins:
                if twin[0] is holder:
                    if step.locks == step.num_twins:
                        self.num_evictable_pages -= len(step.pages)
                        step.heap_serial = 0
                    step.twins.remove(twin)
                    step.num_twins -= 1
                    if self._pool is not None:
                        self._pool.free(twin[1])
                    break
            step = step.parent

    def add_reader(self, node: Node) -> None:
        """Counts one more request whose decode steps read the path to node."""
        step: Node | None = node
        while step is not None:
            step.readers += 1
            if step.readers == 1:
                self.num_read_pages += len(step.pages)
            step = step.parent

    def remove_reader(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.readers -= 1
            if step.readers == 0:
                self.num_read_pages -= len(step.pages)
            step = step.parent

    def num_repeated_tokens(self, nodes: Iterable[Node | None]) -> int:
        """Number of tokens on the paths to these nodes that several requests read, counted once per reading after the
        first.
        """
        self._num_walks += 1
        walk = self.root.walk = self._num_walks
        num_tokens = 0
        for node in nodes:
            step = node
            while step is not None and step.readers == 1:
                step = step.parent
            while step is not None and step.walk != walk:
                step.walk = walk
                step = step.parent
            num_tokens += 0 if step is None else step.stop
        return num_tokens

    def evict(self, num_pages: int, leaving: Callable[[Node], None] | None = None) -> int:
        """Evicts leaves until num_pages are freed or all nodes are locked. Returns the number of freed pages. With
        evicts_pages the last leaf may be evicted in part. leaving: called with each leaf before its eviction.
        """
        freed = 0
        while freed < num_pages and self._heap:
            _, serial, node = heappop(self._heap)
            if serial != node.heap_serial:
                continue
            if self.evicts_pages and len(node.pages) > num_pages - freed:
                self._cut(node, num_pages - freed)
            if node.twins:
                freed += self._replace(node)
                continue
            parent = node.parent
            assert parent is not None
            if leaving is not None:
                leaving(node)
            del parent.children[node.key]
            node.parent, node.heap_serial = None, 0
            if self._pool is not None:
                self._pool.free(node.pages)
            freed += len(node.pages)
            self._offer(parent)
        self.num_evictable_pages -= freed
        return freed

    def next_access(self) -> int | None:
        """The last access of the leaf that is evicted next. None: no leaf is evictable."""
        while self._heap and self._heap[0][1] != self._heap[0][2].heap_serial:
            heappop(self._heap)
        return self._heap[0][2].last_access if self._heap else None

    def _cut(self, node: Node, num_pages: int) -> None:
        """Splits a node, which keeps its last num_pages. The pages before can be evicted later."""
        self._offer(self.split(node, node.stop - num_pages * self.page_size))

    def _replace(self, node: Node) -> int:
        """Frees the pages of a node, which takes over the pages of its first twin. Returns their number."""
        if self._pool is not None:
            self._pool.free(node.pages)
        (_, node.pages), *node.twins = node.twins
        node.num_twins -= 1
        node.heap_serial = 0
        return len(node.pages)

    def remove(self, node: Node) -> None:
        """Frees an unused node, with all nodes below it."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        removed = [node]
        for step in removed:
            removed += step.children.values()
            step.children = {}
            step.parent, step.heap_serial = None, 0
            self.num_evictable_pages -= len(step.pages)
            if self._pool is not None:
                self._pool.free(step.pages)
        self._offer(parent)

    def num_cacheable(self, num_tokens: int) -> int:
        """Number of cacheable tokens among the first num_tokens: those that have a key, in whole pages."""
        num_keys = max(0, num_tokens - self._num_next)
        return num_keys - num_keys % self.page_size

    def _key(self, sequence: TokenSequence, start: int) -> Hashable:
        """Key of the page at `start`."""
        return sequence.page_key(start, self.page_size + self._num_next)

    def _descend(self, node: Node, sequence: TokenSequence, stop: int) -> Match:
        """Walks down from a node as far as the sequence matches, up to stop (whole pages), and collects the pages."""
        pages: list[int] = []
        child, end = self._next(node, sequence, stop)
        while child is not None:
            if end < child.stop:
                node = self.split(child, end)
                pages += node.pages
                if self.uses_whole_nodes:
                    child.last_access = self.num_accesses + 1
                    self._offer(child)
                break
            node = child
            pages += node.pages
            child, end = self._next(node, sequence, stop)
        return node, pages

    def _next(self, node: Node, sequence: TokenSequence, stop: int) -> tuple[Node | None, int]:
        """The child that begins with the next page of the sequence, and the end of their common whole pages.

        None, and the end of the node: there is no such child.
        """
        start = node.stop
        if start == stop or not node.children:
            return None, start
        child = node.children.get(self._key(sequence, start))
        if child is None:
            return None, start
        end = min(child.stop, start + sequence.common_prefix(start, child.sequence, start) - self._num_next)
        return child, end - end % self.page_size if end < stop else stop

    def see(self, node: Node, sequence: Any) -> None:
        """Replaces placeholders of unknown outputs on the path to node by the given tokens."""
        step = node
        while isinstance(step.sequence, UnseenOutput):
            parent, key = step.parent, self._key(sequence, step.start)
            assert parent is not None
            step.sequence = sequence
            if key not in parent.children:  # else the same tokens are cached twice
                del parent.children[step.key]
                parent.children[key] = step
                step.key = key
            step = parent

    def split_path(self, node: Node, middle: int) -> None:
        """Splits the node on the path to `node` that contains token `middle`, a multiple of the page size."""
        step: Node | None = node
        while step is not None and step.start >= middle:
            step = step.parent
        if step is not None and middle < step.stop:
            self._offer(self.split(step, middle))

    def split(self, node: Node, middle: int) -> Node:
        """Splits a node at token `middle`. A new parent gets the tokens before; `node`, which requests may hold, keeps
        the rest.
        """
        parent, at = node.parent, (middle - node.start) // self.page_size
        assert parent is not None
        head = Node(parent, node.key, node.sequence, node.start, middle, node.pages[:at], node.born, node.last_access)
        head.locks, head.readers = node.locks, node.readers
        if node.num_twins:
            head.num_twins = node.num_twins
            head.twins = [(holder, pages[:at]) for holder, pages in node.twins]
            node.twins = [(holder, pages[at:]) for holder, pages in node.twins]
        head.num_hits, head.num_inserts = node.num_hits, node.num_inserts
        parent.children[node.key] = head
        node.parent, node.start = head, middle
        node.key = self._key(node.sequence, middle)
        node.pages = node.pages[at:]
        head.children[node.key] = node
        if head.num_twins:
            self._offer(head)
        return head

    def _offer(self, node: Node) -> None:
        """Puts an evictable node into the heap, again if its key changed. Older entries of the node become invalid."""
        if node.locks != node.num_twins or (node.children and not node.num_twins) or node.parent is None:
            return
        self._serial += 1
        node.heap_serial = self._serial
        heappush(self._heap, (self._eviction.key(node), self._serial, node))
        if len(self._heap) > self._compact_above:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].heap_serial]
            heapify(self._heap)
            self._compact_above = 64 + 2 * len(self._heap)


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root (excluded) to this node."""
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path
