"""Times of the copies between host memory and GPU that decode steps with HiSparse wait for.

In each layer, a kernel finds the chosen tokens that a request's buffer lacks, and copies them from host memory. Each
request has one block of threads, which copies its tokens in turn. Blocks share the host link. The times of the kernel
are those of SGLang 0.5.23's on an H200 (experiments/hisparse); those of other GPUs are assumed to be equal.
"""

from pdsim.core.messages import HiSparseStep
from pdsim.dataclass import dataclass

FIND_NS, SHORT_NS = 11_200, 5_000
"""Time in ns of the kernel without copies: if the KV of a request does not fit its buffer, and if all KV fits."""
TOKEN_NS = 118.5
"""Time in ns in which a block copies one token of one layer, if the host link is not the bottleneck."""


@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Copies of one rank's KV, without indexer keys, over its host link. All ranks of an instance copy at once.

    A layer's attention begins when its tokens are on the GPU, and a step when the tokens of the step before are saved
    (SGLang 0.5.23, managers/hisparse_coordinator.py:1587, 1265).
    """

    num_layers: int
    token_bytes: int
    """KV bytes of one token on one rank, over all layers."""
    buffer_tokens: int
    """Number of tokens of each request's buffer."""
    chosen_tokens: int
    """Number of tokens that attention chooses for a request."""
    miss_rate: float
    """Mean share of the chosen tokens that a buffer lacks."""
    load_bandwidth: float
    """Rate in bytes per second of copies to the GPU."""
    save_bandwidth: float

    def step_ns(self, step: HiSparseStep) -> int:
        """Time in ns by which copies prolong each step."""
        filled = step.num_filled_tokens * self.token_bytes / self.load_bandwidth
        saved = step.num_saved_tokens * self.token_bytes / self.save_bandwidth
        return round(1e9 * (filled + saved) + self._swap_ns(step))

    def usual_ns(self, num_requests: int, context_tokens: float) -> int:
        """Time in ns by which copies prolong a step without new requests. context_tokens: KV tokens of each request."""
        num_long = num_requests if context_tokens > self.buffer_tokens else 0
        return self.step_ns(HiSparseStep(0, (), (), num_requests, 0, 0, 1, 0, 0, num_long, num_requests))

    def _swap_ns(self, step: HiSparseStep) -> float:
        """Time in ns of the kernels of all layers."""
        if not step.num_first_requests and not step.num_long_requests:
            return self.num_layers * SHORT_NS
        missed = self.chosen_tokens * (step.num_first_requests + self.miss_rate * step.num_long_requests)
        largest = self.chosen_tokens * (1 if step.num_first_requests else self.miss_rate)
        link_ns = 1e9 * missed * self.token_bytes / self.load_bandwidth
        return self.num_layers * FIND_NS + max(link_ns, self.num_layers * largest * TOKEN_NS)
