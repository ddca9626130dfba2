"""Sends KV of outputs back from decode to prefill when a request ends. The next request of the conversation finds this
KV in prefill's cache.

state      meaning                                                     message
offered    decode has locked the cached KV of prompt and output        -> KvOffered to the prefill instance
wanted     prefill lacks enough of this KV, and has pages for it       -> KvWanted; the decode instance sends the KV
returned   prefill caches the KV, decode unlocks it                    KvReturned

Nothing is sent if prefill lacks the KV of fewer than LEAST_TOKENS tokens, or has no pages for the lacking KV. Law:
tests/laws/test_kv_returns.py.
"""

from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.messages import Command, KvOffered, KvWanted, ReturnKv, Send, TransferUnit
from pdsim.core.transfer.send_planner import RankPairLayout
from pdsim.dataclass import dataclass
from pdsim.policy.views import TokenSequence

LEAST_TOKENS = 64
"""Minimum number of tokens whose KV decode sends back to prefill. If prefill lacks the KV of fewer tokens, it computes
them again instead (vLLM, kv_recompute_threshold).
"""


@dataclass(slots=True, eq=False)
class Returning:
    """KV that decode sends back to prefill: KV of the first num_tokens tokens of `sequence`. On each of the two
    instances, `lease` holds that instance's pages of the KV.
    """

    request_id: int
    lease: Lease
    sequence: TokenSequence
    num_tokens: int
    prefill_id: str = ""
    """Prefill instance that gets the KV. Empty on that instance itself."""


class KvGiver:
    """The decode side of KV returns: offers KV of ended requests, and releases it afterwards. wire: layout of the KV
    that one decode rank sends back to one prefill rank.
    """

    def __init__(self, decode_id: str, cache: KvCache, wire: RankPairLayout) -> None:
        self.held: dict[int, Returning] = {}
        self._decode_id = decode_id
        self._cache = cache
        self._wire = wire

    def offer(self, request_id: int, prefill_id: str, sequence: TokenSequence, num_tokens: int) -> Command:
        """Locks cached KV of a request that has just ended, and returns a message that offers this KV to prefill: the
        KV of the first num_tokens tokens of `sequence`, as far as it is cached.
        """
        lease = self._cache.open(sequence, num_tokens)
        num_tokens = lease.num_shared * self._cache.page_size
        self.held[request_id] = Returning(request_id, lease, sequence, num_tokens, prefill_id)
        return Send(prefill_id, KvOffered(request_id, self._decode_id, sequence, num_tokens))

    def on_wanted(self, message: KvWanted, now_ns: int) -> list[Command]:
        returning = self.held[message.request_id]
        if not message.pages:
            self.release(message.request_id)
            return []
        source = tuple(returning.lease.table[message.num_cached_tokens // self._cache.page_size :])
        sent = range(message.num_cached_tokens, returning.num_tokens)
        size = self._wire.size(source, message.pages, sent, with_state=False)
        ids = message.request_id, self._decode_id, returning.prefill_id
        return [ReturnKv(TransferUnit(*ids, source, message.pages, *size, now_ns, is_last=False))]

    def release(self, request_id: int) -> None:
        """Unlocks KV that prefill has received or does not want."""
        self._cache.drop(self.held.pop(request_id).lease)


class KvTaker:
    """The prefill side of KV returns: asks for offered KV or refuses the offer, and caches KV that has come."""

    def __init__(self, cache: KvCache) -> None:
        self.held: dict[int, Returning] = {}
        self._cache = cache

    def on_offered(self, message: KvOffered) -> Command:
        cache, request_id = self._cache, message.request_id
        lease = cache.open(message.sequence, message.num_tokens)
        num_cached = lease.num_shared * cache.page_size
        num_pages = message.num_tokens // cache.page_size - lease.num_shared
        if message.num_tokens - num_cached < LEAST_TOKENS or num_pages > cache.num_available_pages:
            cache.drop(lease)
            return Send(message.decode_id, KvWanted(request_id, 0, ()))
        cache.grow(lease, num_pages)
        self.held[request_id] = Returning(request_id, lease, message.sequence, message.num_tokens)
        pages = tuple(lease.table[len(lease.table) - num_pages :])
        return Send(message.decode_id, KvWanted(request_id, num_cached, pages))

    def on_returned(self, request_id: int) -> None:
        returning = self.held.pop(request_id)
        self._cache.close(returning.lease, returning.sequence, returning.num_tokens)
