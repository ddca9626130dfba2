"""SGLang's new_token_ratio: expected share of its longest output that a running request will still produce."""

from collections.abc import Collection

from pdsim.core.decode.running_batch import RETRACT_STEPS, RunningRequest
from pdsim.core.fixed_outputs import INITIAL_RATIO

LEAST_FACTOR = 0.14
"""SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR: minimum, relative to the initial ratio."""
DECAY_STEPS = 600
"""SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS: number of steps from the initial ratio to the minimum."""


class NewTokenRatio:
    """Expected share of its longest output that a running request will still produce. The ratio falls by an equal
    amount with every decode step, in closed form, so that many steps at once equal single steps.
    """

    def __init__(self, conservativeness: float) -> None:
        """conservativeness: --schedule-conservativeness, a factor on the initial ratio."""
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._least = min(self._initial * LEAST_FACTOR, 1.0)
        self._decay = (self._initial - self._least) / DECAY_STEPS
        self._start = self._initial
        self._start_step = 0

    def at(self, num_steps: int) -> float:
        """The ratio after the instance has run this number of decode steps."""
        elapsed = num_steps - self._start_step
        return self._start if elapsed <= 0 else max(self._start - elapsed * self._decay, self._least)

    def on_idle(self, num_steps: int) -> None:
        self._start, self._start_step = self._initial, num_steps

    def on_mixed_step(self) -> None:
        """Counts a step that does not lower the ratio, because it also computed prompts."""
        self._start_step += 1

    def on_retraction(self, num_steps: int, running: Collection[RunningRequest]) -> None:
        """Sets the ratio to the share of their longest outputs that running requests have produced. The next step does
        not lower the ratio.
        """
        outputs = sum(request.num_output_tokens for request in running) + RETRACT_STEPS * len(running)
        self._start = min(1.0, outputs / (sum(request.max_output_tokens for request in running) + 1))
        self._start_step = num_steps + 1
