"""The outcome of a cluster: its runs read back, whole or ended when they missed the SLO."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from pdsim.study.planning.slo import Slo, Term
from pdsim.study.shard import read_shard

SATURATED = "cannot take the load"


@dataclass(frozen=True)
class Outcome:
    """Outcome of all seeds together."""

    meets: bool
    reason: str
    """Reason why it does not; empty if it does."""
    num_ended: int
    """Requests that had ended when it was sure."""
    attained: float | None = field(default=None, kw_only=True)
    """Share of the requests within all limits; None: the run was not whole."""
    goodput_per_s: float | None = field(default=None, kw_only=True)
    """Requests within all limits, per second."""
    strains: Mapping[Term, float]
    """Each term's percentile over its limit; empty if the run was not whole."""

    @property
    def strain(self) -> float:
        """The largest; infinite if they are not known."""
        return max(self.strains.values(), default=inf)

    @property
    def worst(self) -> Term | None:
        """The term that it is nearest to, or misses most."""
        return max(self.strains, key=self.strains.__getitem__, default=None)

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return f"it {SATURATED}" if self.reason == SATURATED else self.reason

    @property
    def lack(self) -> str:
        """Terms that it misses, and how far; the reason where that is not known."""
        lacks = [term.lack(strain) for term, strain in self.strains.items() if strain > 1]
        return self.why if self.reason == SATURATED or not lacks else " and ".join(lacks)

    def to_json(self) -> dict[str, Any]:
        strains = {str(term): strain if isfinite(strain) else None for term, strain in self.strains.items()}
        joint = {"attained": self.attained, "goodput_per_s": self.goodput_per_s}
        return {"meets": self.meets, "reason": self.reason, "of_limits": strains, **joint}


def read_outcome(paths: list[Path], slo: Slo, *, is_record: bool) -> Outcome:
    """Reads the shards of a point, one for each seed. Generated arrivals must not leave a growing queue;
    a record, with its own times, is judged as it was.
    """
    rows = [read_shard(path).to_pylist()[0] for path in paths]
    num_ended = sum(row["completed"] or 0 for row in rows)
    bad = [row for row in rows if row["status"] != "ok"]
    if bad:
        return Outcome(meets=False, reason=bad[0]["message"], num_ended=num_ended, strains={})
    strains = {term: fmean(term.strain_of_row(row) for row in rows) for term in slo.terms}
    missed = [term.missed for term, strain in strains.items() if strain > 1]
    reason = SATURATED if not is_record and any(row["saturated"] for row in rows) else " and ".join(missed)
    kept = [slo.num_kept(row) for row in rows]
    sent = [row["completed"] + row["failed"] + row["unfinished"] for row in rows]
    return Outcome(
        meets=not reason,
        reason=reason,
        num_ended=num_ended,
        strains=strains,
        attained=sum(kept) / max(1, sum(sent)),
        goodput_per_s=fmean(
            count / row["duration"] if row["duration"] else 0.0 for count, row in zip(kept, rows, strict=True)
        ),
    )
