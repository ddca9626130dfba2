"""Fills prefill forwards with waiting prompts, as SGLang's PrefillAdder does."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import field
from typing import Generic, TypeVar

from pdsim.core.encode.media_item import MediaItem
from pdsim.core.engine_rules import SGLANG_0_5_23, EngineRules
from pdsim.core.instance import PolicyError, Request
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.messages import PrefillChunk
from pdsim.core.prefill.chunk_sizer import ChunkSizer
from pdsim.dataclass import dataclass
from pdsim.policy.prefill import CacheAwareOrder, FirstComeFirstServed, ShortestPrefillFirst
from pdsim.policy.protocols import HoldUntil, Pick, PrefillPolicy
from pdsim.policy.views import QueuedPrefill

UNLIMITED = 1 << 62

REFRESH_CHOICES, MOST_REFRESHED = 32, 128
"""Number of choices between two refreshes, and maximum number of waiting prompts whose cached prefixes a refresh marks
as used (WAITING_PREFIX_REFRESH_INTERVAL, WAITING_QUEUE_PREFIX_MATCH_MAX)."""

RequestT = TypeVar("RequestT", bound=Request)

GiveWay = Callable[[RequestT, float], float]
"""Function that preempts running requests to free a slot for a prompt. Arguments: the prompt's request, and the number
of available tokens that are not reserved. Returns the number of tokens that were reserved for outputs of the preempted
requests; -1: no request was preempted."""
Fits = Callable[[RequestT, list[RequestT], int], bool]
"""Function that tells whether a request that ignores EOS fits into a forward. Arguments: the request, requests that the
forward has begun already, and the number of free tokens after the request's prompt."""


@dataclass(slots=True)
class Forward:
    """A forward that is being filled. chunk_tokens, prefill_tokens: numbers of tokens that the forward may still take,
    by the limits chunk_tokens and max_prefill_tokens. num_slots: number of prompts that may still begin.
    """

    chunk_tokens: int = 0
    prefill_tokens: int = 0
    num_slots: int = 0
    reserved_tokens: float = 0
    """Number of tokens of the pool that further prompts may not take: reserved for chunks and running requests of this
    forward, and for outputs."""
    taken_tokens: int = 0
    """Tokens of the pool that this forward takes: whole pages of its chunks, a further page per chunk, and 1 token per
    running request that the forward decodes. Tokens reserved for outputs are not counted."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    media: Sequence[MediaItem] = ()
    """Images and audio clips that a vLLM instance encodes, or whose embeddings it loads, before the forward."""
    hold_until_ns: int | None = None
    """Time in ns at which to choose again: the policy's hold or a wait for a prefetch ends then. None: neither does."""
    blocked_by: str = ""
    """Resource for lack of which no further prompt may begin: "slots" or "pages". Empty: no such lack."""

    @property
    def is_spent(self) -> bool:
        return self.chunk_tokens <= 0 or self.prefill_tokens <= 0


class ForwardBuilder(Generic[RequestT]):
    """Fills one instance's forwards from waiting and begun prompts. Prefill policies see this object."""

    def __init__(
        self,
        *,
        cache: KvCache,
        policy: PrefillPolicy,
        chunk_tokens: int | None,
        max_prefill_tokens: int,
        max_requests: int | None = None,
        sizer: ChunkSizer | None = None,
        rules: EngineRules = SGLANG_0_5_23,
        give_way: GiveWay[RequestT] | None = None,
        allows_fixed: Fits[RequestT] | None = None,
        shares_late: bool = False,
    ) -> None:
        """chunk_tokens: maximum tokens of one forward; None: no limit. max_prefill_tokens: maximum uncached tokens of
        one forward; its first prompt may exceed the limit. max_requests: maximum prompts of a forward. sizer: sizes
        forwards that continue a prompt; None: they have chunk_tokens. give_way: preempts requests; None: none is
        preempted. allows_fixed: tells whether a prompt that ignores EOS fits, without prefix cache. shares_late: True:
        a chunk is cached when the next forward is chosen, even while the chunk is still computed, unless its prompt was
        given up (managers/scheduler.py, 0.5.23, :3772; disaggregation/prefill.py, :666). False: once it is computed.
        """
        self.now_ns = 0
        self.page_size = cache.page_size
        self.begun: dict[int, RequestT] = {}
        self._waiting: OrderedDict[int, RequestT] = OrderedDict()
        self.partial: RequestT | None = None
        """The begun prompt that no forward has taken completely yet. None: there is no such prompt."""
        self._shares_late = shares_late
        self._unshared: RequestT | None = None
        """The partial prompt (`partial`), if its last chunk is not cached yet. Else None."""
        self._writer: RequestT | None = None
        """The prompt whose chunk was cached last, if a forward may still compute the chunk. Else None."""
        self._cache = cache
        self._prefetcher = cache.prefetcher
        self._policy = policy
        self._chunk_tokens = UNLIMITED if chunk_tokens is None else chunk_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._max_requests = UNLIMITED if max_requests is None else max_requests
        """Maximum number of prompts of one forward (--prefill-max-requests)."""
        self._sizer = sizer
        self._rules = rules
        self._give_way = give_way
        self._allows_fixed = None if cache.prefix_cache is not None else allows_fixed
        tree = cache.prefix_cache
        if isinstance(policy, CacheAwareOrder) and tree is None:
            self._policy = FirstComeFirstServed()
        self._keeps_order = type(self._policy) is FirstComeFirstServed
        self._sorts = isinstance(self._policy, CacheAwareOrder)
        """True: the policy sorts prompts by their cached prefixes. Each sort counts as a use of these prefixes, even if
        no prompt can begin."""
        self._shortest = self._policy if isinstance(self._policy, ShortestPrefillFirst) else None
        self._refreshes = rules.refreshes_waiting and not self._sorts and tree is not None and tree.evicts_by_recency
        self._num_choices = 0
        self._num_entries = self._num_taken_tokens = 0
        """_num_entries: number of calls of `enqueue`. _num_taken_tokens: number of prompt tokens that forwards have
        taken."""
        self.spare_tokens = 1
        """Number of tokens that must stay free when a prompt begins, beyond its own tokens and reserved tokens."""

    # What a prefill policy sees.

    @property
    def waiting(self) -> Collection[RequestT]:
        return self._waiting.values()

    @property
    def unbegun(self) -> list[RequestT]:
        """Prompts that no forward has taken: waiting prompts and, in a subclass, prompts whose KV is or was loaded."""
        return list(self._waiting.values())

    @property
    def num_unbegun(self) -> int:
        return len(self._waiting)

    @property
    def num_available_pages(self) -> int:
        return self._cache.num_available_pages

    def num_cached_tokens(self, request: QueuedPrefill) -> int:
        return self._cache.num_cached_tokens(self._waiting[request.request_id].sequence)

    def use_cached_tokens(self, request: QueuedPrefill) -> int:
        waiting = self._waiting[request.request_id]
        num_cached = self._cache.use(waiting.sequence)
        return min(num_cached, waiting.num_tokens - 1) if self._rules.computes_last_token else num_cached

    def cached_path(self, request: QueuedPrefill) -> tuple[int, ...]:
        tree = self._cache.prefix_cache
        return () if tree is None else tree.places(self._waiting[request.request_id].sequence)

    def num_waited_tokens(self, request: QueuedPrefill) -> int:
        return self._num_taken_tokens - self._waiting[request.request_id].num_taken_before

    # What an instance calls.

    @property
    def is_midway(self) -> bool:
        """True if a begun prompt has tokens that no forward has taken."""
        return self.partial is not None

    @property
    def has_work(self) -> bool:
        return self.is_midway or bool(self._waiting)

    def waits(self, request_id: int) -> bool:
        return request_id in self._waiting

    def enqueue(self, request: RequestT, *, first: bool = False) -> None:
        self._waiting[request.request_id] = request
        self._num_entries += 1
        request.entry, request.num_taken_before = self._num_entries, self._num_taken_tokens
        if first:
            self._waiting.move_to_end(request.request_id, last=False)

    def fill(
        self, now_ns: int, num_slots: int | None, *, reserved_tokens: float = 0, num_decode_tokens: int = 0
    ) -> Forward:
        """Returns the next forward, perhaps without chunks. Continues begun prompts, and begins the policy's picks.

        num_slots: number of prompts that may begin, because slots are free; None: no prompt may begin. reserved_tokens:
        number of tokens of the pool that are reserved for outputs of other requests. num_decode_tokens: number of
        tokens that running requests take of this forward.
        """
        self.now_ns = now_ns
        if (unshared := self._unshared) is not None:
            self._cache_prefix(unshared, unshared.num_scheduled_tokens, is_chunk=True)
            self._unshared, self._writer = None, unshared
        chunk_tokens = self._chunk_tokens - num_decode_tokens
        if self._sizer is not None and self.partial is not None:
            chunk_tokens = self._sizer.num_tokens(self.partial.num_scheduled_tokens)
        forward = Forward(
            chunk_tokens,
            self._max_prefill_tokens - num_decode_tokens,
            num_slots or 0,
            reserved_tokens + num_decode_tokens,
            num_decode_tokens,
        )
        chooses = bool(self._waiting) and (self.is_midway or self._may_begin(num_slots))
        picks: Iterable[Pick] | HoldUntil | None = self._refresh() if self._refreshes and chooses else None
        if self._shortest is not None and chooses:
            picks = self._select()
        self._go_on(forward)
        if self._waiting and num_slots is not None and not self._is_full(forward):
            if chooses or not self._sorts:
                self._begin(forward, self._select() if picks is None else picks)
            else:
                forward.blocked_by = "slots"
        elif self._waiting and num_slots is not None and self._rules.tries_when_spent:
            self._begin(forward, self._select())
        elif self._sorts and chooses and picks is None:
            self._select()
        if forward.chunks:
            self._num_taken_tokens += sum([chunk.num_tokens for chunk in forward.chunks])
            self._open_pages(forward.chunks)
        elif self._prefetcher is not None:  # nothing is begun, perhaps because of prefetches
            due_ns, hold_ns = self._prefetcher.next_due_ns(now_ns), forward.hold_until_ns
            forward.hold_until_ns = due_ns if hold_ns is None or (due_ns is not None and due_ns < hold_ns) else hold_ns
        return forward

    def _select(self) -> Iterable[Pick] | HoldUntil:
        """Returns the policy's picks of waiting prompts, in order, or HoldUntil if no prompt may begin yet. Policies
        that sort by cached tokens also sort the queue, as in SGLang.
        """
        if self._keeps_order:  # nothing to ask
            return map(Pick, self._waiting)
        picks = self._policy.select(self)
        if self._sorts and not isinstance(picks, HoldUntil):
            picks = list(picks)
            for pick in picks:
                self._waiting.move_to_end(pick.request_id)
        return picks

    def _may_begin(self, num_slots: int | None) -> bool:
        return num_slots is not None and (num_slots > 0 or self._give_way is not None)

    def _refresh(self) -> list[Pick] | HoldUntil | None:
        """In the first of every 32 calls: asks the policy for the order of prompts, and marks cached prefixes of the
        first MOST_REFRESHED picks as used, the first pick last. Returns all picks, or HoldUntil if no prompt may begin
        yet. Other calls return None.
        """
        self._num_choices += 1
        if self._num_choices % REFRESH_CHOICES != 1:
            return None
        picks = self._select()
        if isinstance(picks, HoldUntil):
            return picks
        picks = list(picks)
        for pick in reversed(picks[:MOST_REFRESHED]):
            if waiting := self._waiting.get(pick.request_id):
                self._cache.use(waiting.sequence)
        return picks

    def _begin(self, forward: Forward, picks: Iterable[Pick] | HoldUntil) -> None:
        if isinstance(picks, HoldUntil):
            forward.hold_until_ns = picks.time_ns
            return
        for pick in picks:
            lacking = self._take(pick, forward)
            if lacking is not None:
                forward.blocked_by = lacking
                break
            if self._room_tokens(forward) <= 0:
                forward.blocked_by = "pages"
                break
            if self._is_full(forward):
                break
        for chunk in forward.chunks:  # only now: the policy may still have been walking along the queue
            self._waiting.pop(chunk.request_id, None)

    def withdraw(self, request_id: int) -> RequestT | None:
        """Removes and returns a prompt that no forward has taken. None: the prompt does not wait here."""
        return self._waiting.pop(request_id, None)

    def stop(self, request: RequestT, *, caches: bool = False) -> None:
        """Stops a prompt: no further forward computes it. caches: True: caches all its chunks, even one under way."""
        if caches and self._unshared is request:
            self._cache_prefix(request, request.num_scheduled_tokens, is_chunk=True)
            self._writer = request if request.num_computed_tokens < request.num_scheduled_tokens else None
        if self.partial is request:
            self.partial = self._unshared = None

    def reads_unwritten(self, request: RequestT) -> bool:
        """True if the running forward still computes the end of the request's cached prefix. SGLang then sends the
        prefix to decode only after this forward (disaggregation/prefill.py, 0.5.23, :1495).
        """
        writer, num_shared = self._writer, request.lease.num_shared
        if writer is None or writer is request or writer.num_computed_tokens >= num_shared * self.page_size:
            return False
        return request.lease.table[num_shared - 1 : num_shared] == writer.lease.table[num_shared - 1 : num_shared]

    def complete(self, chunk: PrefillChunk) -> RequestT:
        """Records a computed chunk; returns its request. Caches pages; with shares_late, only after the last chunk."""
        request = self.begun.pop(chunk.request_id) if chunk.is_last else self.begun[chunk.request_id]
        request.num_computed_tokens += chunk.num_tokens
        if self._writer is request and request.num_computed_tokens == request.num_scheduled_tokens:
            self._writer = None
        if chunk.is_last or not self._shares_late:
            self._cache_prefix(request, request.num_computed_tokens, is_chunk=not chunk.is_last)
        return request

    def _cache_prefix(self, request: RequestT, num_tokens: int, *, is_chunk: bool) -> None:
        """Caches whole pages of the request's first num_tokens with known ids. is_chunk: True: more chunks follow."""
        sequence = request.sequence
        num_known = request.num_prompt_tokens if sequence is request.prompt else len(sequence)
        num_tokens = min(num_tokens, num_known)
        self._cache.checkpoint(request.lease, sequence, num_tokens, request.num_prompt_tokens, is_chunk=is_chunk)

    # Filling.

    def _is_full(self, forward: Forward) -> bool:
        """True if the forward's limits of tokens leave no token for a further prompt."""
        return forward.is_spent

    def _go_on(self, forward: Forward) -> None:
        if (partial := self.partial) is None:
            return
        most = min(forward.chunk_tokens, self._room_of(partial, forward))
        if self._shortest is not None and self._waiting:
            num_left = partial.num_tokens - partial.num_scheduled_tokens
            shared = self._shortest.max_chunk_tokens(num_left, forward.chunk_tokens, self)
            most = most if shared is None else min(most, shared)
        self._compute(partial, most, forward)

    def _room_of(self, partial: RequestT, forward: Forward) -> int:
        """Maximum tokens of a begun prompt's next chunk, by the pages that the prompt holds or can get. If reserved
        tokens leave no room, the prompt may take all available pages.
        """
        room = int(self._room_tokens(forward))
        if room <= 0:
            room = self.num_available_pages * self.page_size
        return len(partial.lease.table) * self.page_size + room - partial.num_scheduled_tokens

    def _take(self, pick: Pick, forward: Forward) -> str | None:
        """Adds the prompt's first chunk to the forward, and locks its cached prefix. None: this was done, or a prefetch
        of the prompt's KV is under way; the next prompt may be tried. Otherwise nothing was added. "slots" or "pages":
        the prompt lacks these. "": the forward is full. Raises PolicyError for a wrong pick.
        """
        request = self._waiting.get(pick.request_id)
        if request is None or pick.request_id in self.begun:
            raise PolicyError(f"{self._policy}: picked request {pick.request_id}, which does not wait")
        if pick.max_tokens is not None and pick.max_tokens <= 0:
            raise PolicyError(f"{self._policy}: {pick} computes nothing")
        if forward.num_slots <= 0 and not self._free_slots(request, forward):
            return "slots"
        if self._prefetcher is not None and self._prefetcher.awaits(request.request_id, self.now_ns):
            return None
        num_tokens = request.num_tokens
        sequence = request.sequence
        lease = self._cache.open(sequence, num_tokens - 1)
        if len(forward.chunks) >= self._max_requests:  # SGLang looks only after it has matched the prompt
            self._cache.drop(lease)
            return ""
        num_cached = lease.num_shared * self.page_size
        num_new = request.num_tried_tokens = num_tokens - num_cached
        fits = self._fits(request, num_new, forward, lease)
        num_loadable = self._cache.num_loadable_pages(lease, sequence, num_tokens - 1, request.request_id)
        whole_pages = -(-num_new // self.page_size) * self.page_size - num_loadable * self.page_size
        if not fits or (forward.chunks and whole_pages >= forward.prefill_tokens and self._is_capped(request)):
            self._cache.drop(lease)
            return "" if fits else "pages"
        if num_loadable:
            self._cache.load(lease, sequence, num_loadable, request.request_id)
            num_cached = min(num_cached + num_loadable * self.page_size, num_tokens - 1)
        request.lease = lease
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = num_cached
        limit = forward.chunk_tokens if pick.max_tokens is None else min(forward.chunk_tokens, pick.max_tokens)
        if not self._compute(request, limit, forward):
            self._cache.drop(lease)
            return ""
        forward.num_slots -= 1
        return None

    def _free_slots(self, request: RequestT, forward: Forward) -> bool:
        """Preempts running requests to free a slot for a prompt. Returns False if no slot was freed."""
        if self._give_way is None:
            return False
        num_reserved = self._give_way(request, self._room_tokens(forward))
        if num_reserved < 0:
            return False
        forward.reserved_tokens -= num_reserved
        forward.num_slots = 1
        return True

    def _fits(self, request: RequestT, num_new: int, forward: Forward, lease: Lease) -> bool:
        """True if there is room for num_new tokens of a prompt and for its expected outputs."""
        room = self._room_tokens(forward)
        if self._allows_fixed is not None and self._has_fixed_output(request):
            whole_pages = -(-num_new // self.page_size) * self.page_size
            if self._rules.expects_fixed_outputs:
                whole_pages += self.page_size
            num_free = self.num_available_pages * self.page_size - forward.taken_tokens
            begun = [self.begun[chunk.request_id] for chunk in forward.chunks]
            return whole_pages <= min(num_free, room) and self._allows_fixed(request, begun, num_free - whole_pages)
        return num_new + request.num_growth_tokens + self.page_size + self.spare_tokens < room + 1

    def _is_capped(self, request: RequestT) -> bool:
        """True if max_prefill_tokens limits the prompt. The caller excludes the first prompt of a forward."""
        if self._has_fixed_output(request):
            return False
        return self._rules.caps_chunked_prompts or self._chunk_tokens == UNLIMITED

    def _has_fixed_output(self, request: RequestT) -> bool:
        """True if the request ignores EOS, and there is no prefix cache (SGLang's add_one_req_ignore_eos)."""
        return self._allows_fixed is not None and request.ignores_eos

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Adds a chunk of at most limit tokens. Returns False if it would be empty or leave a second prompt incomplete.
        An incomplete prompt is stored as `self.partial`. Its first chunk has whole pages unless `_has_fixed_output`.
        """
        num_tokens = request.num_tokens - request.num_scheduled_tokens
        unit = 1 if self.partial is request or self._has_fixed_output(request) else self.page_size
        is_last = -(-num_tokens // unit) * unit <= limit
        if not is_last:
            num_tokens = limit - limit % unit
            if num_tokens <= 0 or (self.is_midway and self.partial is not request):
                return False
            self.partial = request
            if self._shares_late:
                self._unshared = request
        elif self.partial is request:
            self.partial = None
        forward.chunks.append(PrefillChunk(request.request_id, request.num_scheduled_tokens, num_tokens, is_last))
        request.num_scheduled_tokens += num_tokens
        self.begun[request.request_id] = request
        whole_pages = -(-num_tokens // self.page_size) * self.page_size
        forward.chunk_tokens -= whole_pages
        forward.prefill_tokens -= whole_pages
        forward.taken_tokens += whole_pages + self.page_size
        forward.reserved_tokens += whole_pages + self.page_size + (request.num_reserved_tokens if is_last else 0)
        return True

    def _room_tokens(self, forward: Forward) -> float:
        return self.num_available_pages * self.page_size - forward.reserved_tokens

    def _open_pages(self, chunks: list[PrefillChunk]) -> None:
        """Allocates pages for the chunks. The cached prefixes of all chunks' prompts are already locked."""
        size = self.page_size
        if self._cache.frees_ahead:
            num_tokens = sum([chunk.num_tokens for chunk in chunks])
            self._cache.make_free(-(-num_tokens // size) + len(chunks))
        for chunk in chunks:
            request = self.begun[chunk.request_id]
            self._cache.grow(request.lease, -(-request.num_scheduled_tokens // size) - len(request.lease.table))
