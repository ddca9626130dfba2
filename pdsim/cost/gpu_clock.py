"""How much slower a GPU is that has been computing without pause: its clock falls with its recent utilisation.

Measured on an H200 (data of the sglang-h200 study): the same forward takes 19 % longer at the end of a second of
uninterrupted forwards than after a pause, in proportion to an exponential average of utilisation over about 0.1 s.
"""

from math import exp


class GpuClock:
    """Follows the utilisation of one GPU, forward by forward."""

    def __init__(self, slowdown: float, memory_ns: float) -> None:
        """slowdown: at full utilisation; memory_ns: time constant of the average."""
        self._slowdown = slowdown
        self._memory_ns = memory_ns
        self._utilisation = 0.0
        self._busy_until_ns = 0

    def stretch(self, start_ns: int, duration_ns: float) -> float:
        """The duration of a forward that begins now and would take duration_ns on a GPU that had rested."""
        if not self._slowdown:
            return duration_ns
        at_start = self._utilisation * exp(-(start_ns - self._busy_until_ns) / self._memory_ns)
        x = duration_ns / self._memory_ns
        weight = (1 - exp(-x)) / x
        mean = at_start * weight + 1 - weight
        stretched = duration_ns * (1 + self._slowdown * mean)
        self._utilisation = 1 - (1 - at_start) * exp(-stretched / self._memory_ns)
        self._busy_until_ns = start_ns + round(stretched)
        return stretched
