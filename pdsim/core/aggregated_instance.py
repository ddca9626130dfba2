"""Life of a request in an aggregated instance, which computes prompts and decodes on one GPU group, one step at a time.

state     meaning                                               left by
waiting   NewRequest came, or the request was retracted         next_step: the policy picks the request
begun     chunks are computed; one prompt may be incomplete     next_step -> PrefillStep, on_step_done -> FirstToken
running   one token per step                                    next_step -> DecodeStep, on_step_done
gone      prompt and output are cached                          -> Finished

A waiting or begun request that is cancelled, or that waited too long, is dropped at once; SGLang 0.5.12 first computes
a begun prompt. A running request that is cancelled first gets one more token, and its KV is cached. Prompts come first:
the batch decodes only when no prompt can be begun or continued, or in a step with prompts (mixed_chunk). A retracted
request goes to the end of the queue. A later forward computes its prompt and its outputs so far again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.aggregated_limits import AggregatedLimits, AggregatedRequest, ReceiveInterval
from pdsim.core.deadlines import Deadlines
from pdsim.core.decode.asked_outputs import AskedOutputs
from pdsim.core.decode.new_token_ratio import NewTokenRatio
from pdsim.core.decode.running_batch import (
    FOREVER,
    DecodingInstance,
    RunningBatch,
    running_batch,
)
from pdsim.core.fixed_outputs import SimulatedEnds
from pdsim.core.instance import LACKS, Levels
from pdsim.core.memory.kv_cache import KvCache, Lease
from pdsim.core.prefill.forward_builder import Forward, ForwardBuilder
from pdsim.policy.protocols import PreemptionPolicy, PrefillPolicy
from pdsim.policy.views import TokenSequence


class AggregatedInstance(DecodingInstance[AggregatedRequest]):
    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: AggregatedLimits,
        policy: PrefillPolicy,
        preemption_policy: PreemptionPolicy,
    ) -> None:
        self.instance_id = instance_id
        self.max_steps_in_flight = 1
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.now_ns = 0
        self.batch: RunningBatch[AggregatedRequest] = running_batch(cache, limits.drafts, limits.wave_requests)
        self.batch.counts_ended = limits.overlap or not limits.rules.filters_ended
        self._arrived: list[AggregatedRequest] = []
        """Requests that arrived since the loop last chose a step."""
        self._builder: ForwardBuilder[AggregatedRequest] = ForwardBuilder(
            cache=cache,
            policy=policy,
            chunk_tokens=limits.chunked_prefill_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
            max_requests=limits.prefill_max_requests,
            rules=limits.rules,
            give_way=None if limits.preemption_threshold is None else self._give_way,
            allows_fixed=self._allows_fixed,
            shares_late=True,
        )
        self._ends: SimulatedEnds | None = None
        """Expected ends of running requests. Computed at most once for each forward."""
        self._asked: AskedOutputs[AggregatedRequest] = AskedOutputs(instance_id, self.batch, cache)
        self._gave_way: list[AggregatedRequest] = []
        """Requests that were preempted for prompts of the next forward."""
        self._retracted: dict[int, AggregatedRequest] = {}
        """Retracted requests whose KV has not been recomputed yet."""
        self._preemption_policy = preemption_policy
        self._ratio = NewTokenRatio(limits.schedule_conservativeness)
        self._receives = ReceiveInterval(limits.recv_interval_steps)
        self._unbegun = Deadlines(instance_id, limits.waiting_timeout_ns, "waiting_timeout")
        self._num_prefill_steps = 0
        self._may_give_way = False
        """True: running requests of lower priority exist, but preempting all of them would not make enough room for the
        waiting request."""
        self._blocked_by = ""
        """Resource that the first blocked prompt lacked: "slots" or "pages". Empty: no prompt is blocked. Otherwise
        no prompt begins until a request leaves the batch (SGLang's batch_is_full)."""

    # What a preemption policy sees.

    @property
    def num_active(self) -> int:
        return self.batch.num_requests

    @property
    def active(self) -> list[AggregatedRequest]:
        return self.batch.requests()

    @property
    def retracted(self) -> Collection[AggregatedRequest]:
        return self._retracted.values()

    # What a driver calls.

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        match message:
            case m.NewRequest():
                return self._on_new_request(message, now_ns)
            case m.Cancel():
                self._give_up(message.request_id)
            case m.PutOut():
                self._asked.on_put_out(message, self._retracted)
            case m.FlushCache():
                self.cache.flush()
            case m.Prefetched():
                assert self.cache.prefetcher is not None
                self.cache.prefetcher.on_prefetched(message)
            case m.Woken():
                pass
            case _:
                raise TypeError(f"{self.instance_id}: an aggregated instance does not take {message}")
        return []

    def _on_new_request(self, new: m.NewRequest, now_ns: int) -> list[m.Command]:
        num_tokens, capacity = len(new.prompt), self.cache.capacity_tokens
        room = capacity - -(-num_tokens // self.page_size) * self.page_size - self.page_size - 1
        if room < 1:
            reason = f"a prompt of {num_tokens} tokens does not fit the {capacity} tokens of {self.instance_id}"
            return [m.Failed(new.request_id, reason)]
        max_output_tokens = min(new.max_output_tokens, room)  # or it could never be begun
        request = AggregatedRequest(
            new.request_id,
            new.arrival_ns,
            new.prompt,
            num_tokens,
            new.priority,
            max_output_tokens=max_output_tokens,
            has_fixed_output=new.ignores_eos,
        )
        self._arrived.append(request)
        self.cache.prefetch(request.request_id, request.prompt, now_ns)
        return self._unbegun.add(request.request_id, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        self.now_ns = now_ns
        commands: list[m.Command] = []
        if self.limits.waiting_timeout_ns is not None:
            self._expire(commands)
        step = self._choose(commands)
        num_held = self._receives.num_held_steps(step, self.batch.num_steps)
        may_preempt = bool(self._arrived) and self.limits.preemption_threshold is not None
        if self._arrived and num_held:
            assert isinstance(step, m.DecodeStep)
            step = replace(step, max_steps=min(step.max_steps, num_held))
        elif self._arrived:
            self._look_at_arrived()
            if isinstance(step, m.Wait):
                step = self._choose(commands)
        if self.cache.host is not None:
            commands += self.cache.host.take_copies()
        may_begin = bool(self._builder.waiting) and (not self._blocked_by or self._tries_anew)
        may_begin = may_begin or may_preempt or self._may_give_way
        if isinstance(step, m.DecodeStep) and (may_begin or self.batch.num_aborted):
            step = replace(step, max_steps=1)
        return step, commands

    @property
    def _tries_anew(self) -> bool:
        """True if a prompt that could not begin for lack of pages is tried again in each step. This is so if prompts
        may preempt running requests: SGLang then resets batch_is_full, its flag that no prompt can begin.
        """
        return self.limits.preemption_threshold is not None and self._blocked_by == "pages"

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        if isinstance(step, m.PrefillStep):
            return self._on_prefill_done(step, dict(result.ended))
        self.batch.advance(result)
        if isinstance(step, m.MixedStep):
            return self._on_mixed_done(step, dict(result.ended))
        return self._on_decoded(result.ended)

    def _on_mixed_done(self, step: m.MixedStep, outputs: dict[int, TokenSequence]) -> list[m.Command]:
        """Handles a step with prompts and running requests. outputs: tokens of ended requests, by id. Finished prompts
        come before running requests, as in SGLang's forward (managers/scheduler.py, 0.5.23, :3959).
        """
        self._ratio.on_mixed_step()
        running = [request.request_id for request in self.batch.requests()]
        commands = self._on_prefill_done(step.prefill, outputs)
        self.batch.put_last(running)
        self._blocked_by = ""
        return commands + self._on_decoded([(i, outputs[i]) for i in running if i in outputs])

    def _on_decoded(self, ended: Sequence[tuple[int, TokenSequence]]) -> list[m.Command]:
        commands: list[m.Command] = []
        for request_id, output in ended:
            if not self.batch.end(request_id, output).is_aborted:
                commands.append(m.Finished(request_id))
        aborted = self.batch.take_aborted() if self.batch.num_aborted else []
        for request in aborted:
            commands += self._asked.close(request)
        if (ended or aborted) and not self.batch.counts_ended:
            self._blocked_by = ""
        return commands

    def lease(self, request_id: int) -> Lease:
        """Lease of a begun or running request. Raises KeyError if the request has no pages."""
        begun = self._builder.begun.get(request_id)
        return self.batch.lease(request_id) if begun is None else begun.lease

    def holding(self) -> list[AggregatedRequest]:
        """Requests that hold pages."""
        return [*self._builder.begun.values(), *self.batch.requests(), *self._asked.closing.values()]

    def requests(self) -> list[int]:
        """Ids of all requests of the instance, in any state."""
        held = [*self._arrived, *self._builder.waiting, *self.holding(), *self._retracted.values()]
        return [request.request_id for request in held]

    def levels(self) -> Levels:
        num_queued = len(self._arrived) + len(self._builder.waiting)
        return Levels(
            *self.cache.levels(),
            num_queued=num_queued,
            num_running=len(self._builder.begun) + self.batch.num_requests,
            num_retracted=len(self._retracted),
            blocked_by=self._blocked_by if num_queued else "",
        )

    def waiting_for(self) -> list[str]:
        where, have = self.instance_id, f"{self.num_available_pages} of {self.cache.pool.num_pages} pages available"
        waiting = [*self._builder.waiting, *self._arrived]
        return [f"{where}: request {r.request_id} ({r.num_tokens} tokens) waits for its turn, {have}" for r in waiting]

    # Choosing a step.

    def _look_at_arrived(self) -> None:
        for request in self._arrived:
            self._builder.enqueue(request)
        self._arrived = []

    def _choose(self, commands: list[m.Command]) -> m.Step | m.Wait:
        while (step := self.look(commands)) is None:
            pass
        return step

    def look(self, commands: list[m.Command]) -> m.Step | m.Wait | None:
        """Runs one iteration of SGLang's scheduler loop, and adds messages to `commands`. Returns the iteration's step,
        or a Wait if no prompt can be computed and no request runs. None: no step; the caller runs the next iteration at
        once. SGLang 0.5.12 spends such an iteration on dropping a batch whose requests have all ended
        (managers/scheduler.py:2588, 2904), and tries prompts in the next one.
        """
        if not self.limits.overlap:
            self._look_at_arrived()
        self._may_give_way = False
        if self.limits.preemption_threshold is not None:
            self._blocked_by = ""  # tried anew with each step
        forward = self._fill_forward(commands)
        if forward.chunks:
            return self._prefill_step(forward)
        if self.batch.ended:
            self.batch.ended, self._blocked_by = [], ""
            if not self.batch.num_requests:
                self._be_idle()
                return None
        if not self.batch.num_requests:
            self._be_idle()
            return m.Wait(forward.hold_until_ns)
        self._make_room(commands)
        return self.batch.step(FOREVER) if self.batch.num_requests else None

    def _prefill_step(self, forward: Forward) -> m.PrefillStep | m.MixedStep:
        """Returns the step that computes a forward. With mixed_chunk, running requests take part if there are pages for
        all of them (managers/scheduler.py, 0.5.23, :4377).
        """
        self._num_prefill_steps += 1
        prefill = m.PrefillStep(self._num_prefill_steps, tuple(forward.chunks))
        if not self.limits.mixed_chunk or not self.batch.num_requests or not self.batch.fits_a_step():
            return prefill
        for _ in self.batch.make_room(self._preemption_policy, self):
            raise AssertionError("there was room")
        decode = self.batch.step(1)
        return m.MixedStep(replace(prefill, num_decode_tokens=decode.num_requests), decode)

    def _be_idle(self) -> None:
        """If no request runs or waits, resets new_token_ratio to its initial value."""
        if not self._builder.has_work and not self._arrived:
            self._ratio.on_idle(self._num_steps)

    def _give_way(self, waiting: AggregatedRequest, num_free_tokens: float) -> float:
        """Preempts running requests of lower priority if that makes room for a waiting request.

        num_free_tokens: number of tokens that the forward may still take. Returns the number of tokens that were
        reserved for outputs of the preempted requests; -1: no request was preempted.
        """
        threshold, running = self.limits.preemption_threshold, self.batch.requests()
        assert threshold is not None
        lacking = waiting.num_tried_tokens + waiting.num_reserved_tokens - num_free_tokens
        victims: dict[int, AggregatedRequest] = {}
        for request in sorted(running, key=lambda r: (r.priority, -r.entry)):
            if waiting.priority - request.priority <= threshold or (victims and lacking <= 0):
                break
            victims[request.request_id] = request
            lacking -= self._expected_growth([request])
        if not victims or lacking > 0:
            self._may_give_way = bool(victims)
            return -1
        num_reserved = self._expected_growth(self.running)
        self._gave_way += [self.batch.retract(r.request_id) for r in running if r.request_id in victims]
        return num_reserved - self._expected_growth(self.running)

    def _expected_growth(self, running: list[AggregatedRequest]) -> float:
        """Number of further output tokens that these running requests are expected to produce. For each request this is
        new_token_ratio times the rest of its maximum output, of which at most MAX_ESTIMATED_TOKENS count. For a request
        that ignores EOS, it is this whole rest if EngineRules.expects_fixed_outputs is True.
        """
        ratio = self._ratio.at(self._num_steps)
        if not self.limits.rules.expects_fixed_outputs:
            return sum([request.num_growth_tokens * ratio for request in running])
        return sum([r.num_growth_tokens * (1.0 if r.has_fixed_output else ratio) for r in running])

    def _allows_fixed(self, request: AggregatedRequest, begun: list[AggregatedRequest], num_free_tokens: int) -> bool:
        if self._ends is None:
            self._ends = SimulatedEnds(self.running, self._ratio.at(self._num_steps))
        return self._ends.allow(request, begun, num_free_tokens)

    def _fill_forward(self, commands: list[m.Command]) -> Forward:
        """Fills the next forward with prompts, and adds messages about preempted requests to `commands`. No prompt
        begins while `_blocked_by` is set, or if all slots are taken and prompts may not preempt.
        """
        num_slots, reserved_tokens, may_preempt = None, 0.0, self.limits.preemption_threshold is not None
        num_decode_tokens = len(self.running) if self.limits.mixed_chunk else 0
        self._ends = None
        if self._builder.waiting and not self._blocked_by:
            if self._num_slots > 0 or may_preempt:
                reserved_tokens = self._expected_growth(self.running)
                num_slots = max(0, self._num_slots)
            else:
                self._blocked_by = "slots"
        forward = self._builder.fill(
            self.now_ns, num_slots, reserved_tokens=reserved_tokens, num_decode_tokens=num_decode_tokens
        )
        self._blocked_by = forward.blocked_by or self._blocked_by
        for request in self._gave_way:
            self._requeue(request, commands)
        self._gave_way = []
        return forward

    def _requeue(self, request: AggregatedRequest, commands: list[m.Command]) -> None:
        """Puts a request that lost its pages at the end of the queue, and adds messages about the retraction to
        `commands`. Does nothing if the client has aborted the request.
        """
        if request.is_aborted:
            return
        self._retracted[request.request_id] = request
        self._builder.enqueue(request)
        commands += [m.Retracted(request.request_id), *self._asked.ask(request)]

    @property
    def _num_steps(self) -> int:
        """Number of decode steps so far, on which the estimate of output lengths (NewTokenRatio) depends."""
        return self.batch.num_steps

    @property
    def _num_slots(self) -> int:
        return self.limits.max_running_requests - self.num_active - len(self.batch.ended) - len(self._builder.begun)

    def _make_room(self, commands: list[m.Command]) -> None:
        """Allocates the pages that the next step needs. If there are too few pages, retracts requests, and adds
        messages about these requests to `commands`.
        """
        lacked = False
        for request in self.batch.make_room(self._preemption_policy, self):
            lacked = True
            self._blocked_by = ""
            if self.batch.num_requests:
                self._requeue(request, commands)
            else:
                tokens = request.num_kv_tokens + self.batch.num_ahead_tokens
                reason = f"{tokens} tokens do not fit the {self.cache.capacity_tokens} tokens of {self.instance_id}"
                commands.append(m.Failed(request.request_id, reason))
        if lacked:
            self._ratio.on_retraction(self._num_steps, self.batch.requests())

    # Giving up.

    def _give_up(self, request_id: int) -> None:
        """Drops a request that waits or whose prompt is partly computed. A running request ends with its next token; so
        does a begun one if EngineRules.computes_aborted_prompts is True. Ignores an unknown id: the instance may have
        restarted since the request came.
        """
        self.cache.stop_prefetch(request_id)
        if request := self._builder.begun.get(request_id):
            request.is_aborted = True
            if not self.limits.rules.computes_aborted_prompts:
                self._stop(request)
        elif self.batch.has(request_id):
            self.batch.abort(request_id)
        elif not self._builder.withdraw(request_id):
            self._arrived = [request for request in self._arrived if request.request_id != request_id]
        self._retracted.pop(request_id, None)

    def _stop(self, request: AggregatedRequest) -> None:
        """Ends a request whose prompt is partly computed. Pages that the prefix cache has stay; others become free."""
        del self._builder.begun[request.request_id]
        self._builder.stop(request)
        self.cache.drop(request.lease)
        self._blocked_by = ""

    def _expire(self, commands: list[m.Command]) -> None:
        for request_id in self._unbegun.expired(self.now_ns, commands, self._is_unbegun):
            reason = (
                f"{self.instance_id} did not begin the request within {self._unbegun.limit}{LACKS[self._blocked_by]}"
            )
            self._give_up(request_id)
            commands.append(m.Failed(request_id, reason, retryable=True))

    def _is_unbegun(self, request_id: int) -> bool:
        """True if no forward began the request. A retracted request counts as begun, because its client has tokens."""
        waits = self._builder.waits(request_id) and request_id not in self._retracted
        return waits or any(request.request_id == request_id for request in self._arrived)

    # What becomes of a prompt.

    def _on_prefill_done(self, step: m.PrefillStep, outputs: Mapping[int, TokenSequence]) -> list[m.Command]:
        commands: list[m.Command] = []
        for chunk in step.chunks:
            request = self._builder.complete(chunk)
            if chunk.is_last:
                commands += self._on_token(request, outputs.get(chunk.request_id))
            else:
                self._blocked_by = ""  # SGLang forgets it when a partial prompt leaves its forward
        return commands

    def _on_token(self, request: AggregatedRequest, output: TokenSequence | None) -> list[m.Command]:
        """Handles the token that a request gets when its prompt is complete: the first token, or the next token after a
        retraction. output: all output tokens if this token is the request's last; None: the request goes on.
        """
        is_first = not request.num_output_tokens
        request.num_output_tokens += 1
        if request.is_aborted:
            self._blocked_by = ""
            return self._asked.close(request)
        commands: list[m.Command] = [m.FirstToken(request.request_id)] if is_first else []
        self._retracted.pop(request.request_id, None)
        if output is not None:
            self.batch.close(request, output)
            self._blocked_by = ""
            return [*commands, m.Finished(request.request_id)]
        if not self.batch.num_requests:
            self._blocked_by = ""  # it was of the batch before
        self.batch.join(request)
        return commands
