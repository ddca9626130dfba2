"""Host memory of one vLLM instance (Dynamo's KVBM, DynamoConnector): a flat cache of blocks.

The key of a block is a hash of all tokens of the prompt up to the end of the block. When a step has computed blocks of
a prompt, they are stored, whether host memory has them or not. Stores and loads run while steps run:

  - From Offload to on_stored, a block is being stored, and no prompt finds it. If host memory has an earlier block with
    the same key when the store ends, the new block is freed.
  - From LoadBack to on_loaded, one prompt or several load a block, and it cannot be evicted.
  - All other blocks may be evicted: first the block whose last copy ended longest ago, and blocks of one copy in their
    order.

ai-dynamo/dynamo, lib/bindings/kvbm/src/block_manager/vllm/connector/leader/slot.rs (0262594: apply_scheduler_output,
acquire_local_matches, process_offload_to_storage), lib/llm/src/block_manager/pool/managed/inactive.rs (582fd44:
acquire_free_block, return_blocks) and state.rs (0ac6a62: allocate_blocks, register_blocks). Law:
tests/laws/test_kvbm.py.
"""

from collections import OrderedDict
from itertools import islice, takewhile

from pdsim.core import messages as m
from pdsim.core.memory.chunk_cache import prefix_keys
from pdsim.core.memory.radix_cache import PagePool
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence


@dataclass(frozen=True, slots=True)
class BlockStore:
    """A copy of blocks to host memory that is under way: the blocks' keys, and their pages in host memory."""

    keys: tuple[int, ...]
    host_pages: tuple[int, ...]


class KvbmCache:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        """pool: pool of host memory. page_size: tokens of a block, on the GPU and in host memory."""
        self.pool = pool
        self.places: dict[int, int] = {}
        """Page id in the host pool of each block that prompts can find, by the block's key."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Keys of the blocks that no load reads, in the order of eviction."""
        self.stores: dict[int, BlockStore] = {}
        """Stores under way, by their numbers (Offload.store)."""
        self.loads: dict[int, list[int]] = {}
        """Keys of the blocks of the loads under way, by request id."""
        self._page_size = page_size
        self._readers: dict[int, int] = {}
        """Number of loads that read each block, by its key. Blocks that no load reads have no entry."""
        self._num_stores = 0
        self._copies: list[m.HostCopy] = []

    def take_copies(self) -> list[m.HostCopy]:
        """Returns the copies between GPU and host memory that were decided since the last call, in order, and forgets
        them.
        """
        copies, self._copies = self._copies, []
        return copies

    def store(self, prompt: TokenSequence, start: int, num_tokens: int, table: list[int]) -> None:
        """Adds a command that copies to host memory the whole blocks that a step has computed. If host memory has too
        little room for all these blocks, no block is copied.

        start: index of the first token that the step computed. num_tokens: number of the prompt's tokens with KV after
        the step. table: the request's GPU pages.
        """
        first = start // self._page_size
        keys = tuple(islice(prefix_keys(prompt, num_tokens, self._page_size), first, None))
        if not keys or len(keys) > self.pool.num_free + len(self.idle):
            return
        while len(keys) > self.pool.num_free:
            self._evict()
        host_pages = tuple(self.pool.allocate(len(keys)))
        self._num_stores += 1
        self.stores[self._num_stores] = BlockStore(keys, host_pages)
        self._copies.append(m.Offload(self._num_stores, tuple(table[first : first + len(keys)]), host_pages))

    def on_stored(self, store: int) -> None:
        done = self.stores.pop(store)
        for key, page in zip(done.keys, done.host_pages, strict=True):
            if key in self.places:
                self.pool.free([page])
            else:
                self.places[key] = page
            self._rest(key)

    def num_loadable_pages(self, sequence: TokenSequence, num_shared: int, num_tokens: int) -> int:
        """Number of blocks that a prompt of num_tokens tokens can load after its first num_shared pages. If these
        pages and the found blocks make up the whole prompt, the prompt does not load the last block, but computes it.
        """
        behind = islice(prefix_keys(sequence, num_tokens, self._page_size), num_shared, None)
        num_found = sum([1 for _ in takewhile(self.places.__contains__, behind)])
        is_whole = num_found > 0 and (num_shared + num_found) * self._page_size == num_tokens
        return num_found - is_whole

    def load(self, request_id: int, sequence: TokenSequence, num_shared: int, pages: list[int]) -> None:
        """Adds a command that copies blocks of a prompt from host memory to the GPU pages `pages`. sequence: the
        prompt's tokens. num_shared: number of the prompt's first pages that the GPU has already; the copied blocks
        follow them.
        """
        stop = (num_shared + len(pages)) * self._page_size
        keys = self.loads[request_id] = list(islice(prefix_keys(sequence, stop, self._page_size), num_shared, None))
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) + 1
            self.idle.pop(key, None)
        self._copies.append(m.LoadBack(request_id, tuple([self.places[key] for key in keys]), tuple(pages)))

    def on_loaded(self, request_id: int) -> None:
        for key in self.loads.pop(request_id):
            self._readers[key] -= 1
            self._rest(key)

    def peek(self, sequence: TokenSequence) -> int:
        """Number of the sequence's first tokens whose blocks a prompt would find in host memory."""
        keys = prefix_keys(sequence, len(sequence), self._page_size)
        return self._page_size * sum([1 for _ in takewhile(self.places.__contains__, keys)])

    def flush(self) -> None:
        """Drops all blocks that no load reads."""
        while self.idle:
            self._evict()

    def _evict(self) -> None:
        key, _ = self.idle.popitem(last=False)
        self.pool.free([self.places.pop(key)])

    def _rest(self, key: int) -> None:
        """If no load reads the block, makes the block evictable, and puts it last in the order of eviction."""
        if not self._readers.get(key):
            self._readers.pop(key, None)
            self.idle[key] = None
            self.idle.move_to_end(key)
