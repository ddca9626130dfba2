"""How the speed of a core comes and goes: what rows of its spells say of pdsim/cost/pace.py."""

from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

import numpy as np

from pdsim.calibration.rows import FORWARDS, SPELLS, Floats, Measurements, Rows

_LEAST_ROUNDS = 3
"""Of two neither is the usual one."""
_SLOW_ROUND = 1.2
"""Times the median of a shape's rounds: these scatter by some percent, and slow cores add a quarter and more."""


@dataclass(frozen=True)
class CorePace:
    """Nothing slows it where no row says so."""

    slowdown: float = 0.0
    """Of what the host does."""
    prefill: float = 0.0
    """Of whole steps, if cores compute them."""
    decode: float = 0.0
    share: float = 0.0
    """Of time that is slow."""
    spell_ns: float = 0.0
    """Mean length of exponentially distributed spells in which slow steps would find themselves in as long a one."""
    slows: Literal["steps", "launches"] = "steps"
    """The GPU computes a step that replays a graph, and cores launch it."""

    @classmethod
    def of(cls, measurements: Measurements) -> "CorePace":
        """Each row is a spell: the mean time of a unit of work in it, and how many there were."""
        spells = {rows.name: rows.columns for rows in measurements.of("pace")}
        if not spells.keys() >= set(SPELLS):
            return cls()
        lasted_ns = {name: rows["time_ns"] * rows["repeats"] for name, rows in spells.items()}
        unit_ns = {name: lasted_ns[name].sum() / rows["repeats"].sum() for name, rows in spells.items()}
        slow_ns = lasted_ns["slow"]
        slowdown = max(0.0, float(unit_ns["slow"] / unit_ns["full"] - 1))
        of_steps = {rows.kind: _of_steps(rows, slowdown) for kind in FORWARDS for rows in measurements.of(kind)}
        return cls(
            slowdown=slowdown,
            prefill=of_steps.get("prefill", slowdown),
            decode=of_steps.get("decode", slowdown),
            share=float(slow_ns.sum() / (slow_ns.sum() + lasted_ns["full"].sum())),
            spell_ns=float(np.square(slow_ns).sum() / slow_ns.sum() / 2),
            slows="launches" if any(rows.columns["graph"].any() for rows in measurements.of("decode")) else "steps",
        )

    def rest_ns(self, period_ns: Floats, step_ns: Floats, num_ranks: int) -> Floats:
        """At full speed, of loops with such mean periods, and steps that were measured alone."""
        if self.slows == "launches":
            return self.loop_ns(np.maximum(period_ns - step_ns, 0), num_ranks)
        return np.maximum(period_ns / (1 + self._slow_steps(num_ranks) * self.decode) - step_ns, 0)

    def loop_ns(self, mean_ns: Floats, num_ranks: int) -> Floats:
        """At full speed, of what takes the host such a time in the mean over a loop's steps."""
        return mean_ns / (1 + self._slow_steps(num_ranks) * self.slowdown)

    def _slow_steps(self, num_ranks: int) -> float:
        """Of a loop's steps, how many are slow: an instance is while any rank's core is.

        Of whole steps in a row there are fewer in slow spells.
        """
        share = 1 - (1 - self.share) ** num_ranks
        return share if self.slows == "launches" else share / (1 + self.decode * (1 - share))


def _of_steps(rows: Rows, otherwise: float) -> float:
    """How much longer than the median of their shape those rounds took that were slow, in the mean."""
    rounds = [times_ns for times_ns in rows.rounds_ns if len(times_ns) >= _LEAST_ROUNDS]
    stretches = [time_ns / median(times_ns) for times_ns in rounds for time_ns in times_ns]
    slow = [stretch for stretch in stretches if stretch > _SLOW_ROUND]
    return fmean(slow) - 1 if slow else otherwise
