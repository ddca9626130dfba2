"""Part of its longest output that a running request is expected to still produce."""

from collections.abc import Collection

from pdsim.core.decode.running_batch import RETRACT_STEPS, RunningRequest

INITIAL = 0.7
"""SGLANG_INIT_NEW_TOKEN_RATIO"""
LEAST_FACTOR = 0.14
"""SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR: of the initial one."""
DECAY_STEPS = 600
"""SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS: from the initial one to the least."""


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
