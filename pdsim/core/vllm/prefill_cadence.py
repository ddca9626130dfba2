"""Holds prompts back for some steps of a vLLM instance, so that these steps only decode (prefill_schedule_interval).

vLLM 0.33.0, v1/core/sched/scheduler.py: 404 reads the interval, 780 skips prompts in a step, 1614 stops holding back
because prompts still wait, 1628 starts the count again. Law: tests/laws/test_prefill_cadence.py.
"""


class PrefillCadence:
    """After a step that computes a prompt, holds prompts back for interval_steps - 1 steps, while requests decode.

    If prompts still wait after a step that could begin prompts, the instance is behind. An instance that is behind
    holds no prompt back until a step leaves no prompt waiting.
    """

    def __init__(self, interval_steps: int) -> None:
        """interval_steps: at most one of this number of consecutive steps computes prompts, while requests decode and
        the instance is not behind. 1: every step may compute prompts.
        """
        self._interval_steps = interval_steps
        self._num_steps = 0
        self._last = -interval_steps
        """Serial number of the last step that computed a prompt; the first step has number 1. Negative: no step has."""
        self._is_behind = False

    @property
    def num_held_steps(self) -> int:
        """Number of steps, starting with the next step, that compute no prompt while requests decode."""
        return 0 if self._is_behind else max(0, self._last + self._interval_steps - self._num_steps - 1)

    def on_filled(self, num_waiting: int) -> None:
        """Notes the number of prompts that still wait after a step that could begin prompts."""
        self._is_behind = num_waiting > 0

    def on_steps(self, num_steps: int, *, has_prompts: bool) -> None:
        """Counts computed steps. has_prompts: True: the last of these steps computed a prompt."""
        self._num_steps += num_steps
        if has_prompts:
            self._last = self._num_steps
