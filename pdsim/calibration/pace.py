"""How the speed of a core comes and goes: what rows of its spells say of pdsim/cost/pace.py."""

from dataclasses import dataclass

import numpy as np

from pdsim.calibration.rows import SPELLS, Measurements


@dataclass(frozen=True)
class CorePace:
    """Nothing slows it where no row says so."""

    slowdown: float = 0.0
    share: float = 0.0
    """Of time that is slow."""
    spell_ns: float = 0.0
    """Mean length of a slow spell."""

    @classmethod
    def of(cls, measurements: Measurements) -> "CorePace":
        """Each row is a spell: the mean time of a unit of work in it, and how many there were."""
        spells = {rows.name: rows.columns for rows in measurements.of("pace")}
        if not spells.keys() >= set(SPELLS):
            return cls()
        lasted_ns = {name: rows["time_ns"] * rows["repeats"] for name, rows in spells.items()}
        unit_ns = {name: lasted_ns[name].sum() / rows["repeats"].sum() for name, rows in spells.items()}
        slow_ns = lasted_ns["slow"].sum()
        return cls(
            slowdown=max(0.0, float(unit_ns["slow"] / unit_ns["full"] - 1)),
            share=float(slow_ns / (slow_ns + lasted_ns["full"].sum())),
            spell_ns=float(np.mean(lasted_ns["slow"])),
        )

    def mean_stretch(self, num_ranks: int) -> float:
        """Of steps one behind the other, which are fewer in slow spells; an instance is slow while any core is."""
        share = 1 - (1 - self.share) ** num_ranks
        return 1 / (1 - share + share / (1 + self.slowdown))
