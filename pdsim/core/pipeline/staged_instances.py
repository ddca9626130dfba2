"""Aggregated instances with pipeline stages, of SGLang and of vLLM.

Both kinds keep as many steps under way as there are stages, one for each micro-batch. Micro-batches share the queue and
the KV pool.

SGLang chooses a micro-batch's next step when it has handled the result of the micro-batch's last step. Requests that
arrived meanwhile wait for that turn (0.5.23, managers/scheduler_pp_mixin.py:121). vLLM chooses a micro-batch's next
step while the micro-batch's last step is under way. Requests that arrive after this choice wait for the turn of the
next micro-batch (0.33.0, v1/engine/core.py:763; config/vllm.py:594). pdsim chooses when the last step ends, and handles
arrivals and frees pages of ended requests after the choice.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from pdsim.core import messages as m
from pdsim.core.aggregated_instance import AggregatedInstance
from pdsim.core.aggregated_limits import AggregatedLimits, AggregatedRequest
from pdsim.core.decode.admission_queue import DecodeRequest
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.instance import Levels, Request
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.pipeline.micro_batches import LateBatch, MicroBatches
from pdsim.core.transfer.kv_returns import Returning
from pdsim.core.vllm.vllm_decode_instance import VllmDecodeInstance
from pdsim.core.vllm.vllm_forward_builder import TokenBudget
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy, PrefillPolicy
from pdsim.policy.views import TokenSequence


def _is_in_forward(request: Request) -> bool:
    return request.num_computed_tokens < request.num_scheduled_tokens


def _computed(step: m.Step) -> Iterator[tuple[int, bool]]:
    """Yields a pair for each request that a step of a micro-batch computes: the request's id, and True if the step
    gives the request a token.
    """
    prefill = step.prefill if isinstance(step, m.MixedStep) else step
    decode = step.decode if isinstance(step, m.MixedStep) else step
    if isinstance(prefill, m.PrefillStep):
        yield from [(chunk.request_id, chunk.is_last) for chunk in prefill.chunks]
    if isinstance(decode, m.DecodeStep):
        yield from [(request_id, True) for request_id in decode.joined]


class StagedAggregatedInstance(AggregatedInstance):
    """SGLang's aggregated instance with pipeline stages. Each micro-batch has at most its share of the running requests
    (0.5.23, managers/scheduler.py:1237, 4034), and retracts its own requests only.
    """

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: AggregatedLimits,
        policy: PrefillPolicy,
        preemption_policy: PreemptionPolicy,
        num_stages: int,
        shares_turns: bool = False,
    ) -> None:
        """shares_turns: True: all data-parallel ranks of the server choose steps of the same micro-batch together, so a
        call of next_step tries only the micro-batch whose turn it is. False: if this micro-batch has no step, the call
        tries the next micro-batch.
        """
        limits = replace(limits, overlap=False)  # arg_groups/overrides.py, 0.5.23, :1625
        super().__init__(instance_id, cache=cache, limits=limits, policy=policy, preemption_policy=preemption_policy)
        self.max_steps_in_flight = num_stages
        self.micro = MicroBatches(self.batch, cache, limits.wave_requests, num_stages)
        self._num_tried = 1 if shares_turns else num_stages
        self._most_requests = max(limits.max_running_requests // num_stages, 1)
        self._lacks = [""] * num_stages
        """For each micro-batch: what a prompt lacked when the micro-batch was last in self.batch: "slots", "pages" or,
        if no prompt was blocked, "" (`_blocked_by`)."""
        self._present = 0
        """Index of the micro-batch that is in self.batch."""
        self._num_decoded = 0

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        commands: list[m.Command] = []
        step: m.Step | m.Wait = m.Wait()
        for _ in range(self._num_tried):
            if self.micro.must_wait:
                return m.Wait(), commands
            self._take(self.micro.turn)
            step, more = super().next_step(now_ns)
            commands += more
            if not isinstance(step, m.Wait):
                self._num_decoded += not isinstance(step, m.PrefillStep)
                return self.micro.begin(step), commands
            self.micro.skip()
        return step, commands

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        self._take(self.micro.end())
        commands = super().on_step_done(step, result, now_ns)
        prefill = step.prefill if isinstance(step, m.MixedStep) else step
        for chunk in prefill.chunks if isinstance(prefill, m.PrefillStep) else ():
            request = self._builder.begun.get(chunk.request_id)
            if request is not None and request.is_aborted and not _is_in_forward(request):
                self._stop(request)
        return commands

    def _take(self, index: int) -> None:
        """Makes the micro-batch with this index the present one. If it has no requests, the instance no longer
        remembers that pages or slots were lacking for it, and tries prompts again (0.5.23, managers/scheduler.py:4093).
        """
        self._lacks[self._present] = self._blocked_by
        self._present, self.batch = index, self.micro.batches[index]
        self._blocked_by = self._lacks[index] if self.batch.num_requests else ""

    def holding(self) -> list[AggregatedRequest]:
        return [*self._builder.begun.values(), *self.micro.requests(), *self._asked.closing.values()]

    def levels(self) -> Levels:
        return super().levels()._replace(num_running=len(self._builder.begun) + self.micro.num_requests)

    @property
    def _num_steps(self) -> int:
        return self._num_decoded

    @property
    def _num_slots(self) -> int:
        own = self._most_requests - self.batch.num_requests - len(self.batch.ended) - self._builder.is_midway
        return min(own, self.limits.max_running_requests - self.micro.num_requests - len(self._builder.begun))

    def _be_idle(self) -> None:
        if self.micro.is_idle and not self.micro.num_requests:
            super()._be_idle()

    def _give_up(self, request_id: int) -> None:
        begun, batch = self._builder.begun.get(request_id), self.micro.of(request_id)
        if batch is not None:
            batch.abort(request_id)
        elif begun is not None and _is_in_forward(begun) and not self.limits.rules.computes_aborted_prompts:
            begun.is_aborted = True
            self._builder.stop(begun)
        else:
            super()._give_up(request_id)


class StagedVllmInstance(VllmDecodeInstance):
    """vLLM's aggregated instance with pipeline stages. If all micro-batches have requests, each request is decoded in
    every num_stages-th step (0.33.0, v1/core/sched/async_scheduler.py:20).
    """

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: DecodeLimits,
        budget: TokenBudget,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
        policy: PrefillPolicy,
        num_stages: int,
    ) -> None:
        super().__init__(
            instance_id,
            cache=cache,
            limits=limits,
            budget=budget,
            admission_policy=admission_policy,
            preemption_policy=preemption_policy,
            policy=policy,
        )
        self.max_steps_in_flight = num_stages
        self.micro = MicroBatches(self.batch, cache, limits.wave_requests, num_stages, LateBatch)
        self.batch = self.micro.batches[0]
        self._late: list[m.Message] = []
        """Messages that came while the oldest step was under way. The instance handles them after its next choice of a
        step."""
        self._has_ended = False
        """True: a step has ended since the instance last began to choose a step."""
        self._steps: deque[m.Step] = deque()
        """Steps under way, the oldest first."""
        self._stale: dict[int, DecodeRequest] = {}
        """Requests that were preempted while steps computed them. They wait for the tokens of these steps (0.33.0,
        v1/core/sched/scheduler.py:1084)."""

    def on_message(self, message: m.Message, now_ns: int) -> list[m.Command]:
        if self._has_ended:
            self._late.append(message)
            return []
        return super().on_message(message, now_ns)

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        commands: list[m.Command] = []
        step: m.Step | m.Wait = m.Wait()
        self._has_ended = False
        for _ in self.micro.batches:
            if self.micro.must_wait:
                return m.Wait(), commands
            self.batch = self.micro.batches[self.micro.turn]
            self._builder.num_beside = self._num_beside + len(self._stale)
            step, more = super().next_step(now_ns)
            if isinstance(step, m.Wait):
                self.micro.skip()
            else:
                step = self.micro.begin(step)
                self._steps.append(step)
            commands += [*more, *self._catch_up(now_ns)]
            if not isinstance(step, m.Wait):
                break
        return step, commands

    def _catch_up(self, now_ns: int) -> list[m.Command]:
        """Does the work that vLLM postpones until it has chosen a step: frees the pages of ended requests, queues
        preempted requests that no step computes any more, and handles messages that came too late for this choice.
        Returns the commands that follow from the messages.
        """
        for batch in self._late_batches:
            batch.is_behind = False
            batch.close_ended()
        for request_id in [i for i in self._stale if not self._is_computed(i)]:
            self._builder.enqueue(self._stale.pop(request_id), first=True)
        late, self._late = self._late, []
        return [command for message in late for command in super(StagedVllmInstance, self).on_message(message, now_ns)]

    @property
    def _late_batches(self) -> list[LateBatch[DecodeRequest]]:
        return [batch for batch in self.micro.batches if isinstance(batch, LateBatch)]

    @property
    def _closing(self) -> list[DecodeRequest]:
        """Requests that have ended, but hold their pages until the instance has chosen its next step."""
        return [request for batch in self._late_batches for request, _ in batch.closing]

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        """Handles the result of the oldest step under way, and returns commands. Requests that were cancelled during
        the step get no token.
        """
        self.batch, self._has_ended = self.micro.batches[self.micro.end()], True
        if isinstance(self.batch, LateBatch):
            self.batch.is_behind = True
        self._steps.popleft()
        begun = self._builder.begun
        assert isinstance(result, m.StepResult)
        stale = self._give_stale_tokens(step, dict(result.ended))
        ended = tuple([end for end in result.ended if self.batch.has(end[0]) or end[0] in begun])
        if isinstance(step, m.MixedStep):
            step = replace(step, prefill=self._living(step.prefill))
        elif isinstance(step, m.PrefillStep):
            step = self._living(step)
        return [*stale, *super().on_step_done(step, replace(result, ended=ended), now_ns)]

    def _give_stale_tokens(self, step: m.Step, outputs: dict[int, TokenSequence]) -> list[m.Command]:
        """Handles the result of a step for requests that were preempted while the step was under way: each gets the
        token that the step computed, if any, and those in `outputs` end (0.33.0, v1/core/sched/scheduler.py:2338).
        Returns FirstToken and Finished for these requests.
        outputs: all output tokens of each request that ended in the step, by request id.
        """
        commands: list[m.Command] = []
        for request_id, has_token in _computed(step):
            if (request := self._stale.get(request_id)) is None:
                continue
            if has_token:
                commands += [] if request.num_output_tokens else [m.FirstToken(request_id)]
                request.num_output_tokens += 1
            if request_id in outputs:
                del self._stale[request_id]
                commands.append(m.Finished(request_id))
        return commands

    def _is_computed(self, request_id: int) -> bool:
        """True if a step under way computes the request."""
        return any(request_id == computed for step in self._steps for computed, _ in _computed(step))

    def _living(self, step: m.PrefillStep) -> m.PrefillStep:
        return replace(step, chunks=tuple([chunk for chunk in step.chunks if chunk.request_id in self._builder.begun]))

    def holding(self) -> list[DecodeRequest | Returning]:
        return [*super().holding(), *self.micro.requests_beside(self.batch), *self._closing]

    def requests(self) -> list[int]:
        late = [message.request_id for message in self._late if isinstance(message, m.NewRequest)]
        ended = {request.request_id for request in self._closing}
        return [*(i for i in super().requests() if i not in ended), *late, *self._stale]

    def levels(self) -> Levels:
        levels = super().levels()
        num_late = sum([isinstance(message, m.NewRequest) for message in self._late])
        return levels._replace(
            num_queued=levels.num_queued + num_late,
            num_running=len(self._builder.begun) + self.micro.num_requests,
        )

    @property
    def retracted(self) -> list[DecodeRequest]:
        return [*super().retracted, *self._stale.values()]

    @property
    def running(self) -> list[DecodeRequest]:
        """Requests that may be preempted, in the order in which they began to run: running requests of all
        micro-batches, begun prompts, and ended requests that vLLM still counts as running when it chooses a step.
        """
        found = [*self.micro.requests(), *self._builder.begun.values(), *self._closing]
        return sorted(found, key=lambda request: request.entry)

    def _preempt(self, request_id: int, commands: list[m.Command]) -> None:
        if any(request.request_id == request_id for request in self._closing):
            for late in self._late_batches:
                late.close_ended(request_id)
        elif not self._is_computed(request_id):
            batch, self.batch = self.batch, self.micro.of(request_id) or self.batch
            super()._preempt(request_id, commands)
            self.batch = batch
        elif begun := self._builder.begun.get(request_id):
            self._builder.preempt(begun)
            self._builder.withdraw(request_id)
            self._stale[request_id] = begun
        elif (of := self.micro.of(request_id)) is not None:
            self._stale[request_id] = of.retract(request_id)
            commands.append(m.Retracted(request_id))

    @property
    def _num_places(self) -> int:
        return super()._num_places - self._num_beside

    @property
    def _num_beside(self) -> int:
        """Number of requests outside the present micro-batch that count against max_running_requests: requests of other
        micro-batches, and ended requests that still hold pages.
        """
        return self.micro.num_requests - self.batch.num_requests + len(self._closing)

    def _cancel(self, cancel: m.Cancel, now_ns: int) -> list[m.Command]:
        request_id = cancel.request_id
        if (batch := self.micro.of(request_id)) is not None:
            batch.remove(request_id)
            return []
        return [] if self._stale.pop(request_id, None) else super()._cancel(cancel, now_ns)
