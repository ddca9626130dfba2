"""The KV pages of one instance: a pool of free pages, and the prefix cache, a radix tree over whole pages of tokens.

Pages leave the pool for a request. When they are computed, nodes of the tree own them. A node is
  protected   if the node or a node below is locked by a holder that has no own copies of the node's pages
  evictable   otherwise
Eviction returns a node's pages to the pool, leaves first. Laws: tests/laws/test_page_pool.py, test_radix_cache.py.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from heapq import heapify, heappop, heappush
from typing import Any

from pdsim.core.sequence import UnseenOutput
from pdsim.dataclass import dataclass
from pdsim.policy.pages import LeastRecentlyUsed
from pdsim.policy.protocols import EvictionPolicy
from pdsim.policy.views import TokenSequence


class PagePool:
    """Allocates page ids in the order of its free list. Page 0 is reserved for padding.

    Freed pages are kept aside. When the free list is too short for an allocation, they are sorted into the list
    (SGLang's allocators with need_sort). Therefore page tables are contiguous on a fresh server, and fragment over
    time. The pool has ids, not only a count, because the cost of a transfer depends on pages that are contiguous on
    both sides, and because only ids show that a page has two owners.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._list: list[int] | range = range(1, num_pages + 1)
        self._next = 0
        self._freed: list[int] = []

    @property
    def num_listed(self) -> int:
        """Number of pages in the free list. Allocating at most this number of pages gives the same page order, one by
        one or all at once.
        """
        return len(self._list) - self._next

    def allocate(self, num_pages: int) -> list[int]:
        """Returns the next num_pages free pages. Raises RuntimeError if fewer are free."""
        if num_pages > self.num_free:
            raise RuntimeError(f"asked for {num_pages} pages, {self.num_free} of {self.num_pages} are free")
        stop = self._next + num_pages
        if stop > len(self._list):
            self._freed += self._list[self._next :]
            self._freed.sort()
            self._list, self._freed, self._next, stop = self._freed, [], 0, num_pages
        self.num_free -= num_pages
        taken = self._list[self._next : stop]
        self._next = stop
        return taken if isinstance(taken, list) else list(taken)

    def free(self, pages: Sequence[int]) -> None:
        self._freed += pages
        self.num_free += len(pages)
        if self.num_free > self.num_pages:
            raise RuntimeError(f"double free: {self.num_free} of {self.num_pages} pages are free")

    def free_pages(self) -> list[int]:
        """All free pages, in any order."""
        return [*self._list[self._next :], *self._freed]


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """Tokens [start, stop) of an inserted sequence, with the pages that hold their KV. key: key of the node's first
    page, by which `parent` has the node in `children`. born, last_access: serial numbers of accesses. num_hits: number
    of uses by requests. heap_serial: serial number of the node's valid entry in the heap of nodes to evict; 0: none.
    locks: number of locks on the node. readers: number of running requests that read the node in each decode step.
    """

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
    """Number of inserted prompts and outputs that contain this node's tokens. Counted only with host memory."""
    locks: int = 0
    readers: int = 0
    walk: int = 0
    """Serial number of the last call of `num_repeated_tokens` that visited this node."""
    heap_serial: int = 0
    num_twins: int = 0
    """Number of locks whose holders have their own copies of this node's pages. `twins` has the copies."""
    twins: list[tuple[object, Sequence[int]]] = field(default_factory=list)
    host: "Node | None" = None
    """Node of the host cache that ends at the same token. This node holds a lock on it. None: host memory is not known
    to have this node's KV."""
    children: dict[Hashable, "Node"] = field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return len(self.pages)


Match = tuple[Node, list[int]]
"""A cached prefix: its last node, and its pages in order."""


class RadixCache:
    """A radix tree whose nodes own KV pages. Eviction gives pages back to the pool. No pool: pages are only counted.

    With speculative decoding (`has_drafts`), a token's KV includes the draft model's KV, which depends on the next
    token. The key of a token is then the pair of this and the next token, so the last token of a sequence has no key
    (SGLang's bigram keys).
    """

    def __init__(
        self, pool: PagePool | None, page_size: int, eviction: EvictionPolicy, *, has_drafts: bool = False
    ) -> None:
        self.page_size = page_size
        self.has_drafts = has_drafts
        self._num_next = int(has_drafts)
        """Number of tokens after a page that are part of the page's key."""
        self.uses_whole_nodes = True
        """True: a match that ends inside a node counts as an access of the whole node, as in SGLang."""
        self.evicts_pages = False
        """True in a `BlockCache`: a leaf loses single pages, and a match does not count as an access."""
        self.evicts_by_recency = isinstance(eviction, LeastRecentlyUsed)
        self.num_evictable_pages = 0
        self.num_read_pages = 0
        """Number of distinct pages that decode steps read."""
        self.root = Node(None, None, None, 0, 0, [], 0, 0)
        self._pool = pool
        self._eviction = eviction
        self.num_accesses = 0
        """Number of the last access. Accesses have even numbers. The odd number before the next access marks nodes that
        an insert makes or that a partial match splits."""
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
        """Nodes of the longest cached prefix that match the sequence wholly, in order. The call changes nothing."""
        nodes: list[Node] = []
        stop = self.num_cacheable(len(sequence))
        child, end = self._next(self.root, sequence, stop)
        while child is not None and end == child.stop:
            nodes.append(child)
            child, end = self._next(child, sequence, stop)
        return nodes

    def places(self, sequence: TokenSequence) -> tuple[int, ...]:
        """Path of `whole_nodes`, from the root on. Each number is a node's index among its siblings, oldest first."""
        siblings = [(node, node.parent.children.values()) for node in self.whole_nodes(sequence) if node.parent]
        return tuple([list(among).index(node) for node, among in siblings])

    def split_at_match(self, sequence: TokenSequence, max_tokens: int) -> Node:
        """Returns the node at which the longest cached prefix of at most max_tokens ends. A node that matches partly is
        split, and both halves count as accessed.
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
        """Returns the longest cached prefix of at most max_tokens, in whole pages, and locks it. A node that matches
        partly is split. The call counts as an access, except in a BlockCache.
        """
        node, pages = self._descend(self.root, sequence, self.num_cacheable(min(max_tokens, len(sequence))))
        self.lock(node)
        if not self.evicts_pages:
            self.touch(node)
        return node, pages

    def lock_path(self, sequence: TokenSequence, num_tokens: int) -> Match:
        """Locks and returns the longest cached prefix of at most num_tokens, a multiple of the page size. Counts no
        access, except to the second half of a node that matches partly and is split (if uses_whole_nodes).
        """
        node, pages = self._descend(self.root, sequence, num_tokens)
        self.lock(node)
        return node, pages

    def insert(self, sequence: TokenSequence, num_tokens: int, pages: Sequence[int], below: Node) -> Match:
        """Caches the first num_tokens of a sequence. num_tokens: a result of `num_cacheable`. below: a node up to whose
        end the sequence is cached. pages: the caller's pages of the tokens after `below`.

        Returns the sequence's last node, and the pages of those tokens after `below` that the tree had already. The
        caller keeps its own pages of these tokens; its other pages now belong to the tree. The caller then calls
        `touch`.
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
        """Counts an access to each node of the path that ends at `node`. Nodes of the path that end behind the first
        hits_behind tokens also count a hit. None: no node counts a hit, because the lookup may be repeated.
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
        """Locks the nodes on the path to node. below: locks only nodes after this node of the path; None: all."""
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

    def add_reader(self, node: Node) -> None:
        """Notes that one more request reads the path to node in each decode step."""
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
        """Number of tokens that requests read more than once. nodes: for each request, the last node that it reads;
        None: it reads none. A token that k requests read counts k - 1 times.
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
        """Evicts leaves of the tree until num_pages pages are freed or all nodes are locked. Returns the number of
        freed pages. leaving: called with each leaf before its eviction.
        """
        freed = 0
        while freed < num_pages and self._heap:
            _, serial, node = heappop(self._heap)
            if serial != node.heap_serial:
                continue
            freed += self._evict_leaf(node, num_pages - freed, leaving)
        self.num_evictable_pages -= freed
        return freed

    def _evict_leaf(self, node: Node, num_lacking: int, leaving: Callable[[Node], None] | None) -> int:
        """Frees the pages of an evictable leaf. Returns their number. num_lacking: number of pages that the caller
        lacks; a subclass may keep pages beyond this number. leaving: called with the leaf before its eviction.
        """
        parent = node.parent
        assert parent is not None
        if leaving is not None:
            leaving(node)
        del parent.children[node.key]
        node.parent, node.heap_serial = None, 0
        if self._pool is not None:
            self._pool.free(node.pages)
        self._offer(parent)
        return len(node.pages)

    def next_access(self) -> int | None:
        """Serial number of the last access to the leaf that would be evicted next. None: no leaf is evictable."""
        while self._heap and self._heap[0][1] != self._heap[0][2].heap_serial:
            heappop(self._heap)
        return self._heap[0][2].last_access if self._heap else None

    def remove(self, node: Node) -> None:
        """Removes a node and all nodes below it from the tree, and frees their pages. None of them may be locked."""
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
        """Number of tokens among the first num_tokens that can be cached: whole pages of tokens that have a key."""
        num_keys = max(0, num_tokens - self._num_next)
        return num_keys - num_keys % self.page_size

    def _key(self, sequence: TokenSequence, start: int) -> Hashable:
        """Key of the page that begins at token `start`."""
        return sequence.page_key(start, self.page_size + self._num_next)

    def _descend(self, node: Node, sequence: TokenSequence, stop: int) -> Match:
        """Walks down from a node as far as the sequence matches, up to token `stop`, a multiple of the page size.
        Splits a node that matches partly. Returns the last node and the pages on the way.
        """
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
        """Returns (the child of `node` that begins with the sequence's next page, number of the sequence's first tokens
        that agree with the path to this child, in whole pages and at most `stop`). Without such a child: (None, the end
        of `node`).
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
        """Replaces placeholders of unknown outputs on the path to node by the sequence's tokens."""
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
        """Splits the path to `node` at token `middle`, a multiple of the page size, unless a node begins there."""
        step: Node | None = node
        while step is not None and step.start >= middle:
            step = step.parent
        if step is not None and middle < step.stop:
            self._offer(self.split(step, middle))

    def split(self, node: Node, middle: int) -> Node:
        """Splits a node at token `middle`. A new parent, which is returned, gets the tokens before `middle`. `node`
        keeps the other tokens, because leases may refer to this object.
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
        """Puts a node into the heap of nodes to evict, if it is an unlocked leaf or all holders of its locks have
        twins. A node whose eviction key changed is put again, and its older entries become invalid.
        """
        if node.locks != node.num_twins or (node.children and not node.num_twins) or node.parent is None:
            return
        self._serial += 1
        node.heap_serial = self._serial
        key = self._eviction.key(node)
        if self.evicts_pages:  # a request frees its last block first (vLLM 0.33.0, single_type_kv_cache_manager.py:599)
            key = key, -node.stop
        heappush(self._heap, (key, self._serial, node))
        if len(self._heap) > self._compact_above:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].heap_serial]
            heapify(self._heap)
            self._compact_above = 64 + 2 * len(self._heap)


def path_to(node: Node | None) -> list[Node]:
    """Nodes on the path from the root to this node, in this order. The root is not included. Empty: node is None."""
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path
