"""A decode instance with HiSparse: prefill sends KV to host memory, and the GPU has a buffer for each running request.

A request is admitted if its KV fits the host memory, and if a whole buffer is free for it and for each request in
transfer. The request gets its buffer when its KV has arrived. A retracted request fails, because its KV is kept nowhere
else (--disaggregation-decode-retraction-backup none).

Source: SGLang 0.5.23, disaggregation/decode.py:1414, 2097, 3489, managers/hisparse_coordinator.py:878,
managers/schedule_batch.py:3488. Law: tests/laws/test_hisparse.py.
"""

from pdsim.core import messages as m
from pdsim.core.decode.admission_queue import DecodeRequest
from pdsim.core.decode.decode_instance import DecodeInstance
from pdsim.core.decode.decode_limits import DecodeLimits
from pdsim.core.decode.hisparse_batch import HiSparseBatch
from pdsim.core.memory.hisparse_cache import HiSparseCache
from pdsim.policy.protocols import AdmissionPolicy, PreemptionPolicy


class HiSparseDecodeInstance(DecodeInstance):
    def __init__(
        self,
        instance_id: str,
        *,
        cache: HiSparseCache,
        limits: DecodeLimits,
        admission_policy: AdmissionPolicy,
        preemption_policy: PreemptionPolicy,
    ) -> None:
        super().__init__(
            instance_id,
            cache=cache,
            limits=limits,
            admission_policy=admission_policy,
            preemption_policy=preemption_policy,
        )
        self.batch = HiSparseBatch(cache, limits.wave_requests)
        self.batch.sorts_at_retraction = limits.rules.sorts_at_retraction
        self._buffers = cache.buffers
        self._hisparse = cache

    @property
    def _num_slots(self) -> int:
        num_buffers = self._buffers.num_free // self._buffers.pages_per_buffer - len(self.transferring)
        return min(super()._num_slots, self.num_active + max(0, num_buffers))

    def _collect_arrived(self, commands: list[m.Command]) -> None:
        num_ready = len(self.ready.requests)
        super()._collect_arrived(commands)
        self.queue.ask_again_steps = 1  # what has left the transfers keeps no whole buffer free any more
        for request in self.ready.requests[num_ready:]:
            if not self._hisparse.open_buffer(request.lease):
                self.ready.withdraw(request.request_id)
                self.cache.drop(request.lease)
                commands.append(m.Failed(request.request_id, f"no buffer: {self._found}"))

    def _retract(self, request: DecodeRequest) -> list[m.Command]:
        if request.is_aborted:
            return []
        return [m.Failed(request.request_id, f"retracted without a copy of its KV: {self._found}", retryable=True)]

    def _outgrown(self, request: DecodeRequest) -> str:
        if self.cache.num_available_pages:
            return f"no page for its next token: {self._found}"
        return super()._outgrown(request)

    @property
    def _found(self) -> str:
        free, buffers = self.cache.num_available_pages, self._buffers
        on_gpu = f"{buffers.num_free} of {buffers.num_pages} pages are free on the GPU"
        return f"{on_gpu}, and {free} of {self.cache.pool.num_pages} in host memory of {self.instance_id}"
