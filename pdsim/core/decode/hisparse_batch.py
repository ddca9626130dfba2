"""The running requests of a decode instance with HiSparse, and the KV that its steps copy between host memory and GPU.

Each request has a buffer of GPU pages. If all KV of a request fits into the buffer, all of it is on the GPU. For a
longer request, sparse attention chooses some tokens in each step, and the step copies to the buffer those of them that
the buffer lacks. A request's first step fills the buffer: with all KV if it fits, otherwise with the chosen tokens.
Every later step saves the KV of the step before to host memory.

Source: SGLang 0.5.23, managers/hisparse_coordinator.py:895, 1168, 1193, and the kernel's fast path
(kernels/jit/csrc/kvcacheio/hisparse.cuh:419). Properties are tested in tests/laws/test_hisparse.py.
"""

from collections.abc import Iterator

from pdsim.core.decode.running_batch import RequestT, RunningBatch
from pdsim.core.memory.hisparse_cache import HiSparseCache
from pdsim.core.memory.kv_cache import Lease
from pdsim.core.messages import HiSparseStep
from pdsim.policy.protocols import PreemptionPolicy
from pdsim.policy.views import DecodeView


class HiSparseBatch(RunningBatch[RequestT]):
    def __init__(self, cache: HiSparseCache, wave_requests: float | None = None) -> None:
        super().__init__(cache, wave_requests)
        self._hisparse = cache

    def step(self, ask_again_steps: int) -> HiSparseStep:
        buffers, first = self._hisparse.buffers, frozenset(self._joined)
        num_filled = num_first = num_long = 0
        num_steps = 1 if first else ask_again_steps
        for request in self.requests():
            num_tokens = request.num_kv_tokens
            if request.request_id in first:
                fits = num_tokens <= buffers.buffer_tokens
                num_filled, num_first = num_filled + fits * num_tokens, num_first + (not fits)
            elif num_tokens < buffers.buffer_tokens:
                num_steps = min(num_steps, buffers.buffer_tokens - num_tokens)
            else:
                num_long += 1
        step = super().step(num_steps)
        return HiSparseStep(
            step.step_id,
            step.joined,
            step.left,
            step.num_requests,
            step.num_context_tokens,
            step.num_distinct_tokens,
            step.max_steps,
            num_filled_tokens=num_filled,
            num_first_requests=num_first,
            num_long_requests=num_long,
            num_saved_tokens=step.num_requests - len(first),
        )

    def fits_a_step(self) -> bool:
        return self._lacks(self._due(0, 1)) == 0

    def make_room(self, policy: PreemptionPolicy, view: DecodeView, *, keeps_last: bool = False) -> Iterator[RequestT]:
        """Allocates the pages of the next step. While there are too few, retracts a request that `policy` chooses, and
        yields the request before its pages are freed. If requests need n new pages of host memory in the step, at least
        n GPU pages must be free as well, even if the requests' GPU buffers do not grow
        (mem_cache/allocator/hisparse.py:113, allocator/base.py:171). keeps_last has no effect.
        """
        while self._lacks(leases := self._due(0, 1)):
            yield from self._give_way(policy, view)
        if leases:
            self._hisparse.grow_all(leases, len(leases))

    def _lacks(self, leases: list[Lease]) -> int:
        """Number of further pages that must become free before each of these leases can get one page. The number is
        taken for host memory and for the GPU, and the larger one is returned. 0: there are enough free pages.
        """
        cache, num_opened = self._hisparse, len(leases)
        num_grown = sum([cache.num_lacking(lease, 1) for lease in leases])
        on_gpu = max(num_opened, num_grown) - cache.buffers.num_free
        return max(0, num_opened - cache.num_available_pages, on_gpu)

    def _max_steps(self) -> int:
        num_left = min(self._hisparse.num_available_pages, self._hisparse.buffers.num_free - self.num_requests)
        return 1 + self._page_size * (max(0, num_left) // self.num_requests)
