"""Life of a request in an aggregated instance, which computes prompts and decodes on one GPU group, one step at a time.

waiting   NewRequest came, or it was retracted                  next_step: the policy picks it
begun     one or more chunks; at most one prompt lacks some     next_step -> PrefillStep, on_step_done -> FirstToken
running   one token per step                                    next_step -> DecodeStep, on_step_done
gone      prompt and output are cached                          -> Finished

A request that is given up (Cancel, or none of it begun in time) goes at once: no step is under way between two calls.
Prompts come first: only when none can be begun or gone on with does the batch decode. A retracted request goes to the
end of the queue, and its prompt with the outputs it had is computed again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pdsim.core import messages as m
from pdsim.core.deadlines import Deadlines
from pdsim.core.forward_builder import Forward, ForwardBuilder
from pdsim.core.instance import LACKS, Levels
from pdsim.core.kv_cache import KvCache
from pdsim.core.running_batch import (
    FOREVER,
    RETRACT_STEPS,
    DecodingInstance,
    RunningBatch,
    RunningRequest,
    running_batch,
)
from pdsim.policy.protocols import PreemptionPolicy, PrefillPolicy
from pdsim.policy.views import TokenSequence

MAX_ESTIMATED_TOKENS = 4096
"""Limit of the output that a request is expected to still produce (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""

INITIAL = 0.7
"""SGLANG_INIT_NEW_TOKEN_RATIO"""
LEAST_FACTOR = 0.14
"""SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR: of the initial one."""
DECAY_STEPS = 600
"""SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS: from the initial one to the least."""


@dataclass(frozen=True, kw_only=True)
class AggregatedLimits:
    """Limits of one forward and of the instance as a whole, by SGLang's names."""

    max_running_requests: int
    chunked_prefill_tokens: int | None
    """Tokens of one forward; None computes every prompt in one piece."""
    max_prefill_tokens: int
    """New tokens of one forward; the first prompt of a batch may exceed it."""
    schedule_conservativeness: float = 1.0
    """Above 1, running requests are expected to grow more, and fewer are begun beside them."""
    overlap: bool = True
    """SGLang's overlap schedule chooses a step when the one before it begins. What came since is looked at only after
    the choice: it waits for one step more. A driver that does choose so early must switch this off."""
    draft_tokens: int | None = None
    """Tokens that a step verifies of each request, its last token among them (--speculative-num-draft-tokens). None:
    each step gives each request one token."""
    wave_requests: float | None = None
    """Requests whose attention runs at a time, and reads what they share once; None: all."""
    waiting_timeout_ns: int | None = None
    """Time from a request's arrival here until it must be begun (SGLANG_REQ_WAITING_TIMEOUT)."""
    preemption_threshold: int | None = None
    """A running request gives way to one that waits for a slot, if its priority is lower by more than this
    (--priority-scheduling-preemption-threshold). None: nobody does."""


@dataclass(slots=True, kw_only=True)
class AggregatedRequest(RunningRequest):
    @property
    def num_growth_tokens(self) -> int:
        return min(max(self.max_output_tokens - self.num_output_tokens, 0), MAX_ESTIMATED_TOKENS)


class NewTokenRatio:
    """Part of its longest output that a running request is expected to still produce (SGLang's new_token_ratio).

    It falls by an equal amount with every decode step, in closed form: many steps at once are as many single ones.
    """

    def __init__(self, conservativeness: float) -> None:
        """conservativeness: --schedule-conservativeness, a factor of the initial ratio."""
        self._initial = min(INITIAL * conservativeness, 1.0)
        self._least = min(self._initial * LEAST_FACTOR, 1.0)
        self._decay = (self._initial - self._least) / DECAY_STEPS
        self._start = self._initial
        self._start_step = 0

    def at(self, num_steps: int) -> float:
        """After so many decode steps of the instance."""
        elapsed = num_steps - self._start_step
        return self._start if elapsed <= 0 else max(self._start - elapsed * self._decay, self._least)

    def on_idle(self, num_steps: int) -> None:
        self._start, self._start_step = self._initial, num_steps

    def on_retraction(self, num_steps: int, running: Collection[RunningRequest]) -> None:
        """Set it to the produced part of longest outputs of those that still run; the next step does not lower it."""
        outputs = sum(request.num_output_tokens for request in running) + RETRACT_STEPS * len(running)
        self._start = min(1.0, outputs / (sum(request.max_output_tokens for request in running) + 1))
        self._start_step = num_steps + 1


class AggregatedInstance(DecodingInstance[AggregatedRequest]):
    max_steps_in_flight = 1

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
        self.cache = cache
        self.limits = limits
        self.page_size = cache.page_size
        self.now_ns = 0
        self.batch: RunningBatch[AggregatedRequest] = running_batch(cache, limits.draft_tokens, limits.wave_requests)
        self._arrived: list[AggregatedRequest] = []
        """Not looked at yet."""
        self._builder: ForwardBuilder[AggregatedRequest] = ForwardBuilder(
            cache=cache,
            policy=policy,
            chunk_tokens=limits.chunked_prefill_tokens,
            max_prefill_tokens=limits.max_prefill_tokens,
        )
        self._retracted: dict[int, AggregatedRequest] = {}
        """Requests whose KV is not there again yet."""
        self._preemption_policy = preemption_policy
        self._ratio = NewTokenRatio(limits.schedule_conservativeness)
        self._unbegun = Deadlines(instance_id, limits.waiting_timeout_ns, "waiting_timeout")
        self._num_prefill_steps = 0
        self._may_give_way = False
        """Requests of lower priorities run, and do not leave enough room for the one that waits."""
        self._blocked_by = ""
        """Lacking to the first prompt that could not be begun: none is tried again before a request leaves the batch
        (SGLang's batch_is_full)."""

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
            new.request_id, new.arrival_ns, new.prompt, num_tokens, new.priority, max_output_tokens=max_output_tokens
        )
        self._arrived.append(request)
        self.cache.prefetch(request.request_id, request.prompt, now_ns)
        return self._unbegun.add(request.request_id, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        self.now_ns = now_ns
        commands: list[m.Command] = []
        if self.limits.waiting_timeout_ns is not None:
            self._expire(commands)
        if not self.limits.overlap:
            self._look_at_arrived()
        step = self._choose(commands)
        if self._arrived:
            self._look_at_arrived()
            if isinstance(step, m.Wait):
                step = self._choose(commands)
        if self.cache.host is not None:
            commands += self.cache.host.take_copies()
        may_begin = bool(self._builder.waiting) and not self._blocked_by
        if isinstance(step, m.DecodeStep) and (may_begin or self._may_give_way):
            step = replace(step, max_steps=1)
        return step, commands

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        if isinstance(step, m.PrefillStep):
            return self._on_prefill_done(step, dict(result.ended))
        self.batch.advance(result)
        for request_id, output in result.ended:
            self.batch.end(request_id, output)
        return [m.Finished(request_id) for request_id, _ in result.ended]

    def page_table(self, request_id: int) -> Sequence[int]:
        """Pages of a request that is begun or runs, in order. KeyError if it has none."""
        begun = self._builder.begun.get(request_id)
        return self.batch.page_table(request_id) if begun is None else begun.lease.table

    def holding(self) -> list[AggregatedRequest]:
        """Requests that hold pages."""
        return [*self._builder.begun.values(), *self.batch.requests()]

    def requests(self) -> list[int]:
        """All that are here, in whatever state."""
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
        if self.limits.preemption_threshold is not None:
            self._give_way(self.limits.preemption_threshold, commands)
        while True:
            forward = self._fill_forward()
            if forward.chunks:
                self._num_prefill_steps += 1
                return m.PrefillStep(self._num_prefill_steps, tuple(forward.chunks))
            if self.batch.ended:
                self.batch.ended, self._blocked_by = [], ""
                if not self.batch.num_requests:
                    self._ratio.on_idle(self.batch.num_steps)
                    continue
            if not self.batch.num_requests:
                self._ratio.on_idle(self.batch.num_steps)
                return m.Wait(forward.hold_until_ns)
            self._make_room(commands)
            if self.batch.num_requests:
                return self.batch.step(FOREVER)

    def _give_way(self, threshold: int, commands: list[m.Command]) -> None:
        """Gives slots of running requests of lower priorities to the first that waits, if there is none."""
        self._may_give_way = False
        if not self._builder.waiting or self._builder.is_midway or self._num_slots > 0:
            return
        waiting = max(self._builder.waiting, key=lambda request: request.priority)
        running = self.batch.requests()
        ratio = self._ratio.at(self.batch.num_steps)
        growth = sum(request.num_growth_tokens for request in running) * ratio
        lacking = waiting.num_tokens - self.cache.num_cached_tokens(waiting.prompt) + waiting.num_growth_tokens + growth
        lacking -= self.num_available_pages * self.page_size
        victims: list[AggregatedRequest] = []
        for request in sorted(running, key=lambda r: (r.priority, -r.arrival_ns, -r.request_id)):
            if waiting.priority - request.priority <= threshold or (victims and lacking <= 0):
                break
            victims.append(request)
            lacking -= request.num_growth_tokens * ratio
        self._may_give_way = bool(victims) and lacking > 0
        if lacking > 0:
            return
        for request in victims:
            self.batch.remove(request.request_id)
            self._retracted[request.request_id] = request
            self._builder.enqueue(request)
            commands.append(m.Retracted(request.request_id))
        if victims:
            self._blocked_by = ""

    def _fill_forward(self) -> Forward:
        """Nothing is begun behind a prompt that was blocked, nor without a slot."""
        num_slots, reserved_tokens = None, 0
        if self._builder.waiting and not self._blocked_by:
            if self._num_slots > 0:
                growth = sum(request.num_growth_tokens for request in self.running)
                num_slots, reserved_tokens = self._num_slots, int(growth * self._ratio.at(self.batch.num_steps))
            else:
                self._blocked_by = "slots"
        forward = self._builder.fill(self.now_ns, num_slots, reserved_tokens=reserved_tokens)
        self._blocked_by = forward.blocked_by or self._blocked_by
        return forward

    @property
    def _num_slots(self) -> int:
        return self.limits.max_running_requests - self.num_active - len(self.batch.ended) - len(self._builder.begun)

    def _make_room(self, commands: list[m.Command]) -> None:
        """Open the pages of the next step; take them from others if there are too few."""
        lacked = False
        for request in self.batch.make_room(self._preemption_policy, self):
            lacked = True
            self._blocked_by = ""
            if self.batch.num_requests:
                self._retracted[request.request_id] = request
                self._builder.enqueue(request)
                commands.append(m.Retracted(request.request_id))
            else:
                tokens = request.num_kv_tokens + self.batch.num_ahead_tokens
                reason = f"{tokens} tokens do not fit the {self.cache.capacity_tokens} tokens of {self.instance_id}"
                commands.append(m.Failed(request.request_id, reason))
        if lacked:
            self._ratio.on_retraction(self.batch.num_steps, self.batch.requests())

    # Giving up.

    def _give_up(self, request_id: int) -> None:
        """Drop a request; its computed pages stay cached. It is unknown if it was lost with an earlier life."""
        self.cache.stop_prefetch(request_id)
        if request := self._builder.begun.pop(request_id, None):
            self._builder.stop(request)
            self.cache.drop(request.lease)
            self._blocked_by = ""
        elif self.batch.has(request_id):
            self.batch.remove(request_id)
            self._blocked_by = ""
        elif not self._builder.withdraw(request_id):
            self._arrived = [request for request in self._arrived if request.request_id != request_id]
        self._retracted.pop(request_id, None)

    def _expire(self, commands: list[m.Command]) -> None:
        for request_id in self._unbegun.expired(self.now_ns, commands, self._is_unbegun):
            reason = f"{self.instance_id} did not begin it within {self._unbegun.limit}{LACKS[self._blocked_by]}"
            self._give_up(request_id)
            commands.append(m.Failed(request_id, reason, retryable=True))

    def _is_unbegun(self, request_id: int) -> bool:
        """A retracted request was begun before: its client has tokens of it."""
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
        """The forward that completes a prompt also makes a token: the first, or the next after a retraction."""
        commands: list[m.Command] = [] if request.num_output_tokens else [m.FirstToken(request.request_id)]
        request.num_output_tokens += 1
        self._retracted.pop(request.request_id, None)
        if output is not None:
            self.batch.close(request, output)
            self._blocked_by = ""
            return [*commands, m.Finished(request.request_id)]
        if not self.batch.num_requests:
            self._blocked_by = ""  # it was of the batch before
        self.batch.join(request)
        return commands
