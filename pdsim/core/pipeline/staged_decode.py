"""SGLang's decode instance with pipeline stages, which has one micro-batch per stage."""

from pdsim.core import messages as m
from pdsim.core.decode.admission_queue import DecodeRequest
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.instance import Levels
from pdsim.core.memory.kv_cache import KvCache
from pdsim.core.pipeline.micro_batches import MicroBatches
from pdsim.core.transfer.kv_returns import Returning
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy


class StagedDecodeInstance(DecodeInstance):
    """SGLang's decode instance with one micro-batch per pipeline stage. The micro-batch whose turn it is resumes and
    admits requests, and takes all requests whose KV has arrived (0.5.23, managers/scheduler_pp_mixin.py:363;
    disaggregation/decode.py:3392). Admission reserves output tokens for this micro-batch's requests only
    (disaggregation/decode.py:2047). A micro-batch that lacks pages retracts its own requests only.
    """

    def __init__(
        self,
        instance_id: str,
        *,
        cache: KvCache,
        limits: DecodeLimits,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
        num_stages: int,
        shares_turns: bool = False,
    ) -> None:
        """shares_turns: True: all data-parallel ranks of the server choose steps of the same micro-batch together, so a
        call of next_step tries only the micro-batch whose turn it is. False: if this micro-batch has no step, the call
        tries the next micro-batch.
        """
        super().__init__(
            instance_id,
            cache=cache,
            limits=limits,
            admission_policy=admission_policy,
            preemption_policy=preemption_policy,
        )
        self.max_steps_in_flight = num_stages
        self.batch.counts_ended = False  # without overlap
        self.micro = MicroBatches(self.batch, cache, limits.wave_requests, num_stages)
        self._num_tried = 1 if shares_turns else num_stages

    def next_step(self, now_ns: int) -> tuple[m.Step | m.Wait, list[m.Command]]:
        commands: list[m.Command] = []
        for _ in range(self._num_tried):
            if self.micro.must_wait:
                break
            self.batch = self.micro.batches[self.micro.turn]
            step, more = super().next_step(now_ns)
            commands += more
            if not isinstance(step, m.Wait):
                return self.micro.begin(step), commands
            self.micro.skip()
        return m.Wait(), commands

    def on_step_done(self, step: m.Step, result: m.Result, now_ns: int) -> list[m.Command]:
        self.batch = self.micro.batches[self.micro.end()]
        return super().on_step_done(step, result, now_ns)

    def holding(self) -> list[DecodeRequest | Returning]:
        return [*super().holding(), *self.micro.requests_beside(self.batch)]

    def levels(self) -> Levels:
        return super().levels()._replace(num_running=self.micro.num_requests)

    @property
    def _num_slots(self) -> int:
        return super()._num_slots - (self.micro.num_requests - self.batch.num_requests)

    def _cancel(self, cancel: m.Cancel, now_ns: int) -> list[m.Command]:
        if (batch := self.micro.of(cancel.request_id)) is not None:
            batch.abort(cancel.request_id)
            return []
        return super()._cancel(cancel, now_ns)
