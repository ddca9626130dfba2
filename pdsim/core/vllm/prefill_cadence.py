"""Steps of a vLLM instance that compute no prompts, so that others decode undisturbed (prefill_schedule_interval).

vLLM 0.33.0, v1/core/sched/scheduler.py: 404 (the interval), 780 (held steps), 1614 (behind), 1628 (restart). Law:
tests/laws/test_prefill_cadence.py.
"""


class PrefillCadence:
    """Holds prompts back in the interval - 1 steps after a step that computes a prompt, while requests decode.

    If prompts still wait after a step that may begin them, the instance is behind, and holds nothing back until a step
    leaves none waiting.
    """

    def __init__(self, interval_steps: int) -> None:
        """interval_steps: 1 holds nothing back."""
        self._interval_steps = interval_steps
        self._num_steps = 0
        self._last = -interval_steps
        """Number of the last step that computed a prompt."""
        self._is_behind = False

    @property
    def num_held_steps(self) -> int:
        """Number of steps, from the next one on, that compute no prompt while requests decode."""
        return 0 if self._is_behind else max(0, self._last + self._interval_steps - self._num_steps - 1)

    def on_filled(self, num_waiting: int) -> None:
        """Handles a step that could begin prompts, and left this number waiting."""
        self._is_behind = num_waiting > 0

    def on_steps(self, num_steps: int, *, has_prompts: bool) -> None:
        """Counts computed steps. has_prompts: the last of them computed a prompt."""
        self._num_steps += num_steps
        if has_prompts:
            self._last = self._num_steps
