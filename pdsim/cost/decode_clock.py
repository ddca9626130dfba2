"""Ends of decode steps, one at a time or many at once, to the same nanosecond.

Every step adds the same number of KV tokens, so durations of consecutive steps are an arithmetic progression and the
time of n steps is a quadratic in n. Fractions of a nanosecond carry over to the next step: n steps at once take
exactly what n steps one by one take.
"""

from math import ceil, sqrt

from pdsim.core.messages import DecodeStep
from pdsim.cost.model import FRACTION_BITS, DecodeLine

_MASK = (1 << FRACTION_BITS) - 1


class DecodeClock:
    """Times the steps of one instance. `begin` a step, ask about it, `finish` it."""

    __slots__ = ("_carry", "_first", "_growth")

    def __init__(self) -> None:
        self._carry = 0
        self._first = 0
        self._growth = 0

    def begin(self, line: DecodeLine, step: DecodeStep) -> None:
        per_context, per_distinct = line.per_context_token, line.per_distinct_token
        self._first = line.base + per_context * step.num_context_tokens + per_distinct * step.num_distinct_tokens
        self._growth = (per_context + per_distinct) * step.num_requests

    @property
    def growth_ns(self) -> float:
        """Time by which each step is longer than the one before."""
        return self._growth / (1 << FRACTION_BITS)

    @property
    def first_ns(self) -> int:
        return (self._carry + self._first) >> FRACTION_BITS

    def duration_ns(self, num_steps: int) -> int:
        return (
            self._carry + num_steps * self._first + self._growth * (num_steps * (num_steps - 1) // 2)
        ) >> FRACTION_BITS

    def steps_until(self, elapsed_ns: int) -> int:
        """The number of steps at whose end at least elapsed_ns have passed; at least 1."""
        need = elapsed_ns << FRACTION_BITS
        linear = self._first - self._growth / 2
        n = ceil(
            (sqrt(linear * linear + 2 * self._growth * need) - linear) / self._growth if self._growth else need / linear
        )
        while n > 1 and self.duration_ns(n - 1) >= elapsed_ns:
            n -= 1
        while n < 1 or self.duration_ns(n) < elapsed_ns:
            n += 1
        return n

    def finish(self, num_steps: int) -> None:
        total = self._carry + num_steps * self._first + self._growth * (num_steps * (num_steps - 1) // 2)
        self._carry = total & _MASK
