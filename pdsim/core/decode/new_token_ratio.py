"""SGLang's new_token_ratio, by which the scheduler estimates the output tokens of running requests. A request is
expected to produce this share of the rest of its maximum output; in SimulatedEnds, this share of its maximum output.
"""

from collections.abc import Collection

from pdsim.core.decode.running_batch import RETRACT_STEPS, RunningRequest
from pdsim.core.fixed_outputs import INITIAL_RATIO

LEAST_FACTOR = 0.14
"""Minimum of new_token_ratio, divided by its initial value (SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR)."""
DECAY_STEPS = 600
"""Number of decode steps in which new_token_ratio falls from its initial value to its minimum
(SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS).
"""


class NewTokenRatio:
    """SGLang's new_token_ratio. Each decode step lowers the ratio by the same amount, down to a minimum, except steps
    that also compute prompts and the first step after a retraction. A formula gives the ratio after any number of
    steps, so the ratio does not depend on how many steps are simulated at once.
    """

    def __init__(self, conservativeness: float) -> None:
        """conservativeness: factor on the initial ratio, which is at most 1 (--schedule-conservativeness)."""
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._least = min(self._initial * LEAST_FACTOR, 1.0)
        self._decay = (self._initial - self._least) / DECAY_STEPS
        self._start = self._initial
        self._start_step = 0

    def at(self, num_steps: int) -> float:
        """Returns the ratio after the instance has run num_steps decode steps in all."""
        elapsed = num_steps - self._start_step
        return self._start if elapsed <= 0 else max(self._start - elapsed * self._decay, self._least)

    def on_idle(self, num_steps: int) -> None:
        self._start, self._start_step = self._initial, num_steps

    def on_mixed_step(self) -> None:
        """Counts a decode step that does not lower the ratio, because the step also computed prompts."""
        self._start_step += 1

    def on_retraction(self, num_steps: int, running: Collection[RunningRequest]) -> None:
        """Sets the ratio after a retraction to (outputs + RETRACT_STEPS per request) / (maximum outputs + 1), in tokens
        summed over the running requests, but at most to 1. The next step does not lower the ratio. num_steps: number of
        decode steps so far.
        """
        outputs = sum(request.num_output_tokens for request in running) + RETRACT_STEPS * len(running)
        self._start = min(1.0, outputs / (sum(request.max_output_tokens for request in running) + 1))
        self._start_step = num_steps + 1
