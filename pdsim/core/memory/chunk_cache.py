"""Host memory of one vLLM instance (LMCacheConnectorV1): a flat cache of KV in chunks of tokens.

The key of a chunk is a hash of its tokens and of all tokens before. A prompt finds consecutive chunks from its
beginning. Single chunks are evicted, least recently used first. A lookup marks the last chunk first, so earlier chunks
are evicted later. A store adds the first chunk first, so the first chunk is evicted first. Copies extend the step:

  load    before the forward, for the prompts that begin in the step
  save    after the forward, before its result: chunks that the step completes, whether host memory has them or not

With is_layerwise each layer waits for its own part of the load, and its own part is saved as soon as the layer is
computed, only of chunks that host memory lacks (cache_engine.py:692, 1106, gpu_connectors.py:1271, 1405, 1433).

LMCache 0.5.6: vllm_v1_adapter.py, cache_engine.py, local_cpu_backend.py. Law: tests/laws/test_lmcache.py.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from pdsim.core import messages as m
from pdsim.core.memory.page_pool import PagePool
from pdsim.policy.views import TokenSequence


def prefix_keys(sequence: TokenSequence, num_tokens: int, size: int) -> Iterator[int]:
    """Keys of the whole chunks of `size` tokens within the first num_tokens, in order. A key is a hash of the chunk's
    tokens and of all tokens before.
    """
    key = 0
    for start in range(0, num_tokens - size + 1, size):
        key = hash((key, sequence.page_key(start, size)))
        yield key


class ChunkCache:
    def __init__(self, pool: PagePool, page_size: int, chunk_tokens: int, *, is_layerwise: bool = False) -> None:
        """pool: pool of host memory; each of its pages holds one chunk. page_size: tokens of a GPU page. chunk_tokens:
        tokens of a chunk, a multiple of page_size. is_layerwise: True: chunks are copied layer by layer.
        """
        self.pool = pool
        self.is_layerwise = is_layerwise
        self.chunk_tokens = chunk_tokens
        self.places: OrderedDict[int, int] = OrderedDict()
        """Page id in the host pool of each chunk, by the chunk's key. Least recently used first."""
        self._chunk_pages = chunk_tokens // page_size
        self._copies: list[m.HostCopy] = []

    def take_copies(self) -> list[m.HostCopy]:
        """Returns the copies that were decided since the last call, in order, and forgets them."""
        copies, self._copies = self._copies, []
        return copies

    def num_chunks(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Number of consecutive chunks in host memory from the sequence's beginning, within the first num_tokens."""
        return len(self._found(sequence, num_tokens))

    def num_loadable_pages(self, sequence: TokenSequence, num_shared: int, num_tokens: int) -> int:
        """Number of GPU pages that host memory can load after the first num_shared pages of a sequence. The call counts
        as a use of the chunks.
        """
        found = self._found(sequence, num_tokens)
        for key in reversed(found):
            self.places.move_to_end(key)
        return max(0, len(found) * self._chunk_pages - num_shared)

    def load(self, request_id: int, sequence: TokenSequence, num_shared: int, pages: list[int]) -> None:
        """Decides a copy of chunks to these GPU pages. The chunks follow the first num_shared pages of the sequence."""
        num_chunks = (num_shared + len(pages)) // self._chunk_pages
        keys = self._found(sequence, num_chunks * self.chunk_tokens)[num_shared // self._chunk_pages :]
        self._copies.append(m.LoadChunks(request_id, tuple([self.places[key] for key in keys]), tuple(pages)))

    def save(self, prompt: TokenSequence, first: int, num_tokens: int, table: list[int]) -> None:
        """Decides a copy of the whole chunks of the first num_tokens, from chunk number `first` on, to host memory.
        Evicts other chunks if needed.

        A chunk that host memory already has is copied again, and its second copy is freed at once. Layer by layer, only
        missing chunks are copied.
        """
        chunks = list(enumerate(prefix_keys(prompt, num_tokens, self.chunk_tokens)))[first:]
        if self.is_layerwise:
            chunks = [(number, key) for number, key in chunks if key not in self.places]
        places = self._make_places(len(chunks))
        if not places:
            return
        size = self._chunk_pages
        pages = [page for number, _ in chunks[: len(places)] for page in table[number * size : (number + 1) * size]]
        self._copies.append(m.SaveChunks(tuple(pages), tuple(places)))
        for (_, key), place in zip(chunks, places, strict=False):
            if key in self.places:
                self.pool.free([place])
            else:
                self.places[key] = place

    def flush(self) -> None:
        """Drops all chunks."""
        self.pool.free(list(self.places.values()))
        self.places.clear()

    def _make_places(self, num_chunks: int) -> list[int]:
        """Allocates host memory for at most num_chunks chunks, and evicts least recently used chunks if needed."""
        places: list[int] = []
        while len(places) < num_chunks and (self.pool.num_free or self.places):
            if not self.pool.num_free:
                _, oldest = self.places.popitem(last=False)
                self.pool.free([oldest])
            places += self.pool.allocate(1)
        return places

    def _found(self, sequence: TokenSequence, num_tokens: int) -> list[int]:
        """Keys of consecutive chunks in host memory, from the sequence's beginning."""
        return list(takewhile(self.places.__contains__, prefix_keys(sequence, num_tokens, self.chunk_tokens)))
