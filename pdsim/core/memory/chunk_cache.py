"""Host memory of one vLLM instance (LMCacheConnectorV1): a flat cache of KV in chunks of tokens.

The key of a chunk is a hash of its tokens and of all tokens before. A prompt finds consecutive chunks from its
beginning. Single chunks are evicted, least recently used first. A lookup marks the last chunk first, so earlier chunks
are evicted later. A store adds the first chunk first, so the first chunk is evicted first. Copies extend the step:

  load    before the forward, for the prompts that begin in the step
  save    after the forward, before its result: chunks that the step completes, whether host memory has them or not;
          of a prompt that begins, also cached chunks behind those that host memory has

With is_layerwise each layer waits for its own part of the load, and its own part is saved as soon as the layer is
computed, only of chunks that host memory lacks (cache_engine.py:692, 1106, gpu_connectors.py:1271, 1405, 1433).

With storage behind host memory (remote_url and enable_async_loading), a prompt is looked up when a step could first
begin it, and waits until storage has read the chunks that continue those in host memory (storage_manager.py:655).
Until the prompt begins, none of these chunks is evicted. Chunks that storage has read serve this one prompt: host
memory does not keep them (storage_manager.py:522), and a found chunk does not count as used (touch_cache is called in
cache_engine.py:1275 only). What is saved to host memory is then written to storage (storage_manager.py:386).

LMCache 0.5.6: vllm_v1_adapter.py, cache_engine.py, local_cpu_backend.py. Law: tests/laws/test_lmcache.py.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from pdsim.core import messages as m
from pdsim.core.memory.radix_cache import PagePool
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


@dataclass(slots=True, eq=False)
class ChunkLookup:
    """Chunks of KV that were found for a prompt. Host memory keeps these chunks until the prompt begins."""

    keys: list[int]
    """Keys of chunks in host memory, from the prompt's beginning."""
    read: list[int]
    """Page ids, in the host pool, of further chunks that storage has read for this prompt."""
    is_over: bool = False
    """True: lookup and reads have ended, so the prompt may begin."""
    is_dropped: bool = False
    """True: the prompt was withdrawn before its lookup ended."""


def prefix_keys(sequence: TokenSequence, num_tokens: int, size: int) -> Iterator[int]:
    """Yields the keys of the whole chunks of `size` tokens within the first num_tokens, in order. The key of a chunk is
    a hash of all tokens of the sequence up to the end of the chunk.
    """
    key = 0
    for start in range(0, num_tokens - size + 1, size):
        key = hash((key, sequence.page_key(start, size)))
        yield key


class EvictionOrder:
    """Keys in the order in which they are evicted. Keys that somebody holds are passed over. A key that is released has
    the place in the order that it had before.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._holders: Counter[int] = Counter()
        self._passed: dict[int, int] = {}
        """Keys that were next while somebody held them, each with its position in the order. All are before the keys of
        _order."""
        self._released: list[tuple[int, int]] = []
        """Heap of passed keys that nobody holds since, as pairs (position in the order, key)."""
        self._num_passed = 0

    def use(self, key: int) -> None:
        """Adds a key, or moves it to the end of the order. Callers must not move a key that anybody has held (`hold`)
        since it was added.
        """
        self._order[key] = None
        self._order.move_to_end(key)

    def hold(self, keys: list[int]) -> None:
        self._holders.update(keys)

    def release(self, keys: list[int]) -> None:
        self._holders.subtract(keys)
        for key in keys:
            if not self._holders[key]:
                del self._holders[key]
                if (place := self._passed.pop(key, None)) is not None:
                    heapq.heappush(self._released, (place, key))

    def pop(self) -> int | None:
        """Removes and returns the first key that nobody holds. None: there is no such key."""
        while self._released or self._order:
            if self._released:
                place, key = heapq.heappop(self._released)
            else:
                place, (key, _) = self._num_passed, self._order.popitem(last=False)
            if key not in self._holders:
                return key
            self._passed[key] = place
            self._num_passed += 1
        return None


class ChunkCache:
    def __init__(
        self, pool: PagePool, page_size: int, chunk_tokens: int, *, is_layerwise: bool = False, stores: bool = False
    ) -> None:
        """pool: pool of host memory; each of its pages holds one chunk. page_size: tokens of a GPU page. chunk_tokens:
        tokens of a chunk, a multiple of page_size. is_layerwise: True: chunks are copied layer by layer. stores: True:
        storage is behind host memory.
        """
        self.pool = pool
        self.is_layerwise = is_layerwise
        self.chunk_tokens = chunk_tokens
        self.places: dict[int, int] = {}
        """Page id in the host pool of each chunk, by the chunk's key."""
        self._order = EvictionOrder()
        """Keys of all chunks, least recently used first. Lookups hold the chunks that they have found."""
        self._chunk_pages = chunk_tokens // page_size
        self._copies: list[m.HostCopy] = []
        self._stores = stores
        self._num_sleeps = 0
        self.lookups: dict[int, ChunkLookup] = {}
        """Lookups of prompts that have not begun, by request id. Empty without storage."""

    def take_copies(self) -> list[m.HostCopy]:
        """Returns the copies that were decided since the last call, in order, and forgets them. If must_wait has
        returned True since the last call, a Sleep comes first, because vLLM's scheduler sleeps once for each True.
        """
        copies, self._copies = self._copies, []
        if self._num_sleeps:
            copies.insert(0, m.Sleep(self._num_sleeps))
            self._num_sleeps = 0
        return copies

    # Lookups with storage.

    @property
    def is_asking(self) -> bool:
        """True if a prompt waits until storage has looked up and read its chunks. The scheduler then sleeps in each
        step.
        """
        return any(not (lookup.is_over or lookup.is_dropped) for lookup in self.lookups.values())

    def must_wait(self, request_id: int, prompt: TokenSequence) -> bool:
        """True if a prompt must wait until storage has looked up and read its chunks. The first call for a prompt
        begins the lookup. Returns False if there is no storage behind host memory.
        """
        if not self._stores:
            return False
        lookup = self.lookups.get(request_id)
        if lookup is None:
            keys = self._found(prompt, len(prompt))
            self._order.hold(keys)
            lookup = self.lookups[request_id] = ChunkLookup(keys, [])
            start, most = len(keys) * self.chunk_tokens, len(prompt) // self.chunk_tokens - len(keys)
            self._copies.append(m.PrefetchKv(request_id, prompt, start, (), 1, most))
        lookup.is_dropped = False
        self._num_sleeps += not lookup.is_over
        return not lookup.is_over

    def on_prefetched(self, message: m.Prefetched) -> None:
        """If the message says that a lookup and its reads have ended, allocates host pages for the chunks that were
        read. Chunks for which host memory has no room are lost. Ignores earlier messages of the lookup.
        """
        if message.is_over:
            lookup = self.lookups[message.request_id]
            lookup.is_over = True
            lookup.read = self._make_places(message.num_read)
            if lookup.is_dropped:
                self.release(message.request_id)

    def release(self, request_id: int) -> None:
        """Ends a prompt's hold on the chunks that it has found, and frees the host pages of chunks that storage has
        read for it. If the prompt's lookup has not ended, this happens when the lookup ends. No effect if the prompt
        was not looked up.
        """
        lookup = self.lookups.get(request_id)
        if lookup is None:
            return
        lookup.is_dropped = True
        if lookup.is_over:
            del self.lookups[request_id]
            self._order.release(lookup.keys)
            self.pool.free(lookup.read)

    def num_found(self, request_id: int, sequence: TokenSequence, num_tokens: int) -> int:
        """Number of consecutive whole chunks from the prompt's beginning, within its first num_tokens, whose KV is in
        host memory or was read from storage for this prompt.
        """
        if (lookup := self.lookups.get(request_id)) is not None:
            return min(len(lookup.keys) + len(lookup.read), num_tokens // self.chunk_tokens)
        return self.num_chunks(sequence, num_tokens)

    def num_chunks(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Number of consecutive chunks in host memory from the sequence's beginning, within the first num_tokens."""
        return len(self._found(sequence, num_tokens))

    def num_loadable_pages(self, request_id: int, sequence: TokenSequence, num_shared: int, num_tokens: int) -> int:
        """Number of GPU pages that host memory can load after the first num_shared pages of a sequence, up to its first
        num_tokens tokens. If there is no storage behind host memory, the call also marks the chunks as recently used.
        """
        if not self._stores:
            for key in reversed(self._found(sequence, num_tokens)):
                self._order.use(key)
        return max(0, self.num_found(request_id, sequence, num_tokens) * self._chunk_pages - num_shared)

    def load(self, request_id: int, sequence: TokenSequence, num_shared: int, pages: list[int]) -> None:
        """Adds a command that copies chunks of a prompt from host memory to the GPU pages `pages`. sequence: the
        prompt's tokens. num_shared: number of the prompt's first pages that the GPU has already. The GPU pages `pages`
        follow these pages; the first chunk may begin earlier.
        """
        num_chunks = (num_shared + len(pages)) // self._chunk_pages
        lookup = self.lookups.get(request_id)
        keys = self._found(sequence, num_chunks * self.chunk_tokens) if lookup is None else lookup.keys
        places = [self.places[key] for key in keys] + ([] if lookup is None else lookup.read)
        host_chunks = tuple(places[num_shared // self._chunk_pages : num_chunks])
        self._copies.append(m.LoadChunks(request_id, host_chunks, tuple(pages)))

    def save(self, prompt: TokenSequence, first: int, num_tokens: int, table: list[int]) -> None:
        """Adds a command that copies chunks of a prompt to host memory: the whole chunks of the first num_tokens
        tokens, beginning with the chunk of index `first`. Evicts other chunks if needed. table: the request's GPU
        pages.

        A chunk that host memory already has is copied again, and the host page of the second copy is freed at once. If
        LMCache copies layer by layer (is_layerwise), only missing chunks are copied.
        """
        chunks = list(enumerate(prefix_keys(prompt, num_tokens, self.chunk_tokens)))[first:]
        if self.is_layerwise:
            chunks = [(number, key) for number, key in chunks if key not in self.places]
        places = self._make_places(len(chunks))
        if not places:
            return
        size = self._chunk_pages
        pages = [page for number, _ in chunks[: len(places)] for page in table[number * size : (number + 1) * size]]
        store = m.StoreKv(prompt, first * self.chunk_tokens, tuple(places)) if self._stores else None
        self._copies.append(m.SaveChunks(tuple(pages), tuple(places), store))
        for (_, key), place in zip(chunks, places, strict=False):
            if key in self.places:
                self.pool.free([place])
            else:
                self.places[key] = place
                self._order.use(key)

    def flush(self) -> None:
        """Drops all chunks except those that a lookup holds for a prompt that has not begun."""
        while self._evict():
            pass

    def _evict(self) -> bool:
        """Evicts the least recently used chunk that no lookup holds for a prompt. Returns False if there is no such
        chunk.
        """
        if (key := self._order.pop()) is None:
            return False
        self.pool.free([self.places.pop(key)])
        return True

    def _make_places(self, num_chunks: int) -> list[int]:
        """Allocates a host page for each of num_chunks chunks, or for as many as there is room for, and returns the
        page ids. Evicts least recently used chunks if needed.
        """
        places: list[int] = []
        while len(places) < num_chunks:
            if not self.pool.num_free and not self._evict():
                break
            places += self.pool.allocate(1)
        return places

    def _found(self, sequence: TokenSequence, num_tokens: int) -> list[int]:
        """Keys of the sequence's first consecutive chunks in host memory, within its first num_tokens."""
        return list(takewhile(self.places.__contains__, prefix_keys(sequence, num_tokens, self.chunk_tokens)))
