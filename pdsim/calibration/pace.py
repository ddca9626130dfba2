"""How the speed of a core comes and goes: what rows of its spells say of pdsim/cost/pace.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdsim.calibration.rows import Columns, Floats, Measurements, Rows
from pdsim.scenario.cores import PaceSettings

_SLOW = 1.35
"""Times as long as the fastest tenth: cores wander by less, and loops take 1.7 times as long in slow spells."""
_WORKS = ("host", "prefill", "decode")


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
        rows = _all_spells(found)
        watched = {work: _Spells.of(rows, work) for work in _WORKS}
        slowdowns = {work: slowdown for work, of in watched.items() if (slowdown := of.slowdown) is not None}
        if not slowdowns:
            return cls()
        host = slowdowns.get("host", max(slowdowns.values()))
        slow_ns = np.concatenate([of.slow_ns for of in watched.values()])
        return cls(
            slowdown=host,
            prefill=slowdowns.get("prefill", host),
            decode=slowdowns.get("decode", host),
            share=float(slow_ns.sum() / sum(of.lasted_ns.sum() for of in watched.values())),
            spell_ns=float(np.square(slow_ns).sum() / slow_ns.sum() / 2),
            slows="launches" if any(rows.columns["graph"].any() for rows in measurements.of("decode")) else "steps",
        )

    def settings(self) -> PaceSettings:
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


@dataclass(frozen=True)
class _Spells:
    """Of cores that did one kind of work: a time of it, how many there were, and with rests, in each spell."""

    time_ns: Floats
    repeats: Floats
    lasted_ns: Floats
    is_slow: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Columns, work: str) -> "_Spells":
        sizes = {"prefill": rows["new_tokens"] > 0, "decode": rows["batch"] > 0}
        does = sizes.get(work, ~sizes["prefill"] & ~sizes["decode"])
        time_ns, repeats = rows["time_ns"][does], rows["repeats"][does]
        lasted_ns = (time_ns + 1e3 * rows["rest_us"][does]) * repeats
        is_slow = (rows["is_slow"][does] > 0) | (time_ns > _SLOW * _fastest_tenth(time_ns, lasted_ns))
        return cls(time_ns, repeats, lasted_ns, is_slow)

    @property
    def slow_ns(self) -> Floats:
        return self.lasted_ns[self.is_slow]

    @property
    def slowdown(self) -> float | None:
        """How much longer the work takes in slow spells, in the mean; None: there are none, or no others."""
        if self.is_slow.all() or not self.is_slow.any():
            return None
        full_ns, slow_ns = (
            np.average(self.time_ns[chosen], weights=self.repeats[chosen]) for chosen in (~self.is_slow, self.is_slow)
        )
        return max(0.0, float(slow_ns / full_ns - 1))


def _all_spells(rows: Sequence[Rows]) -> Columns:
    """With what the watching core took them for."""
    told = [{**of.columns, "is_slow": np.full(len(of), float(of.name == "slow"))} for of in rows]
    return {name: np.concatenate([columns[name] for columns in told]) for name in told[0]}


def _fastest_tenth(time_ns: Floats, lasted_ns: Floats) -> float:
    """The time that is not exceeded in a tenth of all spells' length."""
    if not len(time_ns):
        return 0.0
    by_speed = np.argsort(time_ns)
    lasted = np.cumsum(lasted_ns[by_speed])
    return float(time_ns[by_speed][np.searchsorted(lasted, lasted[-1] / 10)])
