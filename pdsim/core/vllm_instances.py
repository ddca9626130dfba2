"""vLLM's instances: prefill with a NixlConnector that pulls, and decode, which is the aggregated one too.

Prefill: decode reads what is computed, and prefill waits for it.
  parked      computed: pages are held, a slot is not               -> PromptComputed; on_message(KvGranted)
  expired     nobody began to read it in time                       next_step -> Abort to decode; its pages are free

Decode:
  waiting     NewRequest came, and its prompt is to be computed here  next_step: a slot, and pages for all of it
  preempted   gave its pages back, and nothing is admitted before it  next_step: pages for all that it lost
  computing   prompt and outputs so far, in chunks                    next_step -> MixedStep, on_step_done
  running     the last chunk gave the next token                      as in decode_instance.py

A step decodes all that run; what they leave of the token budget computes prompts. A prompt that is computed here is
treated as one that has lost its KV: its last chunk gives the first token.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pdsim.core import messages as m
from pdsim.core.admission_queue import DecodeRequest, decode_request
from pdsim.core.deadlines import Deadlines
from pdsim.core.decode_instance import DecodeInstance
from pdsim.core.decode_limits import DecodeLimits
from pdsim.core.forward_builder import UNLIMITED, Forward, ForwardBuilder, RequestT
from pdsim.core.instance import Levels
from pdsim.core.kv_cache import KvCache
from pdsim.core.kv_returns import KvGiver, KvTaker, Returning
from pdsim.core.prefill_instance import PrefillInstance, PrefillLimits
from pdsim.core.running_batch import FOREVER
from pdsim.core.send_planner import SendPlanner
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy, PrefillPolicy
from pdsim.policy.views import TokenSequence


class VllmForwardBuilder(ForwardBuilder[RequestT]):
    """Fills steps by vLLM's token budget: what running requests leave of it goes to prompts.

    Prompts that were begun go on in their order; then those that wait begin. A prompt may take all that is left, or a
    limit of its own, so that several are partly computed. Pages for the rest of each are reserved as it begins.
    """

    def __init__(
        self, *, cache: KvCache, policy: PrefillPolicy, budget_tokens: int | None, prompt_tokens: int | None
    ) -> None:
        """budget_tokens: of one step (max_num_batched_tokens), None for any number.

        prompt_tokens: of one prompt in a step (long_prefill_token_threshold), None for as many.
        """
        super().__init__(cache=cache, policy=policy, chunk_tokens=budget_tokens, max_prefill_tokens=UNLIMITED)
        self.spare_tokens = 0
        self._prompt_tokens = UNLIMITED if prompt_tokens is None else prompt_tokens
        self._partials: dict[int, RequestT] = {}
        """Begun prompts with tokens that no step has yet, in the order in which they began."""

    @property
    def is_midway(self) -> bool:
        return bool(self._partials)

    @property
    def last_partial(self) -> RequestT | None:
        return next(reversed(self._partials.values()), None)

    def stop(self, request: RequestT) -> None:
        self._partials.pop(request.request_id, None)

    def _is_full(self, forward: Forward) -> bool:
        return forward.is_spent

    def _go_on(self, forward: Forward) -> None:
        for partial in list(self._partials.values()):
            limit = min(forward.chunk_tokens, self._room_of(partial, forward))
            if not self._compute(partial, limit, forward):
                forward.reserved_tokens += partial.num_tokens - partial.num_scheduled_tokens + self.page_size

    def _compute(self, request: RequestT, limit: int, forward: Forward) -> bool:
        """Add a chunk of at most limit tokens, if any, and open its pages before the next prompt is looked at."""
        num_left = request.num_tokens - request.num_scheduled_tokens
        num_tokens = min(num_left, limit, self._prompt_tokens)
        if num_tokens <= 0:
            return False
        is_last = num_tokens == num_left
        if is_last:
            self._partials.pop(request.request_id, None)
        else:
            self._partials[request.request_id] = request
        forward.chunks.append(m.PrefillChunk(request.request_id, request.num_scheduled_tokens, num_tokens, is_last))
        request.num_scheduled_tokens += num_tokens
        self.begun[request.request_id] = request
        forward.chunk_tokens -= num_tokens
        forward.reserved_tokens += self.page_size + (request.num_growth_tokens if is_last else num_left - num_tokens)
        num_pages = -(-request.num_scheduled_tokens // self.page_size) - len(request.lease.table)
        self._cache.grow(request.lease, num_pages)
        return True

    def _open_pages(self, chunks: list[m.PrefillChunk]) -> None:
        """They are open."""


class VllmPrefillInstance(PrefillInstance):
    """Its pool alone limits how many computed prompts wait to be read."""

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: PrefillLimits,
        policy: PrefillPolicy,
        planner: SendPlanner,
        taker: KvTaker | None = None,
        prompt_tokens: int | None = None,
        hold_timeout_ns: int | None,
    ) -> None:
        """prompt_tokens: of one prompt in a step, if they are limited.

        hold_timeout_ns: from the end of a prompt's last forward until decode must have begun to read it, if ever
        """
        super().__init__(instance_id, cache=cache, limits=limits, policy=policy, planner=planner, taker=taker)
        self._builder = VllmForwardBuilder(
            cache=cache, policy=policy, budget_tokens=limits.chunked_prefill_tokens, prompt_tokens=prompt_tokens
        )
        cache.evict_as_vllm()
        self._unread = Deadlines(instance_id, hold_timeout_ns, "hold_timeout")

    @property
    def num_slots_sending(self) -> int:
        return 0

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        expired = self._expire_unread(now_ns)
        step, commands = super().next_step(now_ns)
        return step, [*expired, *commands]

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        assert isinstance(step, m.PrefillStep)
        commands = super().on_step_done(step, result, now_ns)
        for chunk in step.chunks:
            if chunk.is_last and self._is_unread(chunk.request_id):
                commands += self._unread.add(chunk.request_id, now_ns)
        return commands

    def _is_unread(self, request_id: int) -> bool:
        return request_id in self.sending and request_id in self._bootstrap.ungranted

    def _expire_unread(self, now_ns: int) -> list[m.Command]:
        commands: list[m.Command] = []
        for request_id in self._unread.expired(now_ns, commands, self._is_unread):
            reason = f"no decode instance read its KV on {self.instance_id} within {self._unread.limit}"
            decode_id = self.sending[request_id].decode_id
            commands.append(m.Send(decode_id, m.Abort(request_id, reason, retryable=True)))
            commands += self._give_up(request_id)
        return commands


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Limits of the tokens of one step."""

    step_tokens: int | None
    """Tokens of all requests; running ones come first. None: any number."""
    prompt_tokens: int | None = None
    """Tokens of one prompt. None: as many as are left."""


def was_preempted(request: DecodeRequest) -> bool:
    """True for a waiting request that gave its pages back: it has outputs."""
    return request.num_output_tokens > 0


class VllmDecodeInstance(DecodeInstance):
    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: DecodeLimits,
        budget: TokenBudget,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
        policy: PrefillPolicy | None = None,
        giver: KvGiver | None = None,
    ) -> None:
        """policy: picks prompts that are computed here; None: first come, first served."""
        super().__init__(
            instance_id,
            cache=cache,
            limits=limits,
            admission_policy=admission_policy,
            preemption_policy=preemption_policy,
            giver=giver,
        )
        self._builder: VllmForwardBuilder[DecodeRequest] = VllmForwardBuilder(
            cache=cache,
            policy=FirstComeFirstServed() if policy is None else policy,
            budget_tokens=budget.step_tokens,
            prompt_tokens=budget.prompt_tokens,
        )
        cache.evict_as_vllm()
        self._max_transferring = FOREVER
        self.batch.counts_ended = False
        self._num_forwards = 0
        self._preempts = False
        """Pages were lacking to the step that is being chosen."""
        self._blocked_by = ""
        """Lacking to the first prompt that could not be begun."""

    @property
    def retracted(self) -> Collection[DecodeRequest]:
        return [request for request in self._builder.waiting if was_preempted(request)]

    # What a driver calls.

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if isinstance(message, m.NewRequest) and message.prefill_id == self.instance_id:
            return self._on_prompt(message)
        return super().on_message(message, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        self._preempts, self._blocked_by = False, ""
        step, commands = super().next_step(now_ns)
        if not self._builder.has_work:
            return step, commands
        if not isinstance(step, m.DecodeStep):
            return self._compute_alone(now_ns, commands), commands
        if self._preempts:  # nothing is begun in such a step
            return replace(step, max_steps=1), commands
        forward = self._fill(now_ns, step.num_requests)
        if forward.chunks:
            prefill = self._prefill_step(forward, step.num_requests)
            return m.MixedStep(prefill, replace(step, max_steps=1)), commands
        return (step if forward.hold_until_ns is None else replace(step, max_steps=1)), commands

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        if isinstance(step, m.DecodeStep):
            return super().on_step_done(step, result, now_ns)
        if isinstance(step, m.PrefillStep):
            return self._on_computed(step, result)
        computed = {chunk.request_id for chunk in step.prefill.chunks}
        decoded = m.StepResult(1, tuple([ended for ended in result.ended if ended[0] not in computed]))
        commands = super().on_step_done(step.decode, decoded, now_ns)
        return [*commands, *self._on_computed(step.prefill, result)]

    def _on_computed(self, step: m.PrefillStep, result: m.Result) -> list[m.Command]:
        outputs = dict(result.ended)
        commands: list[m.Command] = []
        for chunk in step.chunks:
            request = self._builder.complete(chunk)
            if chunk.is_last:
                commands += self._run_again(request, outputs.get(chunk.request_id))
        return commands

    def page_table(self, request_id: int) -> Sequence[int]:
        begun = self._builder.begun.get(request_id)
        return super().page_table(request_id) if begun is None else begun.lease.table

    def holding(self) -> list[DecodeRequest | Returning]:
        return [*super().holding(), *self._builder.begun.values()]

    def requests(self) -> list[int]:
        return [*super().requests(), *(waiting.request_id for waiting in self._builder.waiting)]

    def levels(self) -> Levels:
        levels = super().levels()
        num_preempted = len(self.retracted)
        return levels._replace(
            num_queued=levels.num_queued + len(self._builder.waiting) - num_preempted,
            num_running=levels.num_running + len(self._builder.begun),
            num_retracted=num_preempted,
            blocked_by=levels.blocked_by or ("pages" if num_preempted else self._blocked_by),
        )

    def waiting_for(self) -> list[str]:
        have = f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
        lines = super().waiting_for()
        for request in self._builder.waiting:
            waits = "is preempted and waits to be computed again" if was_preempted(request) else "waits for its turn"
            lines.append(f"{self.instance_id}: request {request.request_id} {waits}, {have}")
        return lines

    # Admission.

    @property
    def _num_slots(self) -> int:
        """Only running requests count: those whose KV is on its way hold pages, but no slot."""
        return self._num_places + len(self.transferring) + len(self.ready.requests)

    @property
    def _num_places(self) -> int:
        return self.limits.max_running_requests - len(self._builder.begun)

    def _take_in(self, commands: list[m.Command]) -> int:
        """Nothing is admitted before a preempted request, nor before a prompt to be computed here that came earlier."""
        if not self._builder.waiting:
            return super()._take_in(commands)
        first = next(iter(self._builder.waiting))
        if not was_preempted(first) and self.queue.queued and self.queue.queued[0].arrival_ns < first.arrival_ns:
            return super()._take_in(commands)
        self._collect_arrived(commands)
        return FOREVER

    def _on_prompt(self, message: m.NewRequest) -> list[m.Command]:
        num_tokens, capacity = len(message.prompt), self.cache.capacity_tokens
        if num_tokens + 1 + self.page_size > capacity:
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            return [m.Failed(message.request_id, reason)]
        self._builder.enqueue(decode_request(message))
        return []

    def _cancel(self, cancel: m.Cancel, now_ns: int) -> list[m.Command]:
        if begun := self._builder.begun.pop(cancel.request_id, None):
            self._builder.stop(begun)
            self.cache.drop(begun.lease)
            return []
        if self._builder.withdraw(cancel.request_id):
            return []
        return super()._cancel(cancel, now_ns)

    # Preemption.

    def _make_room(self, commands: list[m.Command]) -> bool:
        lacked = self.batch.num_opening_pages > self.num_available_pages
        self._preempts |= lacked
        while self.batch.num_opening_pages > self.num_available_pages:
            if (partial := self._builder.last_partial) is None:
                break
            self._stop_computing(partial)
        for request in self.batch.make_room(self._preemption_policy, self):
            if self.holding():
                self._builder.enqueue(request, first=True)
                commands.append(m.Retracted(request.request_id))
            else:
                commands.append(m.Failed(request.request_id, self._outgrown(request)))
        return lacked

    def _stop_computing(self, partial: DecodeRequest) -> None:
        """It gives way first, and begins again."""
        self._builder.stop(partial)
        del self._builder.begun[partial.request_id]
        self.cache.drop(partial.lease)
        self._builder.enqueue(partial, first=True)

    # Computing.

    def _fill(self, now_ns: int, num_decode_tokens: int) -> Forward:
        """The next chunks, as far as there is room."""
        num_slots = self._num_places - self.batch.num_requests
        forward = self._builder.fill(now_ns, num_slots, num_decode_tokens=num_decode_tokens)
        self._blocked_by = forward.blocked_by
        return forward

    def _prefill_step(self, forward: Forward, num_decode_tokens: int) -> m.PrefillStep:
        self._num_forwards += 1
        return m.PrefillStep(self._num_forwards, tuple(forward.chunks), num_decode_tokens)

    def _compute_alone(self, now_ns: int, commands: list[m.Command]) -> m.PrefillStep | m.Wait:
        """Nothing runs. What has no room although nobody else holds pages never has."""
        forward = self._fill(now_ns, 0)
        while not forward.chunks and forward.blocked_by and self._builder.waiting and not self.holding():
            largest = max(self._builder.waiting, key=lambda waiting: waiting.num_tokens)
            self._builder.withdraw(largest.request_id)
            commands.append(m.Failed(largest.request_id, self._outgrown(largest)))
            forward = self._fill(now_ns, 0)
        return self._prefill_step(forward, 0) if forward.chunks else m.Wait(forward.hold_until_ns)

    def _run_again(self, request: DecodeRequest, output: TokenSequence | None) -> list[m.Command]:
        commands: list[m.Command] = [] if request.num_output_tokens else [m.FirstToken(request.request_id)]
        request.num_output_tokens += 1
        if output is not None:
            self.batch.close(request, output)
            return [*commands, m.Finished(request.request_id)]
        self.batch.join(request)
        return commands
