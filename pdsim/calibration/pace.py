"""How the speed of a core comes and goes: what rows of its spells say of pdsim/cost/pace.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdsim.calibration.rows import Floats, Measurements, Rows
from pdsim.scenario.cores import PaceSettings

_SLOW = 1.35
"""Times as long as the fastest tenth: cores wander by less, and loops take 1.7 times as long in slow spells."""


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
        """Each row is a spell: the mean time of some work in it, and how often that was done."""
        found = measurements.of("pace")
        if not found:
            return cls()
        spells = _Spells.of(found)
        slowdowns = spells.slowdowns()
        if not slowdowns:
            return cls()
        host = slowdowns.get("host", max(slowdowns.values()))
        slow_ns = spells.lasted_ns[spells.is_slow]
        return cls(
            slowdown=host,
            prefill=slowdowns.get("prefill", host),
            decode=slowdowns.get("decode", host),
            share=float(slow_ns.sum() / spells.lasted_ns.sum()),
            spell_ns=float(np.square(slow_ns).sum() / slow_ns.sum() / 2),
            slows="launches" if any(rows.columns["graph"].any() for rows in measurements.of("decode")) else "steps",
        )

    def settings(self) -> PaceSettings:
        """Of a scenario, `cost.pace`."""
        if not self.slowdown:
            return PaceSettings()
        slowdowns = {"prefill_slowdown": self.prefill, "decode_slowdown": self.decode}
        spells = {"slowdown": self.slowdown, "share": self.share, "spell": f"{round(self.spell_ns)} ns"}
        of_steps = slowdowns if self.slows == "steps" else {}
        return PaceSettings.model_validate({**spells, "slows": self.slows, **of_steps})

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


class _Spells(NamedTuple):
    """An element of each array for each spell."""

    new_tokens: Floats
    batch: Floats
    stretch: Floats
    """Times as long as the fastest tenth of the same work, in the mean over the spell."""
    repeats: Floats
    lasted_ns: Floats
    is_slow: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> "_Spells":
        """Slow are not only those that were taken for it: a core that is slow for a whole turn shows beside others."""
        told = {name: np.concatenate([of.columns[name] for of in rows]) for name in rows[0].columns}
        called_slow = np.concatenate([np.full(len(of), of.name == "slow") for of in rows])
        lasted_ns = (told["time_ns"] + 1e3 * told["rest_us"]) * told["repeats"]
        stretch = np.empty_like(lasted_ns)
        works = np.column_stack([told["new_tokens"], told["batch"]])
        for work in np.unique(works, axis=0):
            same = (works == work).all(axis=1)
            stretch[same] = told["time_ns"][same] / _fastest_tenth(told["time_ns"][same], lasted_ns[same])
        return cls(
            told["new_tokens"], told["batch"], stretch, told["repeats"], lasted_ns, called_slow | (stretch > _SLOW)
        )

    def slowdowns(self) -> dict[str, float]:
        """How much longer each work takes in slow spells, in the mean, if it has both kinds of them."""
        is_prefill, is_decode = self.new_tokens > 0, self.batch > 0
        found = {}
        for work, does in {"host": ~is_prefill & ~is_decode, "prefill": is_prefill, "decode": is_decode}.items():
            full, slow = does & ~self.is_slow, does & self.is_slow
            if full.any() and slow.any():
                found[work] = max(0.0, self._mean_stretch(slow) / self._mean_stretch(full) - 1)
        return found

    def _mean_stretch(self, chosen: NDArray[np.bool_]) -> float:
        return float(np.average(self.stretch[chosen], weights=self.repeats[chosen]))


def _fastest_tenth(time_ns: Floats, lasted_ns: Floats) -> float:
    """The time that is not exceeded in a tenth of all spells' length."""
    by_speed = np.argsort(time_ns)
    lasted = np.cumsum(lasted_ns[by_speed])
    return float(time_ns[by_speed][np.searchsorted(lasted, lasted[-1] / 10)])
