"""How the speed of virtual cores comes and goes, by what their neighbours on the server compute.

Measured on cores of a server with H200s (rows of `pace` of the validation-h200 study), six times for ten seconds: a
core computes at full speed, or 1.5 to 1.8 times as slowly for 15 to 53 % of the time.
"""

from dataclasses import dataclass
from random import Random

from pdsim.core.messages import PrefillStep
from pdsim.cost.model import CostModel, DecodeLine


@dataclass(frozen=True)
class OnCores:
    """A model whose steps are computed by the host's cores."""

    model: CostModel
    share: float = 1
    """Of what slow cores add to the host's work, as much is added to the steps'."""

    def prefill_ns(self, step: PrefillStep, start_ns: int, host_stretch: float = 1) -> int:
        return round(self._stretch(host_stretch) * self.model.prefill_ns(step, start_ns))

    def decode_line(self, num_requests: int, host_stretch: float = 1) -> DecodeLine:
        return self.model.decode_line(num_requests).stretched(self._stretch(host_stretch))

    def _stretch(self, host_stretch: float) -> float:
        return 1 + self.share * (host_stretch - 1)


class Pace:
    """Of one instance, whose ranks wait for each other: it is slow while the core of any is. Times never go back."""

    def __init__(
        self, instance_id: str, num_ranks: int, *, slowdown: float, share: float, spell_ns: int, seed: int
    ) -> None:
        """slowdown: how much longer a step takes on a slow core; share: of each core's time that is slow, below 1;
        spell_ns: mean length of a slow spell.
        """
        self._slow = 1 + slowdown
        self._cores = [_Core(Random(f"{seed}:{instance_id}:{rank}"), share, spell_ns) for rank in range(num_ranks)]
        self._stretch = 1.0
        self._until_ns = 0

    def stretch(self, at_ns: int) -> float:
        """How many times as long a core takes then as at full speed: 1, or 1 + slowdown."""
        if at_ns >= self._until_ns:
            for core in self._cores:
                core.follow(at_ns)
            self._until_ns = min(core.until_ns for core in self._cores)
            self._stretch = self._slow if any(core.is_slow for core in self._cores) else 1.0
        return self._stretch

    def steady_ns(self, at_ns: int) -> int:
        """How long nothing changes from then on."""
        self.stretch(at_ns)
        return self._until_ns - at_ns


class _Core:
    """Two states in turn, each for a time that is exponentially distributed; at first as it is at any time."""

    def __init__(self, rng: Random, share: float, spell_ns: float) -> None:
        self._rng = rng
        self._mean_ns = {True: spell_ns, False: spell_ns * (1 - share) / share}
        self.is_slow = rng.random() < share
        self.until_ns = self._spell_ns()

    def follow(self, at_ns: int) -> None:
        while self.until_ns <= at_ns:
            self.is_slow = not self.is_slow
            self.until_ns += self._spell_ns()

    def _spell_ns(self) -> int:
        return round(self._rng.expovariate(1 / self._mean_ns[self.is_slow]))
