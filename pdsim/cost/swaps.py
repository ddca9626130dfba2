"""Times of the copies between host memory and GPU that decode steps with HiSparse wait for."""

from pdsim.core.messages import HiSparseStep
from pdsim.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Copies of one rank's KV, without indexer keys, over its host link. All ranks of an instance copy at once.

    A step waits for its copies: a layer's attention begins when the layer's chosen tokens are on the GPU, and the next
    step when the tokens of the step before are saved (SGLang 0.5.23, managers/hisparse_coordinator.py:1587, 1265).
    """

    token_bytes: int
    """KV bytes of one token on one rank, over all layers."""
    missed_tokens: float
    """Mean number of chosen tokens that the buffer of a long request lacks in a step."""
    load_bandwidth: float
    """Rate in bytes per second of copies to the GPU."""
    save_bandwidth: float

    def step_ns(self, step: HiSparseStep) -> int:
        """Time in ns by which copies prolong each step."""
        num_loaded = step.num_loaded_tokens + self.missed_tokens * step.num_long_requests
        seconds = num_loaded / self.load_bandwidth + step.num_saved_tokens / self.save_bandwidth
        return round(1e9 * self.token_bytes * seconds)
