"""What a scenario says of its host's cores."""

from typing import Literal

from pydantic import Field

from pdsim.cost.pace import Pace
from pdsim.scenario.quantity import Duration
from pdsim.scenario.section import Section


class WakingSettings(Section):
    """What a prefill instance's forward takes longer behind a pause, where cores compute it."""

    most: Duration = 0
    """Behind a long one; 0: nothing."""
    memory: Duration = Field(default=10_000_000, ge=1000)
    """Time constant: behind a pause as long it is 63 % of it."""


class PaceSettings(Section):
    """How the speed of the host's cores comes and goes, where they are virtual: those of instances and of senders."""

    slowdown: float = Field(default=0, ge=0)
    """How much longer cores take in a slow spell; 0: there are none."""
    slows: Literal["steps", "launches"] = "steps"
    """Whole steps, which cores compute; or of a GPU's, what its host has: the least times and the rest."""
    prefill_slowdown: float | None = Field(default=None, ge=0)
    """Of whole prefill steps; None: the same."""
    decode_slowdown: float | None = Field(default=None, ge=0)
    """Of whole decode steps; None: the same."""
    share: float = Field(default=0.1, ge=0, lt=1)
    """Of each core's time that is slow; an instance is while the core of any of its ranks is."""
    spell: Duration = Field(default=100_000_000, ge=100_000)
    """Mean length of a slow spell."""
    seed: int = 0
    """Of the spells, which depend on nothing else of a scenario."""

    @property
    def is_none(self) -> bool:
        return not (self.slowdown and self.share)

    def of(self, instance_id: str, num_ranks: int) -> Pace | None:
        """A fresh one; None: the instance is never slow."""
        if self.is_none:
            return None
        return Pace(
            instance_id, num_ranks, slowdown=self.slowdown, share=self.share, spell_ns=self.spell, seed=self.seed
        )
