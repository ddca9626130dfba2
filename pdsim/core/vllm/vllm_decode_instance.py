"""vLLM's decode instance, which also serves as aggregated instance. With NixlConnector, decode pulls KV from prefill.

States of a request whose prompt decode computes; decode_instance.py has those of other requests:

state       meaning                                              left by
waiting     NewRequest came                                      next_step: a slot, and pages for the whole prompt
preempted   lost its pages, and stands first in the queue        next_step: pages for all lost KV
computing   prompt and outputs so far, in chunks                 next_step -> MixedStep or PrefillStep, on_step_done
running     the last chunk gave the next token                   as in decode_instance.py

A step decodes all running requests, and spends the rest of the token budget on prompts. A prompt that decode computes
is treated like a request that has lost its KV. Its last chunk gives the first token.
"""

from collections.abc import Collection
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.decode.admission_queue import DecodeRequest, decode_request
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.decode.running_batch import FOREVER
from pdsim.core.instance import Levels, PolicyError
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.prefill.forward_builder import Forward
from pdsim.core.transfer.kv_returns import KvGiver, Returning
from pdsim.core.vllm.copy_messages import on_copied
from pdsim.core.vllm.embedding_reads import EmbeddingReads
from pdsim.core.vllm.prefill_cadence import PrefillCadence
from pdsim.core.vllm.vllm_forward_builder import TokenBudget, VllmForwardBuilder
from pdsim.policy.prefill import FirstComeFirstServed
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy, PrefillPolicy
from pdsim.policy.views import TokenSequence


def was_preempted(request: DecodeRequest) -> bool:
    """True if a waiting request was preempted after its first token: it has output tokens. False for a request that was
    preempted before its prompt was computed.
    """
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
        reads: EmbeddingReads | None = None,
    ) -> None:
        """policy: order of the prompts that this instance computes itself; None: first come, first served. giver: sends
        KV back to prefill; None: no KV returns. reads: reads embeddings of prompts from encode instances; None: this
        instance encodes images and audio clips itself.
        """
        super().__init__(
            instance_id,
            cache=cache,
            limits=limits,
            admission_policy=admission_policy,
            preemption_policy=preemption_policy,
            giver=giver,
        )
        self._builder: VllmForwardBuilder[DecodeRequest] = VllmForwardBuilder(
            cache=cache, policy=FirstComeFirstServed() if policy is None else policy, budget=budget, reads=reads
        )
        cache.evict_as_vllm()
        self._max_transferring = FOREVER
        self.batch.counts_ended = False
        self.batch.caches_unseen = limits.rules.caches_unseen
        self._cadence = PrefillCadence(budget.prefill_interval_steps)
        self._num_forwards = self._num_admitted = 0
        self._preempts = False
        """True: a request was preempted for the next step, so the step begins no further request."""
        self._blocked_by = ""
        """Resource that the first blocked prompt lacks: "slots" or "pages". Empty: no prompt is blocked."""

    @property
    def retracted(self) -> Collection[DecodeRequest]:
        return [request for request in self._builder.unbegun if was_preempted(request)]

    # What a driver calls.

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if isinstance(message, m.NewRequest) and message.prefill_id == self.instance_id:
            return self._on_prompt(message)
        if on_copied(message, self._builder, self.cache):
            return []
        return super().on_message(message, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        self._preempts, self._blocked_by = False, ""
        self.cache.begin_step()
        num_held = self._cadence.num_held_steps if self.batch.num_requests else 0
        self._builder.is_held = num_held > 0
        step, commands = super().next_step(now_ns)
        if not self._builder.has_work:
            if not num_held:
                self._cadence.on_filled(0)
            return step, commands
        if not isinstance(step, m.DecodeStep):
            return self._compute_alone(now_ns, commands), commands
        if num_held:
            return replace(step, max_steps=min(step.max_steps, num_held)), commands
        forward = self._fill(now_ns, step.num_requests, commands)
        if forward.chunks:
            prefill = self._prefill_step(forward, step.num_requests)
            return m.MixedStep(prefill, replace(step, max_steps=1)), commands
        asks_soon = self._preempts or forward.hold_until_ns is not None or not self._builder.keeps_order
        if self.cache.pages_per_growth > 1:  # what running requests evict, a prompt may load
            asks_soon |= self.cache.num_left_pages > 0 or self.cache.offload is not None
        asks_soon |= self.cache.chunks is not None and self.cache.chunks.is_asking
        return (replace(step, max_steps=1) if asks_soon else step), commands

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        if isinstance(step, m.DecodeStep):
            self._cadence.on_steps(result.num_steps, has_prompts=False)
            return super().on_step_done(step, result, now_ns)
        self._cadence.on_steps(1, has_prompts=True)
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
        return [*commands, *self.cache.take_connector_copies()]

    def lease(self, request_id: int) -> Lease:
        begun = self._builder.begun.get(request_id)
        return super().lease(request_id) if begun is None else begun.lease

    def holding(self) -> list[DecodeRequest | Returning]:
        return [*super().holding(), *self._builder.begun.values(), *self._builder.loads]

    def requests(self) -> list[int]:
        return [*super().requests(), *(waiting.request_id for waiting in self._builder.waiting)]

    def levels(self) -> Levels:
        levels = super().levels()
        num_preempted = len(self.retracted)
        return levels._replace(
            num_queued=levels.num_queued + self._builder.num_unbegun - num_preempted,
            num_running=levels.num_running + len(self._builder.begun),
            num_retracted=num_preempted,
            blocked_by=levels.blocked_by or ("pages" if num_preempted else self._blocked_by),
        )

    def waiting_for(self) -> list[str]:
        have = f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
        lines = super().waiting_for()
        for request in self._builder.unbegun:
            waits = "is preempted and waits to be computed again" if was_preempted(request) else "waits for its turn"
            lines.append(f"{self.instance_id}: request {request.request_id} {waits}, {have}")
        return lines

    # Admission.

    @property
    def _num_slots(self) -> int:
        """Decode admits requests while num_active is below this number: _num_places, plus the number of active requests
        that take no place. These are requests whose KV is on its way, ready requests and failed requests in
        Releases.unseen.
        """
        num_slotless = len(self.transferring) + len(self.ready.requests) + len(self._releases.unseen)
        return self._num_places + num_slotless

    @property
    def _num_places(self) -> int:
        return self.limits.max_running_requests - len(self._builder.begun)

    def _take_in(self, commands: list[m.Command]) -> int:
        """Admits queued requests, unless the first prompt that waits to be computed here was preempted, or arrived no
        later than the first queued request. Returns the number of decode steps after which admission is tried again, if
        no message comes first.
        """
        if not self._builder.waiting:
            return super()._take_in(commands)
        first = next(iter(self._builder.waiting))
        if not was_preempted(first) and self.queue.queued and self.queue.queued[0].arrival_ns < first.arrival_ns:
            return super()._take_in(commands)
        return FOREVER

    def _change(self, commands: list[m.Command]) -> tuple[int, bool]:
        """Gives running requests pages for the next step, and preempts requests if pages are lacking. If no request is
        preempted, and running requests and begun prompts leave tokens of the step's budget, arrived requests join the
        batch and queued requests are admitted. Returns (number of steps until the next call, whether the batch
        changed). A preemption counts as a change only if no prompt is partly computed.
        """
        self._preempts = joined = False
        num_available_pages = self.num_available_pages
        self._make_way(commands)
        if begins := not self._preempts and self._builder.leaves_tokens(self.batch.num_requests):
            if self._arrived or self._scattered:
                self._collect_arrived(commands)
            joined = self._join(commands)
        for _ in self.batch.make_room(self._preemption_policy, self):
            raise AssertionError("there was room")
        if self._preempts or not begins:
            return 1, self._preempts and not self._builder.is_midway
        ask_again_steps = self._take_in(commands)
        if (self.queue.queued or self._builder.is_midway) and self.num_available_pages < num_available_pages:
            ask_again_steps = 1  # pages are taken: a begun prompt may lack its own now, and the policy sees fewer
        return ask_again_steps, joined

    def _join(self, commands: list[m.Command]) -> bool:
        """Moves ready requests into the batch: the highest priority first, then in order of admission. Stops if the
        batch has no place left, or if a request was preempted because pages ran out. Returns True if a request joined.
        """
        ready, joined = self.ready.requests, False
        ready.sort(key=lambda request: (-request.priority, request.entry))
        while ready and self.batch.num_requests < self._num_places and not self._preempts:
            self._set_entry(ready[0])
            self._cache_arrived(ready[0])
            self._merge_one(ready.pop(0), commands)
            self._make_way(commands)
            joined = True
        return joined

    def _admit(self, commands: list[m.Command]) -> None:
        """Admits requests, and numbers them in the order of admission (`entry`)."""
        super()._admit(commands)
        for request in self.transferring.values():
            if not request.entry:
                self._set_entry(request)

    def _set_entry(self, request: DecodeRequest) -> None:
        """Sets the request's `entry`, which orders running requests, to a higher number than every `entry` that was set
        before.
        """
        self._num_admitted += 1
        request.entry = self._num_admitted

    def _on_prompt(self, message: m.NewRequest) -> list[m.Command]:
        num_tokens, capacity = len(message.prompt), self.cache.capacity_tokens
        if num_tokens + 1 + self.page_size > capacity:
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            return [m.Failed(message.request_id, reason)]
        self._builder.enqueue(decode_request(message))
        return []

    def _cancel(self, cancel: m.Cancel, now_ns: int) -> list[m.Command]:
        if begun := self._builder.begun.get(cancel.request_id):
            self._builder.give_up(begun)
            return []
        if self._builder.withdraw(cancel.request_id):
            return []
        return super()._cancel(cancel, now_ns)

    # Preemption.

    @property
    def running(self) -> list[DecodeRequest]:
        """Decoding requests and partly computed prompts, in the order in which they began to run."""
        return sorted([*self.batch.requests(), *self._builder.partials], key=lambda request: request.entry)

    def _make_way(self, commands: list[m.Command]) -> None:
        """Preempts running requests until the remaining ones have pages for the next step. Adds messages on preempted
        requests to `commands`, as `_preempt` does.
        """
        while self._lacks_pages:
            self._preempts = True
            self._preempt(self._preemption_policy.victim(self), commands)

    @property
    def _lacks_pages(self) -> bool:
        num_partials = self._builder.num_opening_pages(self.batch.num_requests)
        return self.batch.num_opening_pages + num_partials > self.num_available_pages

    def _preempt(self, request_id: int, commands: list[m.Command]) -> None:
        """Preempts a running request: frees its pages, and puts it first in the queue of prompts to compute. A decoding
        request fails instead if no other request holds pages. Adds Retracted or Failed to `commands` for a decoding
        request, and nothing for a partly computed prompt. Raises PolicyError if the request does not run.
        """
        builder = self._builder
        if begun := builder.begun.get(request_id):
            builder.preempt(begun)
        elif self.batch.has(request_id):
            request = self.batch.retract(request_id)
            if self.holding():
                builder.enqueue(request, first=True)
                commands.append(m.Retracted(request_id))
            else:
                commands.append(m.Failed(request_id, self._outgrown(request)))
        else:
            raise PolicyError(f"{self._preemption_policy}: chose request {request_id}, which does not run")

    # Computing.

    def _fill(self, now_ns: int, num_decode_tokens: int, commands: list[m.Command]) -> Forward:
        """Returns the next step's chunks of prompts, and adds messages and copies to `commands`. If the step has chunks
        and tokens left, and no request was preempted, also admits queued requests as `_take_in` does.
        num_decode_tokens: number of running requests.
        """
        num_slots = None if self._preempts else self._num_places - self.batch.num_requests
        partials = {partial.request_id for partial in self._builder.partials}
        forward = self._builder.fill(now_ns, num_slots, num_decode_tokens=num_decode_tokens)
        commands += [*self.cache.take_connector_copies(), *self._builder.take_reads()]
        if not self._preempts:
            self._cadence.on_filled(self._builder.num_ready)
        for chunk in forward.chunks:
            if chunk.request_id not in partials:
                self._set_entry(self._builder.begun[chunk.request_id])
        self._blocked_by = forward.blocked_by
        if self.queue.queued and forward.chunks and forward.chunk_tokens > 0 and not self._preempts:
            self._take_in(commands)
        return forward

    def _prefill_step(self, forward: Forward, num_decode_tokens: int) -> m.PrefillStep:
        self._num_forwards += 1
        chunks, media = tuple(forward.chunks), tuple(forward.media)
        return m.PrefillStep(self._num_forwards, chunks, num_decode_tokens, media)

    def _compute_alone(self, now_ns: int, commands: list[m.Command]) -> m.PrefillStep | m.Wait:
        """Returns a step that computes prompts while no request decodes, or a Wait if no prompt can be computed. If no
        waiting prompt fits although no request holds pages, the longest waiting prompt fails, and the rest is tried
        again. Adds Failed to `commands` for each failed prompt.
        """
        forward = self._fill(now_ns, 0, commands)
        while not forward.chunks and forward.blocked_by and self._builder.waiting and not self.holding():
            largest = max(self._builder.waiting, key=lambda waiting: waiting.num_tokens)
            self._builder.withdraw(largest.request_id)
            commands.append(m.Failed(largest.request_id, self._outgrown(largest)))
            forward = self._fill(now_ns, 0, commands)
        return self._prefill_step(forward, 0) if forward.chunks else m.Wait(forward.hold_until_ns)

    def _run_again(self, request: DecodeRequest, output: TokenSequence | None) -> list[m.Command]:
        commands: list[m.Command] = [] if request.num_output_tokens else [m.FirstToken(request.request_id)]
        request.num_output_tokens += 1
        if output is not None:
            self.batch.close(request, output)
            return [*commands, m.Finished(request.request_id)]
        self.batch.join(request)
        return commands
