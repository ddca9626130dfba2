"""Fills steps as vLLM's scheduler does: running requests take tokens of a budget first, then prompts take the rest."""

from collections.abc import Iterable

from pdsim.core.instance import Request
from pdsim.core.memory.chunk_cache import ChunkCache
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.memory.kvbm_cache import KvbmCache
from pdsim.core.memory.offload_cache import MUST_WAIT, OffloadCache
from pdsim.core.messages import Command, PrefillChunk
from pdsim.core.prefill.forward_builder import UNLIMITED, Forward, ForwardBuilder, RequestT
from pdsim.core.vllm.embedding_reads import EmbeddingReads
from pdsim.core.vllm.encoder_cache import EncoderCache, MediaChoice
from pdsim.dataclass import dataclass
from pdsim.policy.prefill import FirstComeFirstServed, HighestPriorityFirst, LongestOutputFirst
from pdsim.policy.protocols import HoldUntil, Pick, PrefillPolicy

_FIXED_ORDERS = (FirstComeFirstServed, HighestPriorityFirst, LongestOutputFirst)


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Limits of the tokens of one step."""

    step_tokens: int | None
    """Maximum tokens of all requests in one step (max_num_batched_tokens). Running requests take their tokens first.
    None: no limit."""
    prompt_tokens: int | None = None
    """Maximum tokens of one prompt in one step (long_prefill_token_threshold). None: a prompt may take the rest of the
    step's budget."""
    has_fair_shares: bool = False
    """True: each prompt may take at least an equal share of the step: if step_tokens divided by the number of waiting
    and running requests is larger than prompt_tokens, the quotient is the limit of one prompt
    (long_prefill_token_threshold_adaptive; vLLM 0.33.0, v1/core/sched/scheduler.py:764).
    """
    prefill_interval_steps: int = 1
    """While requests decode, prompts are computed in at most one of n consecutive steps, where n is this number. If
    prompts still wait after a step that could begin prompts, the limit does not hold (PrefillCadence)."""
    encoder_tokens: int = 0
    """Maximum tokens of images and audio clips whose embeddings are kept. 0: the model has no encoder."""
    splits_media: bool = True
    """False: no chunk ends within an image or audio clip."""


class VllmForwardBuilder(ForwardBuilder[RequestT]):
    """Fills steps as vLLM's scheduler does: continues begun prompts in order, then begins waiting prompts.

    A prompt may take the rest of the token budget, up to TokenBudget.prompt_tokens, so several prompts may be partly
    computed. A prompt begins if the pool has pages for the whole prompt, but only pages of its next chunk are reserved.
    As soon as a step is chosen, other prompts may share the KV that it will compute, also in the same step.

    If host memory continues a prompt's cached prefix, the prompt gets pages for this KV, and no step computes the
    prompt until the load has ended. During the load the prompt takes no slot, and cannot be preempted. After the load
    it goes before waiting prompts. With LMCache such a prompt begins in the step that waits for its load.

    A chunk ends before an image or audio clip that cannot be encoded now, because the encoder cache has no room.
    """

    def __init__(
        self, *, cache: KvCache, policy: PrefillPolicy, budget: TokenBudget, reads: EmbeddingReads | None = None
    ) -> None:
        """reads: reads embeddings from encode instances. None: the server encodes images and audio clips itself."""
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget.step_tokens, max_prefill_tokens=UNLIMITED)
        self.spare_tokens = 0
        self.is_held = False
        """True: the next step computes no prompt if requests decode in the step (PrefillCadence)."""
        self.num_beside = 0
        """Number of requests of the instance that are neither in this builder nor in the batch that decodes, such as
        those of other micro-batches."""
        self._prompt_tokens = UNLIMITED if budget.prompt_tokens is None else budget.prompt_tokens
        self._has_fair_shares = budget.has_fair_shares
        self._step_prompt_tokens = self._prompt_tokens
        """Maximum tokens of one prompt in the step that is being filled."""
        self._lacks_embeddings = False
        """True: the step can take no token of the prompt that `_compute` tried last, because the prompt's next image or
        audio clip cannot be encoded now."""
        self._encoder = EncoderCache(budget.encoder_tokens, splits_items=budget.splits_media)
        self.reads = reads
        self._partials: dict[int, RequestT] = {}
        """Begun prompts that steps have not taken completely yet, in the order in which they began."""
        self._loading: dict[int, RequestT] = {}
        self._loaded: dict[int, RequestT] = {}
        """Prompts whose load from host memory has ended, and whose tokens no step has taken yet."""
        self._dropped: dict[int, RequestT] = {}
        """Prompts that were given up during their load. The load still writes into their pages."""
        self._preempted: set[int] = set()
        """Ids of partly computed prompts that were preempted and wait to begin again. Requests that were preempted
        while they decoded, or (with pipeline stages) while a step computed them, are left out."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def partials(self) -> list[RequestT]:
        """Partly computed prompts that the next step continues, in the order in which they began."""
        return list(self._partials.values())

    @property
    def has_work(self) -> bool:
        return bool(self._partials) or bool(self._waiting) or bool(self._loaded)

    @property
    def unbegun(self) -> list[RequestT]:
        return [*self._loaded.values(), *self._loading.values(), *self._waiting.values()]

    @property
    def num_unbegun(self) -> int:
        return len(self._waiting) + len(self._loading) + len(self._loaded)

    @property
    def keeps_order(self) -> bool:
        """True if the prefill policy picks waiting prompts in an order that does not change while the instance decodes.
        False: each step must ask the policy again.
        """
        return isinstance(self._policy, _FIXED_ORDERS)

    @property
    def num_ready(self) -> int:
        """Number of unbegun prompts that wait for no load from host memory, and could therefore begin now."""
        return len(self._waiting) + len(self._loaded)

    @property
    def loads(self) -> list[RequestT]:
        """Prompts that hold pages for KV from host memory: until a step takes their next tokens, or, if they were given
        up during the load, until the load ends.
        """
        return [*self._loading.values(), *self._loaded.values(), *self._dropped.values()]

    def take_reads(self) -> list[Command]:
        """Returns the commands for reads of embeddings that were decided since the last call, and forgets them."""
        return [] if self.reads is None else self.reads.take_commands()

    def withdraw(self, request_id: int) -> RequestT | None:
        self._preempted.discard(request_id)
        if loading := self._loading.pop(request_id, None):
            self._dropped[request_id] = loading
            return loading
        if loaded := self._loaded.pop(request_id, None):
            self._cache.drop(loaded.lease)
            return loaded
        if self._cache.chunks is not None:
            self._cache.chunks.release(request_id)
        return super().withdraw(request_id)

    def on_loaded(self, request_id: int) -> None:
        """Handles the end of a prompt's load from host memory. The loaded KV is cached, and the next step may begin the
        prompt. If the prompt was given up during the load, its pages are freed instead.
        """
        assert self._cache.offload is not None
        self._cache.offload.on_loaded(request_id)
        if dropped := self._dropped.pop(request_id, None):
            self._cache.drop(dropped.lease)
            return
        request = self._loaded[request_id] = self._loading.pop(request_id)
        self._cache_prefix(request, len(request.lease.table) * self.page_size, is_chunk=True)

    def stop(self, request: RequestT, *, caches: bool = False) -> None:
        self._partials.pop(request.request_id, None)
        self._encoder.drop(request.request_id)

    def give_up(self, request: RequestT) -> None:
        """Drops a begun prompt, and frees its pages. Tokens that earlier steps computed stay cached."""
        self.stop(request)
        del self.begun[request.request_id]
        self._cache.close(request.lease, request.sequence, 0)

    def preempt(self, request: RequestT) -> None:
        """Preempts a begun prompt: frees its pages, and puts it first in the queue."""
        self.give_up(request)
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = 0
        self._preempted.add(request.request_id)
        self.enqueue(request, first=True)

    def fill(
        self, now_ns: int, num_slots: int | None, *, reserved_tokens: float = 0, num_decode_tokens: int = 0
    ) -> Forward:
        """Returns the next step's chunks of prompts. num_slots: number of prompts that may begin; None: no prompt may
        begin. num_decode_tokens: number of running requests, which take one token each. reserved_tokens: not used,
        because vLLM reserves no output tokens.
        """
        self._step_prompt_tokens = self._limit_beside(num_decode_tokens)
        begun = set(self._partials)
        self._encoder.begin_step()
        if self.reads is not None:
            self.reads.poll()
        forward = super().fill(now_ns, num_slots, reserved_tokens=reserved_tokens, num_decode_tokens=num_decode_tokens)
        forward.media = self._encoder.chosen
        if self._cache.chunks is not None:
            self._save_chunks(self._cache.chunks, forward.chunks, begun)
        return forward

    def _save_chunks(self, host: ChunkCache, chunks: list[PrefillChunk], begun: set[int]) -> None:
        """Saves to host memory the LMCache chunks that a step completes, first those of prompts that begin in the step.
        Requests with outputs save no chunks. chunks: the step's chunks of prompts. begun: ids of requests whose prompts
        were partly computed before the step.

        A prompt that begins also saves cached chunks that host memory lacks (LMCache 0.5.6, vllm_v1_adapter.py:204).
        """
        saves = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.request_id in begun):
            request, num_before = self.begun[chunk.request_id], chunk.num_context_tokens
            if request.num_tokens == request.num_prompt_tokens:
                begins = chunk.request_id not in begun
                found = num_before // host.chunk_tokens
                if begins:
                    found = host.num_found(request.request_id, request.prompt, request.num_tokens)
                saves.append((request, found, num_before + chunk.num_tokens))
            host.release(chunk.request_id)
        for request, found, num_tokens in saves:
            host.save(request.prompt, found, num_tokens, request.lease.table)

    def complete(self, chunk: PrefillChunk) -> RequestT:
        """Counts a computed chunk, and returns its request. With OffloadingConnector or KVBM, adds a command that
        stores the prompt's whole pages in host memory. The GPU's prefix cache has these pages already.
        """
        request = self.begun.pop(chunk.request_id) if chunk.is_last else self.begun[chunk.request_id]
        request.num_computed_tokens += chunk.num_tokens
        if request.media:
            self._encoder.end_chunk(request)
        if self._cache.offload is not None:
            self._store(self._cache.offload, request, chunk.num_context_tokens)
        self._cache.end_chunk(request.lease)
        return request

    def _store(self, offload: OffloadCache | KvbmCache, request: RequestT, start: int) -> None:
        """Adds a command that copies a prompt's computed whole pages to host memory: with OffloadingConnector all that
        host memory lacks, with KVBM those that the last step has computed. start: index of the first token of the last
        step. KVBM stores nothing of a step that also computes outputs (slot.rs, apply_scheduler_output).
        """
        num_tokens, lease = request.num_computed_tokens, request.lease
        if isinstance(offload, KvbmCache):
            if num_tokens <= request.num_prompt_tokens:
                offload.store(request.prompt, start, num_tokens, lease.table)
            return
        num_prompt = min(num_tokens, request.num_prompt_tokens)
        states = [one for one in self._cache.kept_states(lease) if one[0] <= num_prompt]
        offload.store(request.request_id, request.prompt, num_prompt, lease.table, states)

    def _cache_prefix(self, request: RequestT, num_tokens: int, *, is_chunk: bool) -> None:
        """Caches the request's first num_tokens. Other requests may share prompt tokens, but not outputs. is_chunk:
        True: further chunks of the prompt follow.
        """
        num_prompt = min(num_tokens, request.num_prompt_tokens)
        self._cache.checkpoint(request.lease, request.prompt, num_prompt, is_chunk=is_chunk)
        if num_tokens > num_prompt:
            super()._cache_prefix(request, num_tokens, is_chunk=is_chunk)

    def num_opening_pages(self, num_decode_tokens: int) -> int:
        """Number of new pages that the next step needs for the prompts that earlier steps have begun.
        num_decode_tokens: number of running requests, which take one token each of the step.
        """
        return self._needs_of_begun(num_decode_tokens)[0]

    def leaves_tokens(self, num_decode_tokens: int) -> bool:
        """True if the next step's budget has tokens left for further prompts. Each running request takes one token of
        the budget, and prompts that earlier steps have begun take their next chunks. num_decode_tokens: number of
        running requests.
        """
        return self._needs_of_begun(num_decode_tokens)[1] > 0

    def _needs_of_begun(self, num_decode_tokens: int) -> tuple[int, int]:
        """Returns two numbers for the next step: new pages that partly computed prompts need, and tokens that are left
        for other prompts. The second number excludes tokens of partly computed prompts and of running requests.
        num_decode_tokens: number of running requests, which take one token each.
        """
        num_pages, num_left = 0, self._chunk_tokens - num_decode_tokens
        if self.is_held:
            return num_pages, num_left
        limit = self._limit_beside(num_decode_tokens)
        encoder: EncoderCache | None = None
        for partial in self._partials.values():
            num_tokens = self._num_chunk_tokens(partial, min(num_left, limit))
            if partial.media and num_tokens > 0:
                encoder = encoder or self._encoder.trial()
                choice = encoder.choose(partial, num_tokens)
                encoder.take(partial, choice)
                num_tokens = choice.num_tokens
            elif num_tokens <= 0:
                break
            num_left -= num_tokens
            num_pages += self._num_lacking_pages(partial, num_tokens)
        return num_pages, num_left

    def _num_chunk_tokens(self, request: RequestT, limit: int) -> int:
        """Number of tokens of a request's next chunk. limit: maximum number of tokens that the step leaves for the
        request.
        """
        start, num_left = request.num_scheduled_tokens, request.num_tokens - request.num_scheduled_tokens
        if limit <= 0:
            return 0
        most = min(self._chunk_tokens, self._prompt_tokens)
        return self._cache.chunk_tokens(request.lease, start, min(num_left, limit), _prefill_end(request), most)

    def _num_lacking_pages(self, request: RequestT, num_tokens: int) -> int:
        """Number of further pages that a request needs for its next num_tokens tokens."""
        start = request.num_scheduled_tokens
        num_pages = -(-(start + num_tokens) // self.page_size) - len(request.lease.table)
        return num_pages + self._cache.num_state_pages(start, start + num_tokens, _prefill_end(request))

    def _limit_beside(self, num_running: int) -> int:
        """Maximum number of tokens that a step computes of one prompt. UNLIMITED: the prompt is the instance's only
        request, or the limit is off. num_running: number of requests that decode in the step.
        """
        if self._prompt_tokens == UNLIMITED:
            return UNLIMITED
        num_requests = num_running + self.num_beside + len(self.begun) + self.num_unbegun
        if num_requests <= 1:
            return UNLIMITED
        share = self._chunk_tokens // num_requests if self._has_fair_shares else 0
        return max(self._prompt_tokens, share)

    def _is_full(self, forward: Forward) -> bool:
        return forward.is_spent

    def _go_on(self, forward: Forward) -> None:
        for partial in self.partials:
            self._compute(partial, forward.chunk_tokens, forward)
        for loaded in list(self._loaded.values()):
            if forward.num_slots <= 0 or not self._compute(loaded, forward.chunk_tokens, forward):
                break
            forward.num_slots -= 1
            del self._loaded[loaded.request_id]

    def _begin(self, forward: Forward, picks: Iterable[Pick] | HoldUntil) -> None:
        super()._begin(forward, picks)
        for request_id in self._loading:
            self._waiting.pop(request_id, None)

    def _take(self, pick: Pick, forward: Forward) -> str | None:
        self._lacks_embeddings = False
        lacking = self._begin_or_load(pick, forward)
        return None if self._lacks_embeddings else lacking  # later prompts may pass (scheduler.py:1395)

    def _begin_or_load(self, pick: Pick, forward: Forward) -> str | None:
        """Begins a prompt. If host memory has further KV of the prompt behind its cached prefix, loads this KV instead.
        Returns "slots" or "pages" if the prompt lacks these; "" if the step has no room; None: the caller may try the
        next prompt.
        """
        if not self._cache.makes_room_for_states():
            return "pages"
        request, offload, chunks = self._waiting.get(pick.request_id), self._cache.offload, self._cache.chunks
        if request is None or forward.num_slots <= 0 or pick.request_id in self.begun:
            return super()._take(pick, forward)
        if chunks is not None and chunks.must_wait(pick.request_id, request.prompt):
            return None
        if self.reads is not None and self.reads.must_wait(request, self.num_cached_tokens(request)):
            return None
        if offload is None:
            return super()._take(pick, forward)
        lease = self._cache.open_for_load(request.sequence, request.num_tokens - 1)
        num_pages = self._num_loadable_pages(offload, request, lease.num_shared)
        if num_pages <= 0:
            self._cache.drop(lease)
            return None if num_pages == MUST_WAIT else super()._take(pick, forward)
        start = (lease.num_shared + num_pages) * self.page_size
        num_whole = -(-request.num_tokens // self.page_size) - lease.num_shared
        num_whole += self._cache.pages_per_growth - 1
        num_whole += self._cache.num_state_pages(start, request.num_tokens, _prefill_end(request))
        if num_whole > self.num_available_pages - self._num_promised_pages:
            self._cache.drop(lease)
            return "pages"
        self._cache.grow(lease, num_pages)
        pages = [*lease.table[lease.num_shared :], *self._cache.take_state(lease)]
        offload.load(request.request_id, request.sequence, lease.num_shared, pages)
        num_tokens = min(
            len(lease.table) * self.page_size, request.num_tokens - 1
        )  # the last one gives the first token
        request.lease = lease
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = num_tokens
        self._loading[request.request_id] = request
        return None

    def _num_loadable_pages(self, offload: OffloadCache | KvbmCache, request: RequestT, num_shared: int) -> int:
        """Number of pages that host memory can load after a request's first num_shared pages. MUST_WAIT: some pages are
        still being copied. KVBM loads nothing for a preempted request (leader.rs, get_num_new_matched_tokens).
        """
        if isinstance(offload, KvbmCache):
            if request.request_id in self._preempted or request.num_tokens > request.num_prompt_tokens:
                return 0
            return offload.num_loadable_pages(request.prompt, num_shared, request.num_prompt_tokens)
        num_known = min(request.num_tokens, len(request.sequence))  # without a prefix cache, outputs have no ids
        return offload.num_loadable_pages(request.request_id, request.sequence, num_shared, num_known)

    @property
    def _num_promised_pages(self) -> int:
        """Number of pages that begun prompts and loads still need. A new load may not take these pages."""
        promised = [*self._partials.values(), *self._loading.values(), *self._loaded.values()]
        return sum([-(-one.num_tokens // self.page_size) - len(one.lease.table) for one in promised])

    def _fits(self, request: RequestT, num_new: int, forward: Forward, lease: Lease) -> bool:
        if self._cache.waits(lease):
            return False
        num_tokens = request.num_tokens
        num_pages = self._cache.num_state_pages(num_tokens - num_new, num_tokens, _prefill_end(request))
        return -(-num_new // self.page_size) + num_pages <= self.num_available_pages

    def _room_tokens(self, forward: Forward) -> int:
        """Returns UNLIMITED, because vLLM reserves no tokens for outputs. If a prompt lacks pages, no later prompt
        begins in this step.
        """
        return UNLIMITED

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Adds a chunk of at most limit tokens to the step, and allocates its pages. Returns False, and adds nothing,
        if no token fits, pages lack, or the image or audio clip at the chunk's start cannot be encoded now.
        """
        start = request.num_scheduled_tokens
        num_tokens = self._num_chunk_tokens(request, min(limit, self._step_prompt_tokens))
        choice: MediaChoice | None = None
        if request.media and num_tokens > 0:
            choice = self._encoder.choose(request, num_tokens)
            num_tokens = choice.num_tokens
            self._lacks_embeddings = num_tokens == 0
        if num_tokens <= 0:
            return False
        if self._num_lacking_pages(request, num_tokens) > self.num_available_pages:
            if request.request_id not in self.begun:
                self._encoder.drop(request.request_id)
            return False
        if choice is not None:
            self._encoder.take(request, choice)
        end = start + num_tokens
        is_last = end == request.num_tokens
        if is_last:
            self._partials.pop(request.request_id, None)
        else:
            self._partials[request.request_id] = request
        forward.chunks.append(PrefillChunk(request.request_id, start, num_tokens, is_last))
        forward.chunk_tokens -= num_tokens
        self._cache.grow(request.lease, -(-end // self.page_size) - len(request.lease.table))
        request.num_scheduled_tokens = end
        self._preempted.discard(request.request_id)
        self.begun[request.request_id] = request
        self._cache_prefix(request, end, is_chunk=not is_last)
        self._cache.begin_chunk(request.lease, request.prompt, start, end, _prefill_end(request))
        return True

    def _open_pages(self, chunks: list[PrefillChunk]) -> None:
        """Does nothing: `_compute` has allocated the pages."""


def _prefill_end(request: Request) -> int:
    """Number of the request's tokens that are computed as a prompt. For a preempted request with outputs: all tokens
    but the last output.
    """
    return max(request.num_prompt_tokens, request.num_tokens - 1)
