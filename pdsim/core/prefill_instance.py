"""Life of a request in a prefill instance.

bootstrapping  NewRequest came; decode has not granted pages yet      on_message(KvGranted)
granted        decode waits for its KV                                next_step, when a slot for its first token is free
waiting        the policy picks it                                    next_step -> PrefillStep
begun          one or more chunks; at most one prompt lacks some      next_step, on_step_done -> TransferUnit per chunk
sending        computed; pages and slot stay held                     on_message(KvSent), seen by the next next_step
gone           its whole pages stay in the prefix cache               -> PrefillDone
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from pdsim.core.instance import Levels, PolicyError
from pdsim.core.kv_cache import NO_LEASE, KvCache, Lease
from pdsim.core.messages import (
    Abort,
    Command,
    KvGranted,
    KvSent,
    Message,
    NewRequest,
    PrefillChunk,
    PrefillDone,
    PrefillStep,
    Send,
    Step,
    StepResult,
    Wait,
)
from pdsim.core.send_planner import SendPlanner
from pdsim.core.transfer_plan import SendCursor
from pdsim.policy.protocols import HoldUntil, Pick, PrefillPolicy
from pdsim.policy.views import QueuedPrefill, TokenSequence

_WAIT = Wait()


@dataclass(frozen=True, kw_only=True)
class PrefillLimits:
    """What bounds one forward and the instance as a whole, by SGLang's names."""

    max_running_requests: int
    """Requests between their first chunk and the end of their transfer."""
    chunked_prefill_tokens: int | None
    """Tokens of one forward; None computes every prompt in one piece."""
    max_prefill_tokens: int
    """New tokens of one forward; the first prompt of a batch may exceed it."""
    overlap: bool = True
    """Choose the next forward while one runs, and see results one forward late (SGLang's overlap schedule)."""

    @property
    def max_first_tokens(self) -> int:
        """Slots that hold a first token until it is sent: SGLang's metadata buffers."""
        return 2 * self.max_running_requests


@dataclass(slots=True)
class PrefillRequest:
    request_id: int
    arrival_ns: int
    prompt: TokenSequence
    num_prompt_tokens: int
    decode_id: str
    cursor: SendCursor
    lease: Lease = field(default_factory=lambda: NO_LEASE)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0

    @property
    def num_sent_tokens(self) -> int:
        return self.cursor.num_sent_tokens

    @property
    def page_table(self) -> list[int]:
        return self.lease.table


@dataclass(slots=True)
class _Budget:
    """What is left of one forward while it is being filled."""

    chunk_tokens: int
    prefill_tokens: int
    num_prompts: int = 0

    def spend(self, num_tokens: int) -> None:
        self.chunk_tokens -= num_tokens
        self.prefill_tokens -= num_tokens
        self.num_prompts += 1

    @property
    def is_spent(self) -> bool:
        return self.chunk_tokens <= 0 or self.prefill_tokens <= 0


class PrefillInstance:
    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: PrefillLimits,
        policy: PrefillPolicy,
        planner: SendPlanner,
    ) -> None:
        self.instance_id = instance_id
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.max_steps_in_flight = 2 if limits.overlap else 1
        self.now_ns = 0
        self.bootstrapping: dict[int, NewRequest] = {}
        self.granted: list[PrefillRequest] = []
        self.sending: dict[int, PrefillRequest] = {}
        self._waiting: OrderedDict[int, PrefillRequest] = OrderedDict()
        self._early_grants: dict[int, KvGranted] = {}
        self._refused: set[int] = set()
        """Requests that one side will not serve: what still comes of them is ignored."""
        self._begun: dict[int, PrefillRequest] = {}
        self._partial: PrefillRequest | None = None
        """Of those begun, the one with tokens that no step has yet."""
        self._sent: list[int] = []
        self._policy = policy
        self._planner = planner
        self._num_steps = 0
        self._blocked_by = ""

    # What a prefill policy sees.

    @property
    def waiting(self) -> Collection[PrefillRequest]:
        return self._waiting.values()

    @property
    def num_available_pages(self) -> int:
        return self.cache.num_available_pages

    def num_cached_tokens(self, request: QueuedPrefill) -> int:
        return self.cache.num_cached_tokens(request.prompt)

    # What a driver calls.

    def on_message(self, message: Message, now_ns: int) -> list[Command]:
        match message:
            case NewRequest():
                return self._on_new_request(message)
            case KvGranted():
                if message.request_id in self.bootstrapping:
                    return self._grant(message)
                if message.request_id not in self._refused:
                    self._early_grants[message.request_id] = message
            case KvSent():
                self._sent.append(message.request_id)
            case Abort():
                if self.bootstrapping.pop(message.request_id, None) is None:
                    self._refused.add(message.request_id)
            case _:
                raise TypeError(f"{self.instance_id}: a prefill instance does not take {message}")
        return []

    def next_step(self, now_ns: int) -> tuple[Step | Wait, list[Command]]:
        self.now_ns = now_ns
        commands = self._release_sent() if self._sent else []
        self._blocked_by = ""
        if self.granted:
            self._enqueue_granted()
        if self._partial is None and not self._waiting:
            return _WAIT, commands
        chunks, hold_until_ns = self._fill_forward()
        if not chunks:
            return (_WAIT if hold_until_ns is None else Wait(hold_until_ns)), commands
        self._num_steps += 1
        step = PrefillStep(self._num_steps, tuple(chunks))
        for chunk in chunks:
            commands += self._planner.with_chunk(self._begun[chunk.request_id], chunk, step.step_id, now_ns)
        return step, commands

    def on_step_done(self, step: Step, result: StepResult, now_ns: int) -> list[Command]:
        assert isinstance(step, PrefillStep)
        ended = {request_id for request_id, _ in result.ended}
        commands: list[Command] = []
        for chunk in step.chunks:
            request = self._begun[chunk.request_id]
            request.num_computed_tokens += chunk.num_tokens
            self.cache.checkpoint(request.lease, request.prompt, request.num_computed_tokens)
            if chunk.is_last:
                self.sending[chunk.request_id] = self._begun.pop(chunk.request_id)
            commands += self._planner.after_chunk(request, chunk.is_last, chunk.request_id in ended, now_ns)
        return commands

    def holding(self) -> list[PrefillRequest]:
        """Requests that hold pages."""
        return [*self._begun.values(), *self.sending.values()]

    def levels(self) -> Levels:
        num_queued = len(self.granted) + len(self._waiting)
        return Levels(
            *self.cache.levels(),
            num_queued=num_queued,
            num_transferring=len(self.sending),
            num_ready=0,
            num_running=len(self._begun),
            num_retracted=0,
            blocked_by=self._blocked_by if num_queued else "",
        )

    def waiting_for(self) -> list[str]:
        where = self.instance_id
        lines = [f"{where}: request {i} waits for decode to grant pages" for i in self.bootstrapping]
        lines += [f"{where}: request {r.request_id} waits for a first-token slot" for r in self.granted]
        for r in self._waiting.values():
            have = f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
            lines.append(f"{where}: request {r.request_id} ({r.num_prompt_tokens} tokens) waits for its turn, {have}")
        return lines + [f"{where}: request {i} waits for its transfer to end" for i in self.sending]

    # Arriving and leaving.

    def _on_new_request(self, message: NewRequest) -> list[Command]:
        if message.request_id in self._refused:
            return []
        num_tokens = len(message.prompt)
        if num_tokens + 1 + self.page_size > self.cache.pool.num_pages * self.page_size:
            capacity = self.cache.pool.num_pages * self.page_size
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            self._refused.add(message.request_id)
            return [Send(message.decode_id, Abort(message.request_id, reason))]
        self.bootstrapping[message.request_id] = message
        if early := self._early_grants.pop(message.request_id, None):
            return self._grant(early)
        return []

    def _grant(self, grant: KvGranted) -> list[Command]:
        new = self.bootstrapping.pop(grant.request_id)
        cursor = self._planner.cursor(grant)
        if cursor is None:
            reason = f"its KV does not fit the staging ring of {new.decode_id}"
            return [Send(new.decode_id, Abort(new.request_id, reason))]
        self.granted.append(
            PrefillRequest(new.request_id, new.arrival_ns, new.prompt, len(new.prompt), new.decode_id, cursor)
        )
        return []

    def _enqueue_granted(self) -> None:
        """In order of arrival, as many as there are slots for their first tokens."""
        held = len(self._waiting) + len(self._begun) + len(self.sending)
        num_free = self.limits.max_first_tokens - held
        if num_free < len(self.granted):
            self._blocked_by = "slots"
        self.granted.sort(key=lambda request: (request.arrival_ns, request.request_id))
        for request in self.granted[:num_free]:
            self._waiting[request.request_id] = request
        del self.granted[:num_free]

    def _release_sent(self) -> list[Command]:
        commands: list[Command] = []
        for request_id in self._sent:
            request = self.sending.pop(request_id)
            self.cache.close(request.lease, request.prompt, request.num_prompt_tokens)
            commands.append(PrefillDone(request_id))
        self._sent = []
        return commands

    # Filling a forward.

    def _fill_forward(self) -> tuple[list[PrefillChunk], int | None]:
        limit = self.limits.chunked_prefill_tokens
        unlimited = 1 << 62
        budget = _Budget(unlimited if limit is None else limit, self.limits.max_prefill_tokens)
        chunks: list[PrefillChunk] = []
        if (partial := self._partial) is not None:
            room = (len(partial.lease.table) + self.num_available_pages) * self.page_size - partial.num_scheduled_tokens
            self._compute(partial, min(budget.chunk_tokens, room), budget, chunks)
            if self._partial is not None:
                return chunks, None
        if budget.is_spent or not self._waiting:
            return chunks, None
        picks = self._policy.select(self)
        if isinstance(picks, HoldUntil):
            return chunks, picks.time_ns
        for pick in picks:
            if not self._take(pick, budget, chunks) or self._partial is not None or budget.is_spent:
                break
        for chunk in chunks:  # only now: the policy may still have been walking along the queue
            self._waiting.pop(chunk.request_id, None)
        return chunks, None

    def _take(self, pick: Pick, budget: _Budget, chunks: list[PrefillChunk]) -> bool:
        """Lock the prompt's cached prefix and compute what fits of the rest; False if nothing does."""
        request = self._waiting.get(pick.request_id)
        if request is None or pick.request_id in self._begun:
            raise PolicyError(f"{self._policy}: picked request {pick.request_id}, which does not wait")
        if pick.max_tokens is not None and pick.max_tokens <= 0:
            raise PolicyError(f"{self._policy}: {pick} computes nothing")
        if len(self._begun) + len(self.sending) >= self.limits.max_running_requests:
            self._blocked_by = "slots"
            return False
        lease = self.cache.open(request.prompt, request.num_prompt_tokens - 1)
        num_cached = lease.num_shared * self.page_size
        num_new = request.num_prompt_tokens - num_cached
        spare = 1 + self.page_size
        fits = num_new + spare <= self.num_available_pages * self.page_size - spare * budget.num_prompts
        whole_pages = -(-num_new // self.page_size) * self.page_size
        first = budget.num_prompts == 0
        if not fits or (whole_pages >= budget.prefill_tokens and not first):
            self._blocked_by = "" if fits else "pages"
            self.cache.drop(lease)
            return False
        request.lease = lease
        request.num_cached_tokens = request.num_scheduled_tokens = request.num_computed_tokens = num_cached
        limit = budget.chunk_tokens if pick.max_tokens is None else min(budget.chunk_tokens, pick.max_tokens)
        if not self._compute(request, limit, budget, chunks):
            self.cache.drop(lease)
            return False
        return True

    def _compute(self, request: PrefillRequest, limit: int, budget: _Budget, chunks: list[PrefillChunk]) -> bool:
        """Add a chunk of at most limit tokens, if any; a prompt it does not complete is the partial one."""
        num_tokens = request.num_prompt_tokens - request.num_scheduled_tokens
        is_last = num_tokens <= limit
        if not is_last:
            num_tokens = limit - limit % self.page_size
            if num_tokens <= 0:
                return False
        self._partial = None if is_last else request
        chunks.append(PrefillChunk(request.request_id, request.num_scheduled_tokens, num_tokens, is_last))
        request.num_scheduled_tokens += num_tokens
        num_pages = -(-request.num_scheduled_tokens // self.page_size)
        self.cache.grow(request.lease, num_pages - len(request.lease.table))
        self._begun[request.request_id] = request
        budget.spend(num_tokens)
        return True
