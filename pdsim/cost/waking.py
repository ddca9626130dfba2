"""A core that has waited computes its next forward more slowly.

Measured on a virtual machine with two cores (rows of `waking` of the validation-two-cores study): behind a long pause a
forward takes 2.5 ms longer, of whatever size it is.
"""

from math import exp, inf

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


class Waking:
    """A model whose prefill forwards take longer, the longer none was computed before."""

    def __init__(self, model: CostModel, most_ns: float, memory_ns: float) -> None:
        """most_ns: after a pause that is much longer than memory_ns, its time constant."""
        self._model = model
        self._most_ns = most_ns
        self._memory_ns = memory_ns
        self._busy_until_ns = -inf

    def prefill_ns(self, step: PrefillStep, start_ns: int, host_stretch: float = 1) -> int:
        idle_ns = max(0.0, start_ns - self._busy_until_ns)
        waking_ns = host_stretch * self._most_ns * (1 - exp(-idle_ns / self._memory_ns))
        duration_ns = self._model.prefill_ns(step, start_ns, host_stretch) + round(waking_ns)
        self._busy_until_ns = start_ns + duration_ns
        return duration_ns

    def decode_line(self, num_requests: int, host_stretch: float = 1) -> DecodeLine:
        return self._model.decode_line(num_requests, host_stretch)
